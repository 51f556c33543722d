/* Copies rows from anywhere in memory into a batch.
 *
 * No Python.h: the library is called through ctypes, which releases the GIL for the whole call, so one build serves
 * every Python. Rows are checked to be within their memory. The one fault that this cannot exclude is a SIGBUS, because
 * another process may truncate a file while it is mapped here: the copy then stops and returns the number of a row.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
/* Rows ahead of the copy whose first cache lines are loaded: far enough to hide a miss of cache and TLB. */
#define AHEAD 4
#define AHEAD_SMALL 16 /* of rows of at most two lines, without lengths */
#define LINE 64
#define MAX_LINES 8

static __thread sigjmp_buf truncated;
static __thread volatile sig_atomic_t copying;
static struct sigaction previous;
static volatile sig_atomic_t passed_on;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    if (copying) {
        copying = 0;
        siglongjmp(truncated, 1);
    }
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
        __builtin_prefetch((const char *)(row + at), 0, 0);
}

static void fill_rest(char *at, int64_t left, const char *fill, int64_t fill_bytes) {
    if (left <= 0)
        return;
    if (fill_bytes == 0) {
        memset(at, 0, left);
        return;
    }
    memcpy(at, fill, fill_bytes);
    for (int64_t done = fill_bytes; done < left; done *= 2) /* doubles what is filled */
        memcpy(at + done, at, done < left - done ? done : left - done);
}

/* Memory that rows are in; of its file descriptor (-1 for none), mapped size and address, and the call that checked it. */
typedef struct {
    int64_t address, bytes, descriptor, mapped, mapping, checked;
} memory_t;

/* What a call returns: the number of a row and what is wrong with it, or 0. */
enum { OUT_OF_BOUNDS = 1, TOO_LONG, TRUNCATED, FAULTS };

static int64_t last_call;

/* Find a row whose file is shorter than its mapping. Each file is checked once, whatever its rows. */
static int64_t find_truncated(const int32_t *part, int64_t n, memory_t *memory) {
    int64_t call = __atomic_add_fetch(&last_call, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < (part ? n : n > 0); i++) {
        memory_t *file = memory + (part ? part[i] : 0);
        struct stat found;
        if (file->descriptor < 0 || __atomic_load_n(&file->checked, __ATOMIC_RELAXED) == call)
            continue;
        __atomic_store_n(&file->checked, call, __ATOMIC_RELAXED);
        if (fstat((int)file->descriptor, &found) || found.st_size < file->mapped)
            return i * FAULTS + TRUNCATED;
    }
    return 0;
}

/* Find the memory of a row: see rankfeed_copy_rows. Returns whether it is within `from`. */
static int find_row(const memory_t *from, int64_t first, int64_t step, int64_t elements, int64_t width, int64_t *start,
                    int64_t *size) {
    return !(__builtin_mul_overflow(elements, width, size) || __builtin_mul_overflow(first, step, start) ||
             *start < 0 || *size < 0 || *start > from->bytes || *size > from->bytes - *start);
}

static void drop_pages(int descriptor, int64_t start, int64_t bytes) {
#ifdef POSIX_FADV_DONTNEED /* not on macOS */
    posix_fadvise(descriptor, start, bytes, POSIX_FADV_DONTNEED);
#endif
}

/* Advise the kernel of the pages of some rows of files: to read them soon, or to drop them from the page cache. Rows are
 * as in rankfeed_copy_rows. Pages that rows share with others are read, but not dropped. */
EXPORT void rankfeed_advise(const memory_t *memory, const int32_t *part, const int64_t *first, int64_t step,
                            const int64_t *lengths, int64_t n, int64_t width, int32_t drop) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const memory_t *file = 0;
    int64_t low = 0, high = 0; /* addresses of rows that follow each other */
    for (int64_t i = 0; i <= n; i++) {
        const memory_t *from = i < n ? memory + (part ? part[i] : 0) : 0;
        int64_t start = 0, size = 0;
        if (from && (from->descriptor < 0 || !find_row(from, first[i], step, lengths ? lengths[i] : 1, width, &start, &size)))
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

/* Copy lengths[i] elements of `width` bytes to element offsets[i] of `out`, for each of n rows. Row i begins
 * first[i] * step bytes into memory[part[i]].
 *
 * Without part, all rows are in memory[0]; without lengths, each has one element. Without offsets, row i is copied
 * to i * stride and filled up to stride bytes: with copies of the element of fill_bytes bytes at fill, or with zeros
 * if fill_bytes is 0. With offsets, stride is the size of `out`: offsets from damaged lengths may not be ascending.
 */
EXPORT int64_t rankfeed_copy_rows(memory_t *memory, const int32_t *part, const int64_t *first, int64_t step,
                                  const int64_t *lengths, int64_t n, int64_t width, const int64_t *offsets, char *out,
                                  int64_t stride, const char *fill, int64_t fill_bytes) {
    volatile int64_t row = 0;
    /* Rows that follow each other in memory and in the batch are copied at once. */
    const char *run = 0;
    char *run_target = out;
    int64_t run_size = 0, run_row = 0;
    const int64_t ahead = !lengths && width <= 2 * LINE ? AHEAD_SMALL : AHEAD;
    install_handler();
    if (sigsetjmp(truncated, 0))
        return row * FAULTS + TRUNCATED;
    copying = 1;
    for (int64_t i = 0; i < n; i++) {
        const memory_t *from = memory + (part ? part[i] : 0);
        int64_t size, start, target = offsets ? 0 : i * stride, fault = 0;
        if (!find_row(from, first[i], step, lengths ? lengths[i] : 1, width, &start, &size))
            fault = OUT_OF_BOUNDS;
        else if (offsets ? __builtin_mul_overflow(offsets[i], width, &target) || target < 0 || target > stride ||
                               size > stride - target
                         : size > stride)
            fault = TOO_LONG;
        if (fault) {
            copying = 0;
            return i * FAULTS + fault;
        }
        const char *source = (const char *)from->address + start;
        if (source == run + run_size && out + target == run_target + run_size) {
            run_size += size;
        } else {
            int64_t next = i + ahead;
            if (next < n)
                prefetch((uint64_t)memory[part ? part[next] : 0].address + (uint64_t)first[next] * (uint64_t)step,
                         (uint64_t)(lengths ? lengths[next] : 1) * (uint64_t)width);
            row = run_row;
            if (run_size)
                memcpy(run_target, run, run_size);
            run = source, run_target = out + target, run_size = size, run_row = i;
        }
        if (!offsets && size < stride)
            fill_rest(out + target + size, stride - size, fill, fill_bytes);
    }
    row = run_row;
    if (run_size)
        memcpy(run_target, run, run_size);
    copying = 0;
    return find_truncated(part, n, memory); /* the rest of a page behind the end of a file reads as zeros */
}
