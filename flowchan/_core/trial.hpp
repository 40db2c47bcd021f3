// Which of two ways to do what is done again and again is the quicker one. Some are done in either way, then many
// in that which took least; then both are tried anew, for that changes: with what else uses the caches, and with
// the cores that the system gives.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flowchan {

class Trial {
  public:
    explicit Trial(bool best = false) : best_(best) {}

    // The way of the one after that which is done now: all have to know it before they begin it.
    bool next() const { return best_ != (done_ + 1 >= TRIES && done_ + 1 < 2 * TRIES); }

    // One has been done. True: both ways have been tried now, and took so long at least.
    bool took(bool way, int64_t ns) {
        if (done_ == 0 || done_ == 2 * TRIES + rest_) done_ = 0, least_[0] = least_[1] = INT64_MAX;
        least_[way] = std::min(least_[way], ns);
        if (++done_ != 2 * TRIES) return false;
        const bool other = !best_, wins = least_[other] < least_[best_];
        const bool clear = !wins && least_[other] / 5 * 4 > least_[best_];
        if (wins) best_ = other;
        rest_ = clear ? std::min(rest_ * 2, MOST) : FEWEST;
        return true;
    }
    int64_t least(bool way) const { return least_[way]; }

  private:
    static constexpr uint32_t TRIES = 4;                 // the least of some is hardly ever disturbed
    static constexpr uint32_t FEWEST = 64, MOST = 1024;  // between trials

    bool best_;
    uint32_t done_ = 0, rest_ = FEWEST;
    int64_t least_[2] = {INT64_MAX, INT64_MAX};
};

}  // namespace flowchan
