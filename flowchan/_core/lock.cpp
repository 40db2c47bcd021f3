#include "lock.hpp"

#include "memory.hpp"
#include "system.hpp"

#include <sys/stat.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace flowchan {

void SharedLock::make(pthread_mutex_t& mutex) {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    // musl checks whether the kernel reports dead owners; glibc assumes that it does.
    const int error = pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    if (error) fail(error, "set_robust_list");
    pthread_mutex_init(&mutex, &attr);
    pthread_mutexattr_destroy(&attr);
}

void SharedLock::attach(pthread_mutex_t& mutex, int fd, uint64_t& given_up) {
    mutex_ = &mutex;
    fd_ = fd;
    given_up_ = &given_up;
    kind_ = kind_of(mutex);
}

SharedLock::Got SharedLock::lock(bool patient) {
    if (!is_valid()) return Got::Lost;
    int rc;
    // Each attempt takes the lock's cache line from the owner, so the pauses between attempts grow.
    for (int i = 0; (rc = pthread_mutex_trylock(mutex_)) == EBUSY; ++i) {
        if (i < 40) {
            for (int pauses = 1 << std::min(i, 4); pauses; --pauses) cpu_relax();
        } else if (!patient) {
            return Got::Busy;
        } else {
            rc = lock_slowly();
            break;
        }
    }
    return rc == 0 ? Got::Taken : rc == EOWNERDEAD ? Got::FromDead : Got::Lost;
}

// Return whether `thread` is alive and has this memory mapped. Return true if that is unknown.
bool SharedLock::is_used_by(uint64_t thread) const {
    struct stat st;
    char path[32];
    snprintf(path, sizeof path, "/proc/%lu/maps", static_cast<unsigned long>(thread));
    FILE* maps = fstat(fd_, &st) == 0 ? fopen(path, "re") : nullptr;
    // Users of a channel may read each other's maps, so EACCES means that the thread is not a user.
    if (!maps) return errno != ENOENT && errno != EACCES;
    char* line = nullptr;
    size_t room = 0;
    bool found = false;
    while (!found && getline(&line, &room, maps) > 0) {
        unsigned long inode = 0;
        found = sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1 && inode == st.st_ino &&
                strstr(line, MEMORY_SHOWN);
    }
    free(line);
    fclose(maps);
    return found;
}

// Wait for the lock. Give up if the lock's word names this thread or a thread that does not exist, because
// then no thread can unlock it. (When an owner dies, the kernel marks the word before the thread is gone.)
int SharedLock::lock_slowly() {
    [[maybe_unused]] uint32_t before = 0;
    for (;;) {
        // glibc before 2.30 and musl accept only the realtime clock here. If that clock is set back, the
        // check after a timeout is merely late.
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 2 * SLICE_NS;
        until.tv_sec += until.tv_nsec / 1'000'000'000;
        until.tv_nsec %= 1'000'000'000;
        const int rc = pthread_mutex_timedlock(mutex_, &until);
        if (rc != ETIMEDOUT) return rc;
        if (std::atomic_ref(*given_up_).load(std::memory_order_relaxed))
            return EINVAL;  // the owner may have given the mutex up
#ifdef __GLIBC__
        const uint32_t word = uint32_t(__atomic_load_n(&mutex_->__data.__lock, __ATOMIC_RELAXED));
        const uint32_t owner = word & FUTEX_TID_MASK;
        const bool lost = !(word & FUTEX_OWNER_DIED) && (owner == thread_number() || !is_used_by(owner));
        if (word && lost && word == before) return EINVAL;
        before = word;
#endif
    }
}

}  // namespace flowchan
