/* A wall clock that a test moves while a program runs.
 *
 * Preloaded, it stands between the program and libc: calls that ask for the time of day get the true time plus
 * an offset in nanoseconds, a signed 64-bit number at the begin of the file that QIM_CLOCK_FILE names. The file
 * is mapped, so a change holds from the next call on, in all threads and in children that are forked. Monotonic
 * clocks are untouched, and so are sleeps and time-outs. Without the file the time is the true one. libc asks
 * the kernel's page of clocks itself, so nothing of that is bypassed by a program that calls libc.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NANOSECONDS 1000000000LL

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static const volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("QIM_CLOCK_FILE");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

static int moves(clockid_t which) {
    return which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE || which == CLOCK_TAI;
}

int clock_gettime(clockid_t which, struct timespec *answer) {
    if (real_clock_gettime == NULL)
        begin();
    int code = real_clock_gettime(which, answer);
    if (code == 0 && offset != NULL && moves(which)) {
        int64_t moved = answer->tv_sec * NANOSECONDS + answer->tv_nsec + *offset;
        answer->tv_sec = moved / NANOSECONDS;
        answer->tv_nsec = moved % NANOSECONDS;
    }
    return code;
}

int gettimeofday(struct timeval *restrict answer, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    answer->tv_sec = now.tv_sec;
    answer->tv_usec = now.tv_nsec / 1000;
    return code;
}

time_t time(time_t *answer) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (answer != NULL)
        *answer = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *answer, int base) {
    if (base != TIME_UTC || clock_gettime(CLOCK_REALTIME, answer) != 0)
        return 0;
    return base;
}
