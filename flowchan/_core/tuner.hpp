// Finds the fastest of several plans for an operation that runs again and again.
//
// Algorithm. A trial runs a few operations with the best plan so far, and a few with another plan. The faster
// of the two becomes the best plan. The slower plan gets another trial later, or much later if it was clearly
// slower. If the best plan suddenly becomes much slower, all plans are tried again, because the cache load or
// the placement on cores may have changed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flowchan {

// Returns nanoseconds in 32 bits; longer times become 4.3 s.
inline uint32_t saturated(int64_t ns) { return uint32_t(std::min<int64_t>(ns, UINT32_MAX)); }

class Tuner {
  public:
    static constexpr uint32_t MOST_PLANS = 16;

    Tuner() = default;
    // `plans` has one bit per plan.
    Tuner(uint32_t plans, uint32_t best) : plans_(plans), best_(best) {}

    uint32_t plans() const { return plans_; }

    // Returns the plan for the next operation. The times of the last few operations may still be unknown.
    uint32_t next() {
        ++count_;
        if (remaining_ && --remaining_ == 0) judge();
        if (!remaining_) begin();
        return LATE < remaining_ && remaining_ <= LATE + TRIES ? other_ : best_;
    }
    void took(uint32_t plan, int64_t ns) {
        now_[plan] = std::min(now_[plan], ns);
        if (plan != best_ || remaining_ || !least_[plan]) return;
        slow_ = 3 * ns > 4 * least_[plan] ? slow_ + 1 : 0;
        if (slow_ < SLOW || count_ < patient_until_) return;
        patient_until_ = count_ + PATIENT;
        std::fill_n(rest_, MOST_PLANS, 0);
        std::fill_n(due_, MOST_PLANS, 0);
    }
    // Returns the shortest time in the latest trial of this plan, or 0 before its first trial.
    int64_t least(uint32_t plan) const { return least_[plan]; }

  private:
    // How many operations a trial runs per plan. Only the shortest time counts, because other load rarely
    // disturbs all of these operations.
    static constexpr uint32_t TRIES = 4;
    static constexpr uint32_t LATE = 2;  // the time of an operation becomes known this many operations later
    static constexpr uint32_t FEWEST = 128, MOST = 2048;  // operations before the slower plan is tried again
    // this many slow operations in a row indicate that something has changed
    static constexpr uint32_t SLOW = 8;
    // At least this many operations run between two restarts of all trials, because a busy machine also makes
    // operations slow.
    static constexpr uint64_t PATIENT = 1024;

    void begin() {
        for (uint32_t plan = 0; plan < MOST_PLANS; ++plan) {
            if (plan == best_ || !(plans_ >> plan & 1) || count_ < due_[plan]) continue;
            other_ = plan;
            now_[best_] = now_[other_] = INT64_MAX;
            remaining_ = 2 * TRIES + LATE;
            return;
        }
    }
    void judge() {
        const int64_t best = now_[best_], other = now_[other_];
        uint32_t loser = other_;
        // If all operations with one of the plans failed, its time is INT64_MAX, and the best plan stays.
        if (best != INT64_MAX && other != INT64_MAX) {
            least_[best_] = best, least_[other_] = other;
            if (other < best) std::swap(best_, loser);
        }
        const bool clear = std::min(best, other) < std::max(best, other) / 5 * 4;
        rest_[loser] = clear ? std::clamp(2 * rest_[loser], FEWEST, MOST) : FEWEST;
        due_[loser] = count_ + rest_[loser];
        slow_ = 0;
    }

    uint32_t plans_ = 0, best_ = 0, other_ = 0, remaining_ = 0, slow_ = 0;
    uint32_t rest_[MOST_PLANS] = {};
    uint64_t count_ = 0, patient_until_ = 0, due_[MOST_PLANS] = {};
    // Shortest time of each plan, in the current trial and in the plan's last complete trial.
    int64_t now_[MOST_PLANS] = {}, least_[MOST_PLANS] = {};
};

}  // namespace flowchan
