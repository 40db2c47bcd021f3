// In which manner operations are done. Rank 0 finds by trial which one is the quickest, for each operation and each
// size up to its double, and says in each how the next one is done: so all know it when they begin that, and no word
// more is sent. How long one took whoever took longest stands in the cells of the next one.
#include "group.hpp"

#include <algorithm>

namespace flowchan {

namespace {

// By exchange each reads what all have. Of so many members that is so much that it isn't tried, but for what is small.
constexpr uint32_t MOST_EXCHANGE = 7;
constexpr uint32_t SMALL_KINDS = 2;
// Bytes of the smallest kind; of no more than these all manners are alike.
constexpr uint64_t LEAST = 8 * 1024;
constexpr uint32_t IN_ONE_PIECE = 4;  // kinds of what is no more than a small piece
constexpr uint32_t BY_ONE = 8;        // and of what is read while a thread begins

constexpr uint32_t BY_TWO = manners([](const Manner& one) { return one.by_two; });
constexpr uint32_t KEPT_PAST = manners([](const Manner& one) { return one.keeps_past; });
// In large pieces, and as in small ones else.
constexpr uint32_t IN_LARGE = manners([](const Manner& one) {
    return one.way != Way::Direct && one.piece == BIG && !one.shows_past && !one.keeps_past;
});

bool is_small(uint32_t kind) { return kind < SMALL_KINDS || kind == UNTRIED; }

}  // namespace

uint32_t Member::kind_of(uint64_t bytes) {
    return bytes <= LEAST ? UNTRIED : std::min<uint32_t>(std::bit_width((bytes - 1) / LEAST) - 1, TRIED - 1);
}

// A bit for each manner that this can be done in, without those that come to the same as others; the same for all who
// call the same.
uint32_t Member::possible(uint32_t doing, uint32_t kind) const {
    const bool in_one_piece = kind < IN_ONE_PIECE || kind == UNTRIED;
    uint32_t found = ways_of(doing, kind);
    if (in_one_piece) found &= ~IN_LARGE;
    if (in_one_piece || doing == REDUCE_SCATTER) found &= ~KEPT_PAST;
    if (kind < BY_ONE || kind == UNTRIED || header_->crowded) found &= ~BY_TWO;
    return found;
}

// The same, with those that come to the same.
uint32_t Member::ways_of(uint32_t doing, uint32_t kind) const {
    if (const Way way = chosen_[doing % OPERATIONS]; way != Way::Any)
        return manners_of(way == Way::Direct && !direct_ ? Way::Chunks : way);
    if (doing == REDUCE || doing == ALLREDUCE) {
        // Two read as much either way, and copy less by exchange.
        const bool by_slices = size > 2 || doing == REDUCE;
        const bool by_exchange = size <= MOST_EXCHANGE || is_small(kind);
        return (by_slices ? manners_of(Way::Slices) : 0) | (by_exchange ? manners_of(Way::Exchange) : 0);
    }
    const bool may_read = direct_ && size > 1 && doing != REDUCE_SCATTER && !is_small(kind);
    return manners_of(Way::Chunks) | (may_read ? manners_of(Way::Direct) : 0);
}

// The one to begin with. With more members than cores a round costs context switches, so there are few of them.
uint32_t Member::first_of(uint32_t doing, uint32_t kind) const {
    uint32_t found = possible(doing, kind);
    if (const uint32_t slices = found & manners_of(Way::Slices); !is_small(kind) && slices) found = slices;
    if (const uint32_t large = found & IN_LARGE; header_->crowded && large) found = large;
    return uint32_t(std::countr_zero(found));
}

uint32_t Member::number_of(uint32_t doing, uint64_t bytes) const {
    const uint32_t kind = kind_of(bytes);
    const uint32_t next = kind == UNTRIED ? UNKNOWN : next_[doing % OPERATIONS][kind];
    return next != UNKNOWN && (possible(doing, kind) >> next & 1) ? next : first_of(doing, kind);
}

// How this one is done, of which this member has so many bytes.
const Manner& Member::begin_trial(uint32_t doing, uint64_t bytes) {
    const uint32_t manner = number_of(doing, bytes);
    says_ = manner << OWN_MANNER;
    const uint32_t kind = kind_of(bytes);
    if (kind == UNTRIED || size == 1) return MANNERS[manner];
    timed_ = {.is = true, .doing = doing % OPERATIONS, .kind = kind, .manner = manner};
    if (rank != 0) return MANNERS[manner];
    if (trials_.empty()) trials_.resize(OPERATIONS * TRIED);
    Trial& trial = trials_[timed_.doing * TRIED + kind];
    if (const uint32_t ways = possible(doing, kind); ways != trial.ways()) trial = Trial(ways, manner);
    says_ |= TELLS | trial.next() << NEXT_MANNER;
    return MANNERS[manner];
}

// In the first round, when all have come and call the same.
void Member::have_come(Call call) {
    if (cell(0).flags & TELLS)
        next_[call.doing % OPERATIONS][kind_of(cell(0).bytes)] = cell(0).flags >> NEXT_MANNER & 15;
    if (before_.is) {
        uint32_t took = 0;
        for (uint32_t r = 0; r < size; ++r) took = std::max(took, cell(r).took);
        Trial& trial = trials_[before_.doing * TRIED + before_.kind];
        trial.took(before_.manner, int64_t(took) + before_.filled);
        for (uint32_t i = 0; i < ALL_MANNERS; ++i)
            header_->took[before_.doing][before_.kind][i].store(saturated(trial.least(i)),
                                                                std::memory_order_relaxed);
        before_.is = false;
    }
    if (!timed_.is) return;
    for (uint32_t r = 0; r < size; ++r) timed_.filled = std::max(timed_.filled, cell(r).filled);
    timed_.since = now_ns();
}

void Member::end_trial(bool done) {
    took_ = timed_.is && done ? saturated(now_ns() - timed_.since) : 0;
    before_ = timed_;
    before_.is =
        rank == 0 && took_;  // not after one that failed, whose cells say nothing of the one before it
    timed_.is = false;
    filled_ = says_ = 0;
}

}  // namespace flowchan
