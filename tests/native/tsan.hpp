// A workaround for the thread sanitizer. Include this only in the file that defines `main`.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <ctime>

#if defined(__SANITIZE_THREAD__)
// GCC's thread sanitizer does not intercept this function, so forward each call to `pthread_mutex_timedlock`,
// which the sanitizer does intercept.
extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
    timespec now, real;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &real);
    const int64_t at = (real.tv_sec + until->tv_sec - now.tv_sec) * 1'000'000'000 + real.tv_nsec +
                       until->tv_nsec - now.tv_nsec;
    const timespec converted{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    return pthread_mutex_timedlock(mutex, &converted);
}
#endif
