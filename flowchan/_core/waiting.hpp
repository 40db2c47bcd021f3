// Waiting: deadlines, futex words, and the queue where the readers or writers of a `processes` channel wait.
// (The threads of one process use wait_list.hpp.)
//
// Algorithm. A wait queue is a futex word `seq` and some counters, all guarded by the channel's lock. A
// caller that cannot continue registers (waiting += 1), remembers `seq`, releases the lock, and sleeps until
// `seq` changes. An operation that lets k other calls continue wakes min(k, waiting - woken) sleepers. It
// adds that number to `woken`, changes `seq`, releases the lock, and calls FUTEX_WAKE.
//
// A reader is "on its way" from its wake-up until it holds the lock. The number of readers on their way never
// exceeds the number of cores. More woken readers would be useless: if 50 readers wait for cheap items, two
// of them take all items before a third is awake.
//
// The workers of a stage are woken by rank instead of in rotation, so the same workers continue with warm
// caches. Each worker sleeps with one of 32 ranks (FUTEX_WAIT_BITSET), and `idle` contains the waiting ranks.
// It is only a hint: if no thread with a rank is asleep, another thread is woken.
//
// A woken sleeper takes the lock and unregisters (waiting -= 1, and `woken` -= 1 if that is above 0). It
// tries its operation again before it returns.
//
// Invariants (C8).
// - No caller sleeps while it could have an item. An operation that makes an item available changes `seq`
//   under the lock. A waiting caller is therefore woken or sees the change, and a later caller sees the item.
//   If the operation relies on readers on their way, the last of them to take an item wakes the next sleeper.
// - `woken` never exceeds the number of woken waiters on their way, as long as they all live. If a process is
//   killed on its way, `woken` stays too high until a slice (below) repairs it.
// - No caller starves. After two failed wake-ups and PATIENCE_NS of waiting, a waiter is `starving`. While it
//   could continue, newcomers queue behind it instead of overtaking it. An item that does not fit never
//   blocks an item that fits. (Overtaking makes bursts fast: a running thread that holds the GIL empties a
//   full channel before the woken sleepers run.)
// - The writers of an ordered stage do not use the wait queue. Each waits for its turn on its own word
//   (Ring::await_turn).
//
// A sleep is divided into slices, because a wake-up can be lost in two ways. A `kill -9` may end the process
// that should send the wake-up. A signal may reach the main thread between its check and its sleep. In both
// cases, the waiter checks again within SLICE_NS, so C9 and C11 always hold.
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
// Ten wake-ups a second cause no measurable CPU load. Contract C11 allows 200 ms, which is two slices.
constexpr int64_t SLICE_NS = 100'000'000;

constexpr int64_t PATIENCE_NS = 20'000'000;

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Return the time as now_ns() does, at a tenth of the cost, but up to a few milliseconds late. Every channel
// call needs it.
inline int64_t coarse_now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// When a call gives up, in ns of the monotonic clock. NEVER: no limit; 0: do not wait.
struct Deadline {
    int64_t at = NEVER;
    bool now_only() const { return at == 0; }
    bool passed() const { return at != NEVER && now_ns() >= at; }
    int64_t left() const { return at == NEVER ? NEVER : std::max<int64_t>(at - now_ns(), 0); }
    int64_t slice() const { return std::min(left(), SLICE_NS); }
};

// Return gettid(), which glibc wraps only since 2.30.
inline uint32_t thread_number() { return uint32_t(syscall(SYS_gettid)); }

// Sleep until the word is woken, for at most `ns`. Return 0, or an errno (EAGAIN if the word is not `seen`).
// `shared`: more than one process maps the word.
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

// Wait on a word that several processes map, for at most `ns`. `ranks` has one bit per rank of this thread.
inline int futex_wait_as(uint32_t ranks, std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
    const int64_t at = now_ns() + ns;
    timespec t{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    uint32_t* raw = reinterpret_cast<uint32_t*>(&word);
    return syscall(SYS_futex, raw, FUTEX_WAIT_BITSET, seen, &t, nullptr, ranks) == 0 ? 0 : errno;
}

// Wake up to `count` sleepers, starting with those of the given ranks.
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
    asm volatile("isb");  // pauses as long as x86's `pause`; "yield" does nothing on most cores
#endif
}

// Fetch a cache line before writing to it. The address may be unmapped.
inline void prefetch(const void* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

struct Wakes;

// How long callers have waited in total, in ns. The sum is updated whenever the number of waiting callers
// changes. If a process dies between two statements, only the time since the last change is lost.
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

// How long one port has waited in total, and for its turn (`Counts::turn_wait_ns`).
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
    std::atomic<uint32_t> seq{0};  // the futex word
    uint32_t waiting = 0;
    uint32_t woken = 0;
    // waiters that may continue without a change to this channel, because they have a deadline or also wait
    // for other channels
    uint32_t selecting = 0;
    uint32_t starving = 0;       // thread id of the starving waiter, or 0
    uint32_t ordered = 0;        // how many writers wait for their turns, each on its own word
    uint32_t idle = 0;           // ranks of the stage's waiting workers, one bit each; a hint
    uint64_t starving_size = 0;  // size of the item that the starving waiter is trying to put
    // total waiting time, as the sum of all end times minus the sum of all start times
    int64_t waited_ns = 0;
    int64_t since_ns = 0;  // when the first of the current waiters arrived
    WaitClock turns;       // counts waits for a turn, but not for room

    // Return how many sleepers to wake so that k calls can continue. Call this under the lock, and pass the
    // result to `futex_wake` after releasing it. The release publishes the new `seq` before the wake-up, so
    // relaxed order is enough here.
    uint32_t call(uint32_t k) {
        uint32_t asleep = waiting > woken ? waiting - woken : 0;
        // Only the starving waiter may continue. The kernel chooses whom it wakes, so wake all.
        if (k && starving) k = asleep;
        if (k > asleep) k = asleep;
        if (k) {
            woken += k;
            seq.store(seq.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        }
        // To wake all sleepers, ask for more than there are: a new sleeper with a higher priority may be
        // woken first.
        return k && k == asleep ? INT_MAX / 8 : k;
    }
    uint32_t call_all() { return call(UINT32_MAX); }
    // Do the same as call() for readers. They are woken in the order of their ranks, and the number of
    // readers on their way never exceeds the number of cores. If a reader takes an item while another item
    // remains, it wakes the next reader (Ring::try_take). While a waiter starves, wake all readers, because
    // any of them may have to let the starving waiter go first.
    void wake_by_rank(uint32_t k, Wakes& wakes);

    // `again`: the caller continues a wait with another slice.
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
    // Add `change` to `selecting`. The second statement corrects the count after a waiter has died or a port
    // was closed.
    void count_selecting(int change) {
        if (change > 0 || selecting) selecting += uint32_t(change);
        selecting = selecting < waiting ? selecting : waiting;
    }
    int64_t waiting_for_ns() const { return all_waiting() ? now_ns() - since_ns : 0; }
    int64_t total_wait_ns() const { return waited_ns + int64_t(all_waiting()) * now_ns(); }
};

// The sleepers that an operation wakes after it has released the lock. `readers` and `writers` are counts for
// the wait queues. `word` lists the futex words of waiters outside of the queues. A waiter in this list may
// be gone by now. Waking its word then has no effect or wakes an unrelated thread, and both are harmless.
struct Wakes {
    static constexpr uint32_t MOST = 8;
    uint32_t readers = 0;
    uint32_t writers = 0;
    uint32_t words = 0;
    uint32_t ranks = 0;  // wake readers with these ranks first
    std::atomic<uint32_t>* word[MOST];

    void clear() { readers = writers = words = ranks = 0; }
    void add(std::atomic<uint32_t>& one, bool shared) {
        if (words == MOST)
            // If the list is full, which is rare, wake this word at once, even though the lock is held.
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

// Identity of a waiting call: the side, the port (or null), and the session in a ring. A put adds its item's
// size. If outputs have turns, it also adds the number of the input item for which the output was made.
enum class Side { Reader, Writer };
struct Caller {
    Side side;
    const void* port = nullptr;
    uint32_t session = 0;
    uint64_t size = 0;
    bool ordered = false;
    uint64_t number = 0;
    bool exchangeable = false;   // other workers of the stage could continue instead, so wake by rank
    PortClock* clock = nullptr;  // threads: the clock of the port, which outlives the call
    // Threads: the port's Orders, which the call obeys even while another waiter is starving.
    const uint32_t* orders = nullptr;
};

// Result of a channel operation. `Wait` never reaches Python: the call sleeps, or returns NotNow. KeepTurns:
// before the port takes an item, its outputs must begin to take turns (keep_turns() in gets.cpp). Refused:
// the item's descriptors could not be sent (Frame::refused).
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

// Spinning pays off if the other side is running right now. A successful spin doubles the budget, and a
// failed spin halves it. Once the budget is below LEAST_NS, only every 32nd wait spins, but that spin may
// last MOST_NS. A shorter spin would always end too early for a partner that answers after 20 us. MOST_NS is
// about the cost of a sleep and a wake-up, so wasted spinning at most doubles that cost.
struct Spin {
    static constexpr uint32_t MOST_NS = 50'000, LEAST_NS = 4'000, CHECKS = 16;
    // Hints that the threads of a handle share, so all accesses are relaxed.
    std::atomic<uint32_t> budget{MOST_NS};
    std::atomic<uint32_t> skipped{0};

    template <class Ready>
    bool wait(Ready ready) {
        uint32_t b = budget.load(std::memory_order_relaxed);
        if (b < LEAST_NS) {
            uint32_t s = skipped.load(std::memory_order_relaxed) + 1;
            skipped.store(s, std::memory_order_relaxed);
            if (s % 32) return false;
            b = MOST_NS;
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
