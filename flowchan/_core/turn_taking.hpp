// How two processes that are both busy with one ring take turns at it.
//
// What an operation costs is the cache lines that it finds in another core. Two sides in tight loops take
// them from each other at every item, and each waits for lines most of the time; one side alone passes ten
// items meanwhile. So who finds that another process has had the ring since rests for about 4 µs before it
// takes the lock. The other one finds all lines at home meanwhile, and rests in its turn when it is
// overtaken: so runs of items alternate, and the lines move once for each run. Nothing is held back by
// that: what was put is there for everybody at once, and each call does its one operation.
//
// Only who is in a tight loop rests, because who does much else between two operations has more from
// working at the same time. And resting must pay, as spinning must (waiting.hpp): when the others have not
// used a rest for a run of theirs, or have not let us have one after it, the next chances to rest are left
// out, twice as many each time. A round trip never rests: there, far more than a tight loop takes passes
// between two operations.
//
// All of it is hints, shared by the threads of a handle: relaxed everywhere.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "waiting.hpp"

namespace flowchan {

// A clock that costs next to nothing and runs at two to four ticks a nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return int64_t(__builtin_ia32_rdtsc());
#else
    return 3 * now_ns();
#endif
}

class Pace {
  public:
    static constexpr int64_t REST = 10'000;    // in ticks, as are these
    static constexpr int64_t TIGHT = 900;      // a loop this short gains by taking turns ...
    static constexpr int64_t CROWDED = 2'500;  // ... and takes up to this long while lines move at every item
    static constexpr uint64_t LONG = REST / TIGHT;  // operations of a run that was worth a rest
    static constexpr uint32_t MOST_LEFT_OUT = 256;

    // Another process has had the ring, and now this one wants it: whether to rest before.
    bool should_rest(int64_t now) {
        const uint64_t run = count_.get();
        if (rested_.get()) leave_out(chances_, run < LONG);
        const int64_t cycle = (now - since_.get()) / int64_t(run + 1);
        const bool rests =
            cycle < (run < LONG / 3 ? CROWDED : TIGHT) && chance(alone_) && (run >= LONG || chance(chances_));
        rested_.set(rests);
        return rests;
    }
    // Under the lock, after that. `total`: operations that all processes have done so far.
    void took_over(int64_t wanted, uint64_t total) {
        const int64_t others = int64_t(total - total_.get() - count_.get());
        if (rested_.get()) leave_out(alone_, others < int64_t(LONG / 2));
        total_.set(total);
        since_.set(rested_.get() ? wanted + REST : wanted);
        count_.set(0);
    }
    // Under the lock, at every operation.
    void count() { count_.set(count_.get() + 1); }

  private:
    template <class T>
    struct Hint {
        std::atomic<T> value{0};
        T get() const { return value.load(std::memory_order_relaxed); }
        void set(T to) { value.store(to, std::memory_order_relaxed); }
    };
    // How many chances to leave out from now on, and how many it were last time.
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

    Hint<uint64_t> count_;  // operations since this process took the ring over, and when that was
    Hint<int64_t> since_;
    Hint<uint64_t> total_;  // operations of all processes by then
    Hint<bool> rested_;     // before that
    Doubt alone_;           // the others did little while this one rested
    Doubt chances_;         // they did not rest in their turn
};

inline void rest(int64_t since) {
    while (ticks() - since < Pace::REST) cpu_relax();
}

}  // namespace flowchan
