// Waiting: deadlines, futex words, and the wait queue for the readers or writers of one `processes` channel.
// (Threads of one process use the wait list in wait_list.hpp.)
//
// Algorithm. A wait queue is one futex word `seq` and a few counts, which only the holder of the channel's
// lock accesses. A caller that cannot continue registers itself (waiting += 1), remembers `seq`, drops the
// lock, and sleeps while `seq` is unchanged. An operation that makes k other calls possible wakes min(k,
// waiting - woken) sleepers. It adds that number to `woken`, changes `seq`, and calls FUTEX_WAKE after
// dropping the lock. At any time, the number of readers on their way (woken, but not yet holding the lock) is
// at most the number of cores. If 50 readers wait for cheap items, two of them take all items before a third
// is awake. The workers of a stage are woken by rank and not in turn, so that the same two, whose caches are
// warm, continue. Each worker sleeps with one of 32 ranks (FUTEX_WAIT_BITSET), and `idle` contains the ranks
// that are waiting. This is only a hint: if no thread of a rank is asleep, another one is woken. When a
// sleeper returns, it takes the lock and unregisters (waiting -= 1, and `woken` -= 1 if that is above 0). It
// then tries its operation again before it returns to its caller.
//
// Invariants (C8).
//  - No caller sleeps while an item is available to it. An operation that makes an item available changes
//    `seq` under the lock. So an earlier waiter is woken or finds that `seq` has changed, and a later one
//    sees the item first. If the operation relies on readers that are on their way, the last of these readers
//    to take an item wakes the next sleeper.
//  - `woken` never exceeds the number of woken waiters on their way, as long as all are alive. If a process
//    is killed on its way, `woken` stays too high; the slices below repair that.
//  - No caller starves. A waiter that was woken in vain twice and has waited for PATIENCE_NS becomes
//    `starving`. As long as it could continue, newcomers queue up behind it and do not overtake. So an item
//    that does not fit does not block items that do. (Overtaking makes bursts fast: under the GIL, a running
//    thread empties a full channel before its woken sleepers run.)
//  - The writers of an ordered stage do not use the wait queue: each waits for its turn on its own word
//    (Ring::await_turn).
//
// A sleep is divided into slices. A waiter may lose its waker to kill -9 (processes), or a signal may arrive
// between the check and the sleep (main thread). In both cases, the waiter checks again within SLICE_NS. So
// C9 and C11 hold unconditionally.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace flowchan {

constexpr int64_t NEVER = INT64_MAX;
// 10 wake-ups a second: no measurable CPU load, and half of the 200 ms in C11
constexpr int64_t SLICE_NS = 100'000'000;

constexpr int64_t PATIENCE_NS = 20'000'000;

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Return the same time with a resolution of a few milliseconds, at a tenth of the cost. Every channel call
// does this.
inline int64_t coarse_now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// When a call gives up: a time of the monotonic clock in ns, NEVER, or 0 for "do not wait".
struct Deadline {
    int64_t at = NEVER;
    bool now_only() const { return at == 0; }
    bool passed() const { return at != NEVER && now_ns() >= at; }
    int64_t left() const { return at == NEVER ? NEVER : std::max<int64_t>(at - now_ns(), 0); }
    int64_t slice() const { return std::min(left(), SLICE_NS); }
};

// Return gettid(), which glibc provides only from 2.30 on.
inline uint32_t thread_number() { return uint32_t(syscall(SYS_gettid)); }

// `shared`: several processes map the word's memory.
inline int futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns, bool shared) {
    timespec t{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    int op = FUTEX_WAIT | (shared ? 0 : FUTEX_PRIVATE_FLAG);
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, seen, &t, nullptr, 0) == 0 ? 0 : errno;
}

inline void futex_wake(std::atomic<uint32_t>& word, uint32_t count, bool shared) {
    int op = FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, count > INT_MAX ? INT_MAX : count, nullptr,
            nullptr, 0);
}

// Wait for at most a slice on a word that several processes map, with these ranks (one bit each).
inline int futex_wait_as(uint32_t ranks, std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
    const int64_t at = now_ns() + ns;
    timespec t{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    uint32_t* raw = reinterpret_cast<uint32_t*>(&word);
    return syscall(SYS_futex, raw, FUTEX_WAIT_BITSET, seen, &t, nullptr, ranks) == 0 ? 0 : errno;
}

// Wake sleepers that have these ranks first, and then others, up to `count` in total.
inline void futex_wake_first(uint32_t ranks, std::atomic<uint32_t>& word, uint32_t count) {
    uint32_t* raw = reinterpret_cast<uint32_t*>(&word);
    const long woken = syscall(SYS_futex, raw, FUTEX_WAKE_BITSET, count, nullptr, nullptr, ranks);
    const uint32_t those = woken > 0 ? uint32_t(woken) : 0;
    if (those < count) futex_wake(word, count - those, true);
}

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // takes as long as x86's pause; "yield" does nothing on most cores
#endif
}

// Fetch a cache line that will be written soon. The address need not be mapped.
inline void prefetch(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

struct Wakes;

// Total time that callers have waited, in nanoseconds. The sum is updated at each change, so a process that
// dies between two statements loses at most the time since the last change.
struct WaitClock {
    int64_t ns = 0, since = 0;
    uint32_t waiting = 0;

    void set(uint32_t number, int64_t now) {
        ns += int64_t(waiting) * (now - since);
        since = now;
        waiting = number;
    }
    int64_t total(int64_t now) const { return ns + int64_t(waiting) * (now - since); }
};

// Waiting times of one port: in total, and for a turn (`Counts::turn_wait_ns`).
struct PortClock {
    WaitClock all, turn;

    void begin(bool for_turn) {
        const int64_t now = now_ns();
        all.set(all.waiting + 1, now);
        turn.set(turn.waiting + for_turn, now);
    }
    void end(bool for_turn) {
        const int64_t now = now_ns();
        all.set(all.waiting - (all.waiting > 0), now);
        turn.set(turn.waiting - (for_turn && turn.waiting > 0), now);
    }
};

struct WaitQueue {
    std::atomic<uint32_t> seq{0};  // the futex word, which the kernel compares before the waiter sleeps
    uint32_t waiting = 0;
    uint32_t woken = 0;
    // number of waiters that may continue without this channel: they also wait for other channels, or for a
    // deadline
    uint32_t selecting = 0;
    uint32_t starving = 0;       // thread id of the starving waiter, which newcomers must not overtake, or 0
    uint32_t ordered = 0;        // number of other waiters, which wait for their turn on their own words
    uint32_t idle = 0;           // ranks of the stage's workers that are waiting here, one bit each: a hint
    uint64_t starving_size = 0;  // size of the item that the starving waiter wants to put
    int64_t waited_ns = 0;       // total waiting time: the start of each wait is subtracted, its end is added
    int64_t since_ns = 0;        // time at which `waiting` last became nonzero
    WaitClock turns;             // counts only waiters for a turn, not for a place

    // Return how many sleepers to wake for k new opportunities. This is called under the lock. The caller
    // passes the result to `futex_wake` after dropping the lock. The lock's release orders the change of
    // `seq` before that, so relaxed is enough here.
    uint32_t call(uint32_t k) {
        uint32_t asleep = waiting > woken ? waiting - woken : 0;
        // only the starving waiter may continue, and the kernel chooses which sleeper wakes
        if (k && starving) k = asleep;
        if (k > asleep) k = asleep;
        if (k) {
            woken += k;
            seq.store(seq.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        }
        // "All" includes later sleepers: with unequal priorities, the kernel may wake one of them first.
        return k && k == asleep ? INT_MAX / 8 : k;
    }
    uint32_t call_all() { return call(UINT32_MAX); }
    // Do the same for readers. The number of readers on their way is at most the number of cores. A reader
    // that takes an item and leaves another wakes the next reader (Ring::try_take). While a waiter is
    // starving, all are woken, because a woken reader may have to let the starving one go first. The workers
    // of a stage are woken in the order of their ranks.
    void wake_by_rank(uint32_t k, Wakes& wakes);

    // `again`: another slice of the same wait.
    uint32_t enter(bool again = false) {
        begin_wait(again);
        waiting += 1;
        return seq.load(std::memory_order_relaxed);
    }
    void leave() {
        waiting -= 1;
        if (woken) woken -= 1;
        waited_ns += now_ns();
    }
    void begin_wait(bool again) {
        const int64_t now = now_ns();
        if (all_waiting() == 0 && !again) since_ns = now;
        waited_ns -= now;
    }
    uint32_t all_waiting() const { return waiting + ordered; }
    // Change `selecting` by one. The second line corrects the count after a death or a closed port.
    void count_selecting(int change) {
        if (change > 0 || selecting) selecting += uint32_t(change);
        selecting = selecting < waiting ? selecting : waiting;
    }
    int64_t waiting_for_ns() const { return all_waiting() ? now_ns() - since_ns : 0; }
    int64_t total_wait_ns() const { return waited_ns + int64_t(all_waiting()) * now_ns(); }
};

// The sleepers that an operation wakes after dropping the lock: a number for each wait queue, and words with
// one waiter each. A waiter and its word may be gone by then. Waking that address then wakes no thread, or an
// unrelated one; both are harmless.
struct Wakes {
    static constexpr uint32_t MOST = 8;
    uint32_t readers = 0;
    uint32_t writers = 0;
    uint32_t words = 0;
    uint32_t ranks = 0;  // ranks of the readers to wake first
    std::atomic<uint32_t>* word[MOST];

    void clear() { readers = writers = words = ranks = 0; }
    void add(std::atomic<uint32_t>& one, bool shared) {
        if (words == MOST)
            // The list is full, which is rare: wake this word now, under the lock.
            futex_wake(one, 1, shared);
        else
            word[words++] = &one;
    }
    void wake_words(bool shared) const {
        for (uint32_t i = 0; i < words; ++i) futex_wake(*word[i], 1, shared);
    }
};

inline void WaitQueue::wake_by_rank(uint32_t k, Wakes& wakes) {
    static const uint32_t cores = uint32_t(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1l));
    const uint32_t called = call(starving ? k : std::min(k, woken < cores ? cores - woken : 0));
    wakes.readers += called;
    for (uint32_t i = 0; i < called && idle; ++i) {
        wakes.ranks |= idle & -idle;
        idle &= idle - 1;
    }
}

// Identity of a waiting call: its side, its port (or null), and its session in a ring. A put adds the size of
// its item. If outputs have turns, it also adds the number of the input item for which the output was made.
enum class Side { Reader, Writer };
struct Caller {
    Side side;
    const void* port = nullptr;
    uint32_t session = 0;
    uint64_t size = 0;
    bool ordered = false;
    uint64_t number = 0;
    bool exchangeable = false;   // a caller of another port may continue in its place
    PortClock* clock = nullptr;  // threads: the clock of its port, which outlives the call
    // threads: the port's Orders, which the call obeys even while another waiter is starving
    const uint32_t* orders = nullptr;
};

// Result of an operation on a channel. `Wait` is never returned to Python: it becomes NotNow, or the caller
// sleeps. KeepTurns: before the port takes an item, its outputs must begin to keep turns (In::keep_turns).
// Refused: the item's descriptors could not be sent (Frame::refused).
enum class Step {
    Done,
    Wait,
    NotNow,
    Closed,
    Drained,
    Broken,
    TooLarge,
    NoMemory,
    PortClosed,
    Interrupted,
    Refused,
    KeepTurns
};

// Spinning pays off if the other side is running now. The budget doubles after a spin that succeeded, and
// halves after one that did not. Below LEAST_NS, only every 32nd wait tries a short spin. MOST_NS is about
// the cost of a sleep and a wake-up, so useless spinning at most doubles that cost.
struct Spin {
    static constexpr uint32_t MOST_NS = 50'000, LEAST_NS = 4'000, CHECKS = 16;
    // shared by the threads of a handle: a hint, so all accesses are relaxed
    std::atomic<uint32_t> budget{MOST_NS};
    std::atomic<uint32_t> skipped{0};

    template <class Ready>
    bool wait(Ready ready) {
        uint32_t b = budget.load(std::memory_order_relaxed);
        if (b < LEAST_NS) {
            uint32_t s = skipped.load(std::memory_order_relaxed) + 1;
            skipped.store(s, std::memory_order_relaxed);
            if (s % 32) return false;
            b = LEAST_NS;
        }
        const int64_t until = now_ns() + b;
        do {
            for (uint32_t i = 0; i < CHECKS; ++i) {
                cpu_relax();
                if (!ready()) continue;
                budget.store(b * 2 > MOST_NS ? MOST_NS : b * 2, std::memory_order_relaxed);
                return true;
            }
        } while (now_ns() < until);
        budget.store(b / 2, std::memory_order_relaxed);
        return false;
    }
};

}  // namespace flowchan
