// How members agree on a plan for each operation.
//
// Algorithm. Rank 0 tries plans for each operation and size class, and keeps the fastest. Each operation also
// publishes the plan for the next operation. All members therefore know that plan in time, without another
// message. The cells of the next operation report how long each member took. Rank 0 uses the time of the
// slowest member.
#include "group.hpp"

#include <algorithm>

namespace flowchan {

namespace {

// In an exchange, each member reads all inputs. Groups with more members than this try an exchange only for
// small data, because large inputs would take too long.
constexpr uint32_t MOST_EXCHANGE = 7;
constexpr uint32_t SMALL_KINDS = 2;
// Lower bound of the smallest size class in bytes. For less data, all plans take equally long.
constexpr uint64_t LEAST = 8 * 1024;
constexpr uint32_t IN_ONE_PIECE = 4;  // size classes that fit into one small piece
// Number of size classes so small that one thread has read the data before a second thread could start.
constexpr uint32_t BY_ONE = 8;

constexpr uint32_t BY_TWO = plans_where([](const Plan& one) { return one.by_two; });
constexpr uint32_t KEPT_PAST = plans_where([](const Plan& one) { return one.keeps_past; });
// Plans with large pieces; each also exists with small pieces.
constexpr uint32_t IN_LARGE = plans_where([](const Plan& one) {
    return one.algorithm != Algorithm::Direct && one.piece == BIG && !one.shows_past && !one.keeps_past;
});

bool is_small(uint32_t kind) { return kind < SMALL_KINDS || kind == UNTRIED; }

}  // namespace

uint32_t Member::kind_of(uint64_t bytes) {
    return bytes <= LEAST ? UNTRIED : std::min<uint32_t>(std::bit_width((bytes - 1) / LEAST) - 1, TRIED - 1);
}

// Returns a bit for each plan that can run this operation. If several plans would do the same work, the
// result includes only one of them. All members that make the same call get the same result.
uint32_t Member::possible(uint32_t doing, uint32_t kind) const {
    const bool in_one_piece = kind < IN_ONE_PIECE || kind == UNTRIED;
    uint32_t found = usable_plans(doing, kind);
    if (in_one_piece) found &= ~IN_LARGE;
    if (in_one_piece || doing == REDUCE_SCATTER) found &= ~KEPT_PAST;
    if (kind < BY_ONE || kind == UNTRIED || header_->crowded) found &= ~BY_TWO;
    return found;
}

// Returns a bit for each plan that can run this operation, including plans that do the same work.
uint32_t Member::usable_plans(uint32_t doing, uint32_t kind) const {
    if (const Algorithm algorithm = chosen_[doing % OPERATIONS]; algorithm != Algorithm::Any)
        return plans_of(algorithm == Algorithm::Direct && !direct_ ? Algorithm::Chunks : algorithm);
    if (doing == REDUCE || doing == ALLREDUCE) {
        // Between two members, the plan `exchange` reads as much data as the plan `slices`, but copies less.
        const bool by_slices = size > 2 || doing == REDUCE;
        const bool by_exchange = size <= MOST_EXCHANGE || is_small(kind);
        return (by_slices ? plans_of(Algorithm::Slices) : 0) |
               (by_exchange ? plans_of(Algorithm::Exchange) : 0);
    }
    const bool may_read = direct_ && size > 1 && doing != REDUCE_SCATTER && !is_small(kind);
    return plans_of(Algorithm::Chunks) | (may_read ? plans_of(Algorithm::Direct) : 0);
}

// Returns the plan to try first. If members outnumber the cores, each round costs context switches, so this
// plan has few rounds.
uint32_t Member::first_of(uint32_t doing, uint32_t kind) const {
    uint32_t found = possible(doing, kind);
    if (const uint32_t slices = found & plans_of(Algorithm::Slices); !is_small(kind) && slices)
        found = slices;
    if (const uint32_t large = found & IN_LARGE; header_->crowded && large) found = large;
    return uint32_t(std::countr_zero(found));
}

uint32_t Member::number_of(uint32_t doing, uint64_t bytes) const {
    const uint32_t kind = kind_of(bytes);
    const uint32_t next = kind == UNTRIED ? UNKNOWN : next_[doing % OPERATIONS][kind];
    return next != UNKNOWN && (possible(doing, kind) >> next & 1) ? next : first_of(doing, kind);
}

// Returns the plan for this operation. `bytes` is the size of this member's data.
const Plan& Member::begin_plan(uint32_t doing, uint64_t bytes) {
    const uint32_t plan = number_of(doing, bytes);
    round_flags_ = plan << OWN_PLAN;
    const uint32_t kind = kind_of(bytes);
    if (kind == UNTRIED || size == 1) return PLANS[plan];
    timed_ = {.is = true, .doing = doing % OPERATIONS, .kind = kind, .plan = plan};
    if (rank != 0) return PLANS[plan];
    if (tuners_.empty()) tuners_.resize(OPERATIONS * TRIED);
    Tuner& tuner = tuners_[timed_.doing * TRIED + kind];
    if (const uint32_t plans = possible(doing, kind); plans != tuner.plans()) tuner = Tuner(plans, plan);
    round_flags_ |= TELLS | tuner.next() << NEXT_PLAN;
    return PLANS[plan];
}

// Call this in the first round, after all members have arrived with matching calls.
void Member::have_come(Call call) {
    if (cell(0).flags & TELLS)
        next_[call.doing % OPERATIONS][kind_of(cell(0).bytes)] = cell(0).flags >> NEXT_PLAN & 15;
    if (before_.is) {
        uint32_t took = 0;
        for (uint32_t r = 0; r < size; ++r) took = std::max(took, cell(r).took);
        Tuner& tuner = tuners_[before_.doing * TRIED + before_.kind];
        tuner.took(before_.plan, int64_t(took) + before_.filled);
        for (uint32_t i = 0; i < ALL_PLANS; ++i)
            header_->took[before_.doing][before_.kind][i].store(saturated(tuner.least(i)),
                                                                std::memory_order_relaxed);
        before_.is = false;
    }
    if (!timed_.is) return;
    for (uint32_t r = 0; r < size; ++r) timed_.filled = std::max(timed_.filled, cell(r).filled);
    timed_.since = now_ns();
}

void Member::end_plan(bool done) {
    took_ = timed_.is && done ? saturated(now_ns() - timed_.since) : 0;
    before_ = timed_;
    // The cells of a failed operation lack the times of the previous operation, so clear `before_`.
    before_.is = rank == 0 && took_;
    timed_.is = false;
    filled_ = round_flags_ = 0;
}

}  // namespace flowchan
