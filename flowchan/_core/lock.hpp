// A lock in memory that several processes share, which outlives whoever dies with it.
//
// A robust mutex of the C library, and what that does not say: whether the mutex itself can still be right.
// Its type is remembered when it is first seen, because the library believes without looking what stands
// there; and who waits long looks whether the owner that is named there exists at all.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace flowchan {

class SharedLock {
  public:
    // FromDead: its owner died; make whole what it protects, then call `is_whole`. Lost: nobody will ever get
    // it, and what it protects is to be given up.
    enum class Got { Taken, FromDead, Busy, Lost };

    static void make(pthread_mutex_t& mutex);
    // `fd`: of the memory that it lies in. `given_up`: whether others have found it Lost.
    void attach(pthread_mutex_t& mutex, int fd, uint64_t& given_up);

    // Busy only if not `patient`.
    Got lock(bool patient);
    void is_whole() { pthread_mutex_consistent(mutex_); }
    void unlock() {
        if (is_right()) pthread_mutex_unlock(mutex_);
    }
    bool is_right() const { return kind_of(*mutex_) == kind_.load(std::memory_order_relaxed); }
    // It is touched no more by this process.
    void give_up() { kind_.store(-1, std::memory_order_relaxed); }

  private:
    // The type of a mutex; 0 where it can't be told.
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
    std::atomic<int> kind_ = 0;  // -1: given up. A hint: relaxed
};

}  // namespace flowchan
