// A lock in memory that several processes share. If its owner dies, another process can take over.
//
// This is a robust mutex of the C library, plus checks for damage. The library trusts the type stored in the
// mutex. This class therefore compares that type with the type that it read first. During a long wait, this
// class also checks that the owner named by the mutex still exists.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace flowchan {

class SharedLock {
  public:
    // FromDead: the owner died; repair the protected data, then call `mark_consistent`. Lost: the mutex
    // cannot be locked again, so abandon the protected data.
    enum class Got { Taken, FromDead, Busy, Lost };

    static void make(pthread_mutex_t& mutex);
    // `fd`: the memory with the mutex. `given_up`: set to nonzero when a process finds that the mutex is
    // Lost.
    void attach(pthread_mutex_t& mutex, int fd, uint64_t& given_up);

    // Returns Busy only if `patient` is false.
    Got lock(bool patient);
    void mark_consistent() { pthread_mutex_consistent(mutex_); }
    void unlock() {
        if (is_valid()) pthread_mutex_unlock(mutex_);
    }
    bool is_valid() const { return kind_of(*mutex_) == kind_.load(std::memory_order_relaxed); }
    // Stop using the mutex in this process.
    void give_up() { kind_.store(-1, std::memory_order_relaxed); }

  private:
    // Return the type of a mutex, or 0 if the C library does not show it.
    static int kind_of(const pthread_mutex_t& mutex) {
#ifdef __GLIBC__
        return mutex.__data.__kind;
#else
        return (void)mutex, 0;
#endif
    }
    int lock_slowly();
    bool is_used_by(uint64_t thread) const;

    pthread_mutex_t* mutex_ = nullptr;
    uint64_t* given_up_ = nullptr;
    int fd_ = -1;
    std::atomic<int> kind_ = 0;  // -1: given up; only a hint, so all accesses are relaxed
};

}  // namespace flowchan
