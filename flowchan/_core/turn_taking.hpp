// Turn-taking between processes that use the same ring in tight loops.
//
// The main cost of an operation is fetching cache lines from another core. Two processes in tight loops take
// these lines from each other for every item, and spend most of their time waiting for the lines. A single
// process would pass ten items in that time.
//
// Algorithm. Before taking the lock, a process rests for about 4 µs if another process used the ring last.
// During the rest, the other process has all lines in its cache. When that process sees that it was
// overtaken, it rests as well. So the processes alternate, each with a run of items, and the lines move once
// per run. A rest never delays an item that was already put. Readers can get the item at once, because a
// process rests before an operation and never in the middle of one.
//
// Only a process in a tight loop rests. A process that works between its operations gains more from running
// in parallel.
//
// Like spinning (waiting.hpp), a rest must pay off. A rest fails if the other processes do not use it for a
// run of operations, or do not rest when their turn comes. After each failure, about twice as many rests are
// skipped as after the previous failure. A process that makes round trips never rests, because its operations
// are much further apart than in a tight loop.
//
// All values are hints that the threads of a handle share, so all accesses are relaxed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "waiting.hpp"

namespace flowchan {

// A cheap clock that ticks two to four times per nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return int64_t(__builtin_ia32_rdtsc());
#else
    return 3 * now_ns();
#endif
}

class TurnTaking {
  public:
    static constexpr int64_t REST = 10'000;  // in ticks, as are TIGHT and CROWDED
    static constexpr int64_t TIGHT = 900;    // ticks per operation; a loop this tight gains from taking turns
    // ticks per operation of such a loop if lines move for every item
    static constexpr int64_t CROWDED = 2'500;
    static constexpr uint64_t LONG = REST / TIGHT;  // a run of this many operations makes a rest worthwhile
    static constexpr uint32_t MOST_LEFT_OUT = 256;

    // Returns whether to rest before using the ring; a thread rests if another process used the ring last.
    bool should_rest(int64_t now) {
        const uint64_t run = count_.get();
        if (rested_.get()) leave_out(chances_, run < LONG);
        const int64_t cycle = (now - since_.get()) / int64_t(run + 1);
        const bool rests =
            cycle < (run < LONG / 3 ? CROWDED : TIGHT) && chance(alone_) && (run >= LONG || chance(chances_));
        rested_.set(rests);
        return rests;
    }
    // Call this under the lock after `should_rest`. `total` counts the operations of all processes.
    void took_over(int64_t wanted, uint64_t total) {
        const int64_t others = int64_t(total - total_.get() - count_.get());
        if (rested_.get()) leave_out(alone_, others < int64_t(LONG / 2));
        total_.set(total);
        since_.set(rested_.get() ? wanted + REST : wanted);
        count_.set(0);
    }
    // Call this under the lock for each operation.
    void count() { count_.set(count_.get() + 1); }

  private:
    template <class T>
    struct Hint {
        std::atomic<T> value{0};
        T get() const { return value.load(std::memory_order_relaxed); }
        void set(T to) { value.store(to, std::memory_order_relaxed); }
    };
    // `left`: rests still to skip. `last`: rests to skip because of the latest rest; 0 if it was useful.
    struct Doubt {
        Hint<uint32_t> left, last;
    };
    static void leave_out(Doubt& doubt, bool in_vain) {
        doubt.last.set(in_vain ? std::min(2 * doubt.last.get() + 8, MOST_LEFT_OUT) : 0);
        if (in_vain) doubt.left.set(doubt.last.get());
    }
    static bool chance(Doubt& doubt) {
        const uint32_t left = doubt.left.get();
        if (left) doubt.left.set(left - 1);
        return left == 0;
    }

    Hint<uint64_t> count_;  // operations since `since_`, when this process took over
    Hint<int64_t> since_;
    Hint<uint64_t> total_;  // operations of all processes before `since_`
    Hint<bool> rested_;     // this process took over after a rest
    Doubt alone_;           // skips rests after the other processes made little use of a rest
    Doubt chances_;         // skips rests after the other processes did not rest
};

inline void rest(int64_t since) {
    while (ticks() - since < TurnTaking::REST) cpu_relax();
}

}  // namespace flowchan
