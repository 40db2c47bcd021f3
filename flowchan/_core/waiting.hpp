// Waiting: deadlines, futex words, and the wait queue for the readers or writers of one `processes` channel.
// (Threads of one process wait in wait_list.hpp.)
//
// Algorithm. A wait queue is one futex word `seq` and a few counts that only the holder of the channel's lock
// touches. A caller that cannot continue registers (waiting += 1), remembers `seq`, drops the lock and sleeps
// while `seq` is unchanged. An operation that makes k others possible wakes min(k, waiting - woken) sleepers.
// It adds that to `woken`, changes `seq` and calls FUTEX_WAKE after it dropped the lock. At most as many
// readers are on their way as there are cores: if 50 readers wait for cheap items, two take them all before a
// third is awake. The workers of a stage are woken by rank, not in turn, so that the same two, with warm
// caches, continue. Each sleeps as one of 32 ranks (FUTEX_WAIT_BITSET), and `idle` holds the ranks that wait.
// It is only a hint: if no thread of a rank sleeps any more, another one is woken. A sleeper that returns,
// for whatever reason, takes the lock and leaves (waiting -= 1, and `woken` -= 1 if it is above 0). It tries
// its operation again before it returns to its caller.
//
// Invariants (C8).
//  - No caller sleeps while an item is available to it. An operation that makes one available changes `seq`
//    under
//    the lock. So an earlier waiter is woken or finds `seq` changed, and a later one sees the item first. If
//    the operation leaves the call to readers on their way, the last of them that takes an item makes that
//    call.
//  - `woken` never exceeds the number of waiters on their way back, while all are alive. A process killed on
//    its
//    way back leaves it too high; the slices below repair that.
//  - No caller starves. A waiter that was woken twice in vain and has waited for PATIENCE_NS becomes
//    `starving`.
//    Until it is served, newcomers queue up behind it instead of overtaking, but only while it could
//    continue. So an item that does not fit does not hold up one that does. (Overtaking makes bursts fast:
//    under the GIL a running thread empties a full channel while its woken sleepers are still on their way.)
//  - The writers of an ordered stage do not use the wait queue: each waits on its own word for its turn
//    (Ring::await_turn).
// A sleep is cut into slices. A waiter may lose its waker to kill -9 (processes), or a signal may arrive
// between the check and the sleep (main thread). In both cases the waiter looks again within SLICE_NS. This
// makes C9 and C11 unconditional.
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
constexpr int64_t SLICE_NS =
    100'000'000;  // 10 wake-ups a second: no measurable CPU, and half of the 200 ms of C11

constexpr int64_t PATIENCE_NS = 20'000'000;

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Return the same clock with a resolution of a few milliseconds, at a tenth of the cost. Every call reads it.
inline int64_t coarse_now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// When a call gives up: a point on the monotonic clock in ns, NEVER, or 0 for "do not wait at all".
struct Deadline {
    int64_t at = NEVER;
    bool now_only() const { return at == 0; }
    bool passed() const { return at != NEVER && now_ns() >= at; }
    int64_t left() const { return at == NEVER ? NEVER : std::max<int64_t>(at - now_ns(), 0); }
    int64_t slice() const { return std::min(left(), SLICE_NS); }
};

// Return gettid(), which glibc offers only from 2.30 on.
inline uint32_t thread_number() { return uint32_t(syscall(SYS_gettid)); }

// `shared`: several processes map the memory of the word.
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

// Wait on a word that several processes map, for at most a slice, as one of these ranks (a bit each).
inline int futex_wait_as(uint32_t ranks, std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
    const int64_t at = now_ns() + ns;
    timespec t{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    uint32_t* raw = reinterpret_cast<uint32_t*>(&word);
    return syscall(SYS_futex, raw, FUTEX_WAIT_BITSET, seen, &t, nullptr, ranks) == 0 ? 0 : errno;
}

// Wake sleepers of these ranks first, then as many others as are missing from `count`.
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
    asm volatile("isb");  // as long as x86's pause; "yield" does nothing on most cores
#endif
}

// Fetch a cache line that will be written soon. Any address is allowed, also one that is not mapped.
inline void prefetch(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

struct Wakes;

// Total time that callers have waited, in nanoseconds. It is added up at each change, so a process that dies
// between two lines loses at most the time since the last change.
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

// The waits through one port, and those of them for a turn (`Counts::turn_wait_ns`).
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
    std::atomic<uint32_t> seq{0};  // the futex word; its partner is the sleeper's compare in the kernel
    uint32_t waiting = 0;
    uint32_t woken = 0;
    uint32_t selecting = 0;      // how many waiters may continue without this channel:
                                 // they also wait at other channels, or until a deadline
    uint32_t starving = 0;       // thread id of the waiter that newcomers must not overtake, 0 for none
    uint32_t ordered = 0;        // how many more wait for their turn, each on its own word
    uint32_t idle = 0;           // ranks of the stage's workers that wait here, a bit each: a hint
    uint64_t starving_size = 0;  // of the item that the starving waiter wants to put
    int64_t waited_ns = 0;       // total time waited: minus the start of each wait, plus its end
    int64_t since_ns = 0;        // since when there has always been a waiter
    WaitClock turns;             // of the waiters for their turn, not for a place

    // Return how many sleepers to wake for k new opportunities, under the lock. The caller passes the result
    // to `futex_wake` after it has dropped the lock. The lock's release orders the change of `seq` before
    // that, so relaxed is enough here.
    uint32_t call(uint32_t k) {
        uint32_t asleep = waiting > woken ? waiting - woken : 0;
        // only the starving waiter may pass, and the kernel chooses whom it wakes
        if (k && starving) k = asleep;
        if (k > asleep) k = asleep;
        if (k) {
            woken += k;
            seq.store(seq.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        }
        // "All" includes later sleepers: with unequal priorities the kernel may wake one of them first.
        return k && k == asleep ? INT_MAX / 8 : k;
    }
    uint32_t call_all() { return call(UINT32_MAX); }
    // Do the same for readers. No more of them are on their way than can run, because a reader that takes an
    // item and leaves one wakes the next (Ring::try_take). While a waiter starves, that reader may have to
    // stand back. Workers of a stage with the lowest ranks go first.
    void wake_by_rank(uint32_t k, Wakes& wakes);

    // `again`: after a slice of the same wait.
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
    // Change `selecting` by one. The second line repairs the count after a death or a closed port.
    void count_selecting(int change) {
        if (change > 0 || selecting) selecting += uint32_t(change);
        selecting = selecting < waiting ? selecting : waiting;
    }
    int64_t waiting_for_ns() const { return all_waiting() ? now_ns() - since_ns : 0; }
    int64_t total_wait_ns() const { return waited_ns + int64_t(all_waiting()) * now_ns(); }
};

// The sleepers that an operation wakes after it has dropped the lock: a number for each wait queue, and words
// with one waiter each. A waiter and its word may be gone by then. A wake-up there wakes nothing, or another
// thread without reason; both are harmless.
struct Wakes {
    static constexpr uint32_t MOST = 8;
    uint32_t readers = 0;
    uint32_t writers = 0;
    uint32_t words = 0;
    uint32_t ranks = 0;  // of the readers that go first
    std::atomic<uint32_t>* word[MOST];

    void clear() { readers = writers = words = ranks = 0; }
    void add(std::atomic<uint32_t>& one, bool shared) {
        if (words == MOST)
            // more words than one operation usually wakes: wake at once, under the lock
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

// Identity of a waiting call: its side, its port (null: none), and its session of a ring. A put adds the size
// of its item and, where outputs have turns, the number of the item that they belong to.
enum class Side { Reader, Writer };
struct Caller {
    Side side;
    const void* port = nullptr;
    uint32_t session = 0;
    uint64_t size = 0;
    bool ordered = false;
    uint64_t number = 0;
    bool exchangeable = false;         // a caller that waits through another port may continue in its place
    PortClock* clock = nullptr;        // threads: the clock of its port, which outlives the call
    const uint32_t* orders = nullptr;  // threads: the port's Orders, which it obeys even while others starve
};

// Result of an operation on a channel. `Wait` never leaves the core: it becomes NotNow or a sleep. KeepTurns:
// before the port takes an item, its outputs begin to keep turns (In::keep_turns). Refused: its descriptors
// could not be sent (Frame::refused).
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

// Spinning pays when the other side is running now. The budget doubles when a spin succeeded and halves when
// it did not; below LEAST_NS only every 32nd wait tries a short spin again. MOST_NS is about the cost of a
// sleep and a wake-up, so useless spinning at most doubles that cost.
struct Spin {
    static constexpr uint32_t MOST_NS = 50'000, LEAST_NS = 4'000, CHECKS = 16;
    std::atomic<uint32_t> budget{
        MOST_NS};  // shared by the threads of a handle: a hint, so relaxed everywhere
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
