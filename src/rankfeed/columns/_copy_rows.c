/* Copies rows from anywhere in memory into a batch.
 *
 * No Python.h: the library is called through ctypes, which releases the GIL for the whole call, so one build serves
 * every Python. The caller checks all addresses. The one fault that it cannot exclude is a SIGBUS, because another
 * process may truncate a file while it is mapped here: the copy then stops and returns the number of the row.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#define EXPORT __attribute__((visibility("default")))
/* Rows ahead of the copy whose first cache lines are loaded: far enough to hide a miss of cache and TLB. */
#define AHEAD 4
#define LINE 64
#define MAX_LINES 8

static __thread sigjmp_buf truncated;
static __thread volatile sig_atomic_t copying;
static struct sigaction previous;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    if (copying) {
        copying = 0;
        siglongjmp(truncated, 1);
    }
    sigaction(SIGBUS, &previous, NULL); /* not ours: the instruction runs again and faults under the other handler */
}

/* Another library (faulthandler) may install its handler at any time, so this is checked at each call. */
static void install_handler(void) {
    struct sigaction current, ours;
    if (sigaction(SIGBUS, NULL, &current) || ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_sigbus))
        return;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_sigbus;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* NODEFER: siglongjmp need not restore the signal mask */
    previous = current;
    sigaction(SIGBUS, &ours, NULL);
}

static void prefetch(const char *row, int64_t bytes) {
    int64_t most = bytes < MAX_LINES * LINE ? bytes : MAX_LINES * LINE;
    for (int64_t at = 0; at < most; at += LINE)
        __builtin_prefetch(row + at, 0, 0);
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

/* A memory-mapped file: its descriptor (-1 for memory without a file), its mapped size, and the call that checked it. */
typedef struct {
    int64_t descriptor, size, checked;
} file_t;

static int64_t last_call;

/* Return the first row whose file is shorter than its mapping, or -1. Each file is checked once, whatever its rows. */
static int64_t find_truncated(const int32_t *part, int64_t n, file_t *files) {
    int64_t call = __atomic_add_fetch(&last_call, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < (part ? n : n > 0); i++) {
        file_t *file = files + (part ? part[i] : 0);
        struct stat found;
        if (file->descriptor < 0 || __atomic_load_n(&file->checked, __ATOMIC_RELAXED) == call)
            continue;
        __atomic_store_n(&file->checked, call, __ATOMIC_RELAXED);
        if (fstat((int)file->descriptor, &found) || found.st_size < file->size)
            return i;
    }
    return -1;
}

/* Copy lengths[i] elements of `width` bytes from addresses[i] to element offsets[i] of `out`, for each of n rows.
 *
 * Without offsets, row i begins at i * stride and is filled up to stride bytes: with copies of the element of
 * fill_bytes bytes at fill, or with zeros if fill_bytes is 0. Row i is in the file files[part[i]], or files[0].
 *
 * Returns -1; the number of a row whose file was truncated; or n if a row is longer than stride.
 */
EXPORT int64_t rankfeed_copy_rows(const int64_t *addresses, const int64_t *lengths, const int64_t *offsets, int64_t n,
                                  int64_t width, char *out, int64_t stride, const char *fill, int64_t fill_bytes,
                                  const int32_t *part, file_t *files) {
    volatile int64_t row = 0;
    install_handler();
    if (sigsetjmp(truncated, 0))
        return row;
    copying = 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t size = lengths[i] * width;
        char *target = out + (offsets ? offsets[i] * width : i * stride);
        row = i;
        if (!offsets && size > stride) {
            copying = 0;
            return n;
        }
        if (i + AHEAD < n)
            prefetch((const char *)addresses[i + AHEAD], lengths[i + AHEAD] * width);
        memcpy(target, (const char *)addresses[i], size);
        if (!offsets && size < stride)
            fill_rest(target + size, stride - size, fill, fill_bytes);
    }
    copying = 0;
    return find_truncated(part, n, files); /* the rest of a page behind the end of a file reads as zeros */
}
