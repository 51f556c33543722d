/* Copies rows from anywhere in memory into a batch, computes the order of an epoch, and finds the files of samples.
 *
 * No Python.h: the library is called through ctypes, which releases the GIL for the whole call, so one build serves
 * every Python. Rows are checked to be within their memory. The one fault that this cannot exclude is a SIGBUS, because
 * another process may truncate a file while it is mapped here: the copy then stops and returns the number of a row. Other
 * readers of a guarded mapping, such as numpy and pyarrow, read zeros, and the mapping is marked.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
/* Rows ahead of the copy whose first cache lines are loaded (of 2 KiB, all): far enough to hide a miss of cache and TLB. */
#define AHEAD 4
#define AHEAD_SMALL 16 /* of rows of at most two lines, without lengths */
#define LINE 64
#define MAX_LINES 32
#define PART (256 << 10) /* bytes that a thread copies at a time, at least */
#define MIN_NONTEMPORAL 512 /* bytes of a row */
#define ANYWHERE INT64_MAX /* as a stride: rows that do not follow each other, such as byte strings of Python */
#define TIME_SLICE 20000000 /* nanoseconds */

static int64_t page; /* bytes */

/* A mapped file: its pages without a file are replaced by zeros as soon as one is read. It is in use if it has bytes. */
typedef struct guard {
    int64_t lost, address, bytes; /* lost: whether pages were replaced */
    struct guard *next;
} guard_t;

static guard_t *guards;           /* never freed, since a handler may read them */
EXPORT int64_t rankfeed_lost = 0; /* mappings that were marked as lost, ever */

/* Replace the pages of a guarded mapping from the one with this address, all of which are behind the end of its file.
 * Returns whether there is such a mapping. */
static int replace_pages(int64_t address) {
    for (guard_t *guard = __atomic_load_n(&guards, __ATOMIC_ACQUIRE); guard; guard = guard->next) {
        const int64_t bytes = __atomic_load_n(&guard->bytes, __ATOMIC_ACQUIRE), end = guard->address + bytes;
        if (!bytes || address < guard->address || address >= (end + page - 1) / page * page)
            continue;
        const int64_t first = address / page * page;
        __atomic_store_n(&guard->lost, 1, __ATOMIC_RELEASE); /* before a zero is read */
        __atomic_add_fetch(&rankfeed_lost, 1, __ATOMIC_RELEASE);
        return mmap((void *)first, end - first, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    }
    return 0;
}

static __thread sigjmp_buf truncated;
static __thread volatile sig_atomic_t copying;
static struct sigaction previous;
static volatile sig_atomic_t passed_on;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    const int error = errno;
    (void)number, (void)context;
    if (copying) {
        copying = 0;
        siglongjmp(truncated, 1);
    }
    const int is_replaced = replace_pages((int64_t)info->si_addr);
    errno = error;
    if (is_replaced)
        return;
    /* Not ours: the instruction runs again and faults under the other handler, once. That may be one which restores
     * ours (faulthandler, if it was enabled after us), or returns at once (if it was disabled since then): the next
     * fault ends the process. */
    struct sigaction other = previous;
    other.sa_flags |= SA_RESETHAND;
    if (passed_on)
        signal(SIGBUS, SIG_DFL);
    else
        sigaction(SIGBUS, &other, NULL);
    passed_on = 1;
}

/* Another library (faulthandler) may install its handler at any time, so this is checked at each call. */
static void install_handler(void) {
    struct sigaction current, ours;
    if (sigaction(SIGBUS, NULL, &current) || ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_sigbus))
        return;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_sigbus;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* NODEFER: siglongjmp need not restore the signal mask */
    if (!passed_on || (current.sa_flags & SA_SIGINFO) || current.sa_handler != SIG_DFL)
        previous = current; /* else the other one has had its fault, and is to have the next one too */
    passed_on = 0;
    sigaction(SIGBUS, &ours, NULL);
}

/* An invalid address does no harm. Unsigned numbers, because the row's bounds are checked later. */
static void prefetch(uint64_t row, uint64_t bytes) {
    uint64_t most = bytes < MAX_LINES * LINE ? bytes : MAX_LINES * LINE;
    for (uint64_t at = 0; at < most; at += LINE)
        __builtin_prefetch((const char *)(row + at), 0, 2);
}

/* Memory that rows are in; of its file descriptor (-1 for none), mapped size and address, and the call that checked it. */
typedef struct {
    int64_t address, bytes, descriptor, mapped, mapping, checked;
} memory_t;

/* Rows of a column. Row i begins first[i] * step bytes into memory[part[i]] and has lengths[i] elements of `width` bytes.
 * Without part, all rows are in memory[0]; without lengths, each has one element. None of these arrays is in a file. */
typedef struct {
    memory_t *memory;
    const int32_t *part;
    const int64_t *first;
    const int64_t *lengths;
    int64_t step, width;
} rows_t;

/* What a call returns: the number of a row and what is wrong with it, or 0. */
enum { OUT_OF_BOUNDS = 1, TOO_LONG, TRUNCATED, FAULTS };

static int64_t last_call;

/* Find a row whose file is shorter than its mapping. Each file is checked once, whatever its rows. */
static int64_t find_truncated(const rows_t *rows, int64_t at, int64_t n) {
    int64_t call = __atomic_add_fetch(&last_call, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < (rows->part ? n : n > 0); i++) {
        memory_t *file = rows->memory + (rows->part ? rows->part[at + i] : 0);
        struct stat found;
        if (file->descriptor < 0 || __atomic_load_n(&file->checked, __ATOMIC_RELAXED) == call)
            continue;
        __atomic_store_n(&file->checked, call, __ATOMIC_RELAXED);
        if (fstat((int)file->descriptor, &found) || found.st_size < file->mapped)
            return i * FAULTS + TRUNCATED;
    }
    return 0;
}

/* Find row i: its memory, where it starts there, and its bytes. Returns whether it is within that memory. */
static int find_row(const rows_t *rows, int64_t i, const memory_t **from, int64_t *start, int64_t *size) {
    *from = rows->memory + (rows->part ? rows->part[i] : 0);
    return !(__builtin_mul_overflow(rows->lengths ? rows->lengths[i] : 1, rows->width, size) ||
             __builtin_mul_overflow(rows->first[i], rows->step, start) || *start < 0 || *size < 0 ||
             *start > (*from)->bytes || *size > (*from)->bytes - *start);
}

static void drop_pages(int descriptor, int64_t start, int64_t bytes) {
#ifdef POSIX_FADV_DONTNEED /* not on macOS */
    posix_fadvise(descriptor, start, bytes, POSIX_FADV_DONTNEED);
#endif
}

/* Advise the kernel of the pages of n rows from row `at`: to read them soon, or to drop them from the page cache. Rows that
 * are not in a file are left out; pages that rows share with others are read, but not dropped. */
EXPORT void rankfeed_advise(const rows_t *rows, int64_t at, int64_t n, int32_t drop) {
    const memory_t *file = 0;
    int64_t low = 0, high = 0; /* addresses of rows that follow each other */
    for (int64_t i = 0; i <= n; i++) {
        const memory_t *from = 0;
        int64_t start = 0, size = 0;
        if (i < n && (!find_row(rows, at + i, &from, &start, &size) || from->descriptor < 0))
            continue;
        if (from && from == file && from->address + start == high) {
            high += size;
            continue;
        }
        if (file) {
            int64_t begin = drop ? (low + page - 1) / page * page : low / page * page;
            int64_t end = drop ? high / page * page : high;
            if (begin < end && !madvise((void *)begin, end - begin, drop ? MADV_DONTNEED : MADV_WILLNEED) && drop)
                drop_pages((int)file->descriptor, begin - file->mapping, end - begin);
        }
        file = from;
        if (from)
            low = from->address + start, high = low + size;
    }
}

/* Whether batches are written past the caches. Those of a worker process have left them when another process reads them. */
static int32_t nontemporal;

EXPORT void rankfeed_use_nontemporal_stores(void) {
    nontemporal = 1;
}

/* Copy n bytes, or write zeros if there is no source. */
static void store(char *to, const char *from, int64_t n, int32_t bypass) {
#ifdef __SSE2__
    if (bypass && n >= MIN_NONTEMPORAL) {
        int64_t first = -(uintptr_t)to % LINE, lines = (n - first) / LINE;
        store(to, from, first, 0);
        __m128i *target = (__m128i *)(to + first);
        const __m128i *source = (const __m128i *)(from + first);
        for (int64_t i = 0; i < lines * (LINE / 16); i++)
            _mm_stream_si128(target + i, from ? _mm_loadu_si128(source + i) : _mm_setzero_si128());
        to += first + lines * LINE, from += from ? first + lines * LINE : 0, n -= first + lines * LINE;
    }
#endif
    from ? memcpy(to, from, n) : memset(to, 0, n);
}

/* Find where row i is copied to, and where its padding ends. Returns whether it fits: offsets may be from damaged lengths. */
static int find_target(const int64_t *offsets, int64_t i, int64_t width, int64_t stride, int64_t size, int64_t *target,
                       int64_t *end) {
    if (!offsets)
        *target = i * stride, *end = *target + stride;
    else if (__builtin_mul_overflow(offsets[i], width, target))
        return 0;
    else if (stride == ANYWHERE)
        *end = *target + size;
    else if (__builtin_mul_overflow(offsets[i + 1], width, end) || *end > stride)
        return 0;
    return *target >= 0 && *end >= *target && size <= *end - *target;
}

/* Copy n rows from row `at` to `out`, for i from 0, and fill the rest of their space with zeros.
 *
 * Without offsets, row i has the stride bytes from i * stride. With offsets, it has the elements from offsets[i] to
 * offsets[i + 1], and stride is the size of `out`; or ANYWHERE, where it has no more than its size from offsets[i].
 */
static int64_t copy_rows(const rows_t *given, int64_t at, int64_t n, const int64_t *offsets, char *out, int64_t stride) {
    const rows_t local = *given, *rows = &local; /* in registers */
    const int32_t bypass = nontemporal && stride != ANYWHERE; /* strings are copied once more */
    volatile int64_t row = 0;
    /* Rows that follow each other in memory and in the batch are copied at once. */
    const char *run = 0;
    char *run_target = out;
    int64_t run_size = 0, run_row = 0;
    const int64_t ahead = !rows->lengths && rows->width <= 2 * LINE ? AHEAD_SMALL : AHEAD;
    install_handler();
    if (sigsetjmp(truncated, 0))
        return row * FAULTS + TRUNCATED;
    copying = 1;
    for (int64_t i = 0; i < n; i++) {
        const memory_t *from;
        int64_t size, start, target, end, fault = 0;
        if (!find_row(rows, at + i, &from, &start, &size))
            fault = OUT_OF_BOUNDS;
        else if (!find_target(offsets, i, rows->width, stride, size, &target, &end))
            fault = TOO_LONG;
        if (fault) {
            copying = 0;
            return i * FAULTS + fault;
        }
        const char *source = (const char *)from->address + start;
        if (source == run + run_size && out + target == run_target + run_size) {
            run_size += size;
        } else {
            int64_t next = at + i + ahead;
            if (next < at + n)
                prefetch((uint64_t)rows->memory[rows->part ? rows->part[next] : 0].address +
                             (uint64_t)rows->first[next] * (uint64_t)rows->step,
                         (uint64_t)(rows->lengths ? rows->lengths[next] : 1) * (uint64_t)rows->width);
            row = run_row;
            if (run_size)
                store(run_target, run, run_size, bypass);
            run = source, run_target = out + target, run_size = size, run_row = i;
        }
        if (target + size < end)
            store(out + target + size, 0, end - target - size, bypass);
    }
    row = run_row;
    if (run_size)
        store(run_target, run, run_size, bypass);
    copying = 0;
#ifdef __SSE2__
    _mm_sfence(); /* another process may read the batch from now on */
#endif
    return 0;
}

/* The same, and find a file that was truncated: the rest of a page behind its end reads as zeros. */
EXPORT int64_t rankfeed_copy_rows(const rows_t *rows, int64_t at, int64_t n, const int64_t *offsets, char *out,
                                  int64_t stride) {
    int64_t found = copy_rows(rows, at, n, offsets, out, stride);
    return found ? found : find_truncated(rows, at, n);
}

/* A copy that threads make together: the arguments of rankfeed_copy_rows; what it returned for rows that it could not copy,
 * or 0; whether it is made; the time of the threads of this library; rows that are taken, and threads that copy some of them.
 * Python sets `result` to LOST and `done` to 1, which is right for one that is never submitted, and the rest to 0. */
typedef struct job {
    const rows_t *rows;
    int64_t at, n;
    const int64_t *offsets;
    char *out;
    int64_t stride, result, done, nanoseconds, taken, active;
    struct job *next;
} job_t;

enum { LOST = -1 }; /* the result of a job whose thread a fork has left in the parent */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t submitted = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static job_t *jobs; /* submitted and not done, the oldest first */
static int64_t threads;

/* Guard a mapped file until `rankfeed_unguard`. Returns what begins with a number that is not 0 if pages were replaced, so
 * that zeros may have been read; or NULL without memory. */
EXPORT guard_t *rankfeed_guard(int64_t address, int64_t bytes) {
    pthread_mutex_lock(&lock);
    guard_t *guard = guards;
    while (guard && guard->bytes)
        guard = guard->next;
    const int is_new = !guard;
    if (is_new)
        guard = calloc(1, sizeof *guard);
    if (guard) {
        guard->lost = 0, guard->address = address;
        __atomic_store_n(&guard->bytes, bytes, __ATOMIC_RELEASE);
        if (is_new) {
            guard->next = guards;
            __atomic_store_n(&guards, guard, __ATOMIC_RELEASE);
        }
    }
    install_handler();
    pthread_mutex_unlock(&lock);
    return guard;
}

/* Called before the mapping is removed. */
EXPORT void rankfeed_unguard(guard_t *guard) {
    __atomic_store_n(&guard->bytes, 0, __ATOMIC_RELEASE);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The oldest job with rows that are not taken. The lock is held by the caller. */
static job_t *next_job(void) {
    job_t *job = jobs;
    while (job && job->taken == job->n)
        job = job->next;
    return job;
}

/* Take the next rows of a job, at least PART bytes; returns their number. */
static int64_t take_rows(job_t *job) {
    const int64_t first = job->taken, left = job->n - first, *lengths = job->offsets ? job->rows->lengths : 0;
    const uint64_t size = job->offsets ? job->rows->width : job->stride;
    if (!lengths) /* rows of one size */
        job->taken += size && PART / size < (uint64_t)left ? (int64_t)(PART / size) + 1 : left;
    else
        for (uint64_t bytes = 0; job->taken < job->n && bytes < PART; job->taken++)
            bytes += lengths[job->at + job->taken] * size; /* unsigned: lengths may be damaged */
    return job->taken - first;
}

/* Copy some rows of a job. The lock is held by the caller, but not while rows are copied. */
static void copy_part(job_t *job, int32_t is_timed) {
    const int64_t first = job->taken, n = take_rows(job), *offsets = job->offsets ? job->offsets + first : 0;
    char *out = job->out + (offsets ? 0 : first * job->stride);
    job->active++;
    pthread_mutex_unlock(&lock);
    int64_t began = now();
    int64_t found = copy_rows(job->rows, job->at + first, n, offsets, out, job->stride);
    int64_t nanoseconds = now() - began;
    pthread_mutex_lock(&lock);
    if (is_timed)
        job->nanoseconds += nanoseconds;
    if (found)
        job->result = found, job->taken = job->n; /* the rest need not be copied */
    if (--job->active || job->taken < job->n)
        return;
    if (!job->result) {
        pthread_mutex_unlock(&lock);
        found = find_truncated(job->rows, job->at, job->n);
        pthread_mutex_lock(&lock);
        job->result = found;
    }
    job_t **list = &jobs;
    while (*list != job)
        list = &(*list)->next;
    *list = job->next, job->done = 1;
    pthread_cond_broadcast(&finished);
}

static void *run_jobs(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (job_t *job;;)
        (job = next_job()) ? copy_part(job, 1) : (void)pthread_cond_wait(&submitted, &lock);
    return 0;
}

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    for (job_t *job = jobs; job; job = job->next)
        job->result = LOST, job->done = 1;
    jobs = 0, threads = 0;
    pthread_cond_init(&submitted, 0);
    pthread_cond_init(&finished, 0);
    pthread_mutex_init(&lock, 0);
}

__attribute__((constructor)) static void on_load(void) {
    page = sysconf(_SC_PAGESIZE);
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* Start threads until there are `wanted`. They leave signals to other threads, except for that of a truncated file. */
static void start_threads(int64_t wanted) {
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    for (; threads < wanted; threads++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, run_jobs, 0))
            break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Let threads make a copy, of which there are at least `wanted`. Returns 0 if there is none, or nothing to copy. */
EXPORT int32_t rankfeed_submit(job_t *job, int64_t wanted) {
    pthread_mutex_lock(&lock);
    if (threads < wanted)
        start_threads(wanted);
    int32_t is_submitted = threads > 0 && job->n > 0;
    if (is_submitted) {
        job_t **last = &jobs;
        while (*last)
            last = &(*last)->next;
        job->result = job->done = 0, *last = job;
        pthread_cond_signal(&submitted);
    }
    pthread_mutex_unlock(&lock);
    return is_submitted;
}

/* Wait until a submitted copy is made; returns whether it was. Meanwhile this thread takes parts, of later copies too: it would
 * sleep for longer than the last part of this one takes. */
EXPORT int32_t rankfeed_wait(job_t *job) {
    pthread_mutex_lock(&lock);
    for (job_t *next; !job->done;)
        (next = next_job()) ? copy_part(next, 0) : (void)pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
    return !job->result;
}

/* Ask for longer time slices of the calling thread, which those that it starts later inherit. Linux before 6.12 and other systems
 * give all threads the same. */
EXPORT void rankfeed_use_long_slices(void) {
#ifdef SYS_sched_setattr
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice, deadline, period;
    } found; /* sched_attr, which not all C libraries declare */
    if (!syscall(SYS_sched_getattr, 0, &found, sizeof found, 0) && !found.policy && found.slice < TIME_SLICE) {
        found.slice = TIME_SLICE;
        syscall(SYS_sched_setattr, 0, &found, 0);
    }
#endif
}

static uint64_t hash(uint64_t keyed) {
    uint64_t mixed = keyed * 0xBF58476D1CE4E5B9u;
    return (mixed ^ mixed >> 32) * 0x94D049BB133111EBu;
}

#define KEYED(half, key) (tweaks ? (half ^ tweaks[i]) + key : half ^ key)

/* Permute n values in place with the network that plan/permutation.py describes, until each is below its size. Without
 * tweaks and sizes, all have none and the size `domain`. */
EXPORT void rankfeed_permute(uint64_t *values, int64_t n, const uint64_t *tweaks, const uint64_t *sizes, uint64_t domain,
                             const uint64_t *keys, int64_t rounds, uint64_t base, int64_t low_bits) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t value = values[i];
        do {
            uint64_t high = value >> low_bits, low = value & (((uint64_t)1 << low_bits) - 1);
            for (int64_t round = 0; round < rounds; round += 2) {
                high += (hash(KEYED(low, keys[round])) >> 32) * base >> 32;
                high = high < base ? high : high - base;
                if (low_bits)
                    low ^= hash(KEYED(high, keys[round + 1])) >> (64 - low_bits);
            }
            value = high << low_bits | low;
        } while (value >= (sizes ? sizes[i] : domain));
        values[i] = value;
    }
}

/* For each of n ids, the last chunk that starts at or before it, and the row in that chunk. `starts` is ascending and begins
 * with 0; ids are not negative. A binary search without branches: where a random id lies, no processor predicts. */
EXPORT void rankfeed_find_chunks(const int64_t *ids, int64_t n, const int64_t *starts, int64_t chunks, int32_t *found,
                                 int64_t *rows) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t *low = starts;
        for (int64_t left = chunks; left > 1; left -= left / 2)
            low += low[left / 2] <= ids[i] ? left / 2 : 0;
        found[i] = (int32_t)(low - starts);
        rows[i] = ids[i] - *low;
    }
}
