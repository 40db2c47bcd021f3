// Turn-taking between two processes that use one ring in tight loops.
//
// The main cost of an operation is fetching cache lines from another core. Two processes in tight loops take
// these lines from each other for every item, and spend most of their time waiting for them. A single process
// passes ten items in the same time.
//
// Algorithm. If another process used the ring last, a process rests for about 4 µs before it takes the lock.
// During that time, the other process has all lines in its cache. When that process finds that it was
// overtaken, it rests as well. So the processes alternate, each with a run of items, and the lines move once
// per run. A rest never delays an item that was put: readers can get it at once, and each call does one
// operation.
//
// Only a process in a tight loop rests. A process that works between its operations gains more from running
// in parallel. Like spinning (waiting.hpp), a rest must pay off. It fails if the other processes do not use
// it for a run, or do not rest themselves. After a failure, the next rests are skipped, about twice as many
// as after the failure before. A process that makes round trips never rests, because much more time passes
// between two of its operations than in a tight loop.
//
// All values are hints, which the threads of a handle share, so all accesses are relaxed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "waiting.hpp"

namespace flowchan {

// A cheap clock with two to four ticks per nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return int64_t(__builtin_ia32_rdtsc());
#else
    return 3 * now_ns();
#endif
}

class TurnTaking {
  public:
    static constexpr int64_t REST = 10'000;    // in ticks, like TIGHT and CROWDED
    static constexpr int64_t TIGHT = 900;      // a loop as short as this gains from taking turns ...
    static constexpr int64_t CROWDED = 2'500;  // ... and takes up to this long if lines move for every item
    static constexpr uint64_t LONG = REST / TIGHT;  // operations in a run that makes a rest worthwhile
    static constexpr uint32_t MOST_LEFT_OUT = 256;

    // Returns whether to rest before taking the ring, because another process used it last.
    bool should_rest(int64_t now) {
        const uint64_t run = count_.get();
        if (rested_.get()) leave_out(chances_, run < LONG);
        const int64_t cycle = (now - since_.get()) / int64_t(run + 1);
        const bool rests =
            cycle < (run < LONG / 3 ? CROWDED : TIGHT) && chance(alone_) && (run >= LONG || chance(chances_));
        rested_.set(rests);
        return rests;
    }
    // Call this under the lock after `should_rest`. `total` is the number of operations of all processes so
    // far.
    void took_over(int64_t wanted, uint64_t total) {
        const int64_t others = int64_t(total - total_.get() - count_.get());
        if (rested_.get()) leave_out(alone_, others < int64_t(LONG / 2));
        total_.set(total);
        since_.set(rested_.get() ? wanted + REST : wanted);
        count_.set(0);
    }
    // Call this under the lock for every operation.
    void count() { count_.set(count_.get() + 1); }

  private:
    template <class T>
    struct Hint {
        std::atomic<T> value{0};
        T get() const { return value.load(std::memory_order_relaxed); }
        void set(T to) { value.store(to, std::memory_order_relaxed); }
    };
    // How many rests to skip: those that remain, and the number set last.
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

    Hint<uint64_t> count_;  // operations since `since_`, when this process took over the ring
    Hint<int64_t> since_;
    Hint<uint64_t> total_;  // operations of all processes until `since_`
    Hint<bool> rested_;     // this process rested before it took over
    Doubt alone_;           // skips rests if the others made little use of one
    Doubt chances_;         // skips rests if the others did not rest themselves
};

inline void rest(int64_t since) {
    while (ticks() - since < TurnTaking::REST) cpu_relax();
}

}  // namespace flowchan
