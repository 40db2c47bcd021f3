// Runs: batches of small items. A put or a get changes the words of the item's slot, and the words that link
// and count items. A run changes the words that link and count items only once for all of its items. A run is
// a single Change in the redo record, so it happens completely or not at all.
//
// A run contains only items that need no other changes. Items are handled one by one if they were given back,
// are viewed, have descriptors, or must wait for a turn. The same applies to items that do not fit into the
// ring, because the call for the single item then reports why.
//
// Runs of a worker. A worker leases a run only while no other reader is waiting, and leases at most its
// share of the items in the channel. The worker starts the items of the run one by one, without the lock. A
// reader that finds the channel empty recalls half of the items that a run's worker has not started. If the
// worker has been processing one item for a few milliseconds, a reader that takes another item recalls all
// items that are not started. A slow item therefore does not delay the items behind it.
//
// Recalling follows the protocol of Cilk-5 (Frigo, Leiserson and Randall, 1998). The worker first writes
// `begun` and then reads `run_limit`. The other reader, which holds the lock, first writes `run_limit` and
// then reads `begun`. So at least one of them sees the other's value. The worker then takes the lock, and
// learns which items it still has.
//
// Invariants. The items of a run have consecutive numbers, and the worker finishes them in this order. All
// started items except the last are finished, and their outputs were put. They stay on lease until the run
// ends, but counts() counts each of them as if it had been taken alone.
#include <algorithm>
#include <utility>

#include "ring.hpp"

namespace flowchan {

namespace {

// How many words a Change needs for a run, in addition to the words of each item.
constexpr uint64_t TO_PUT = 7, TO_TAKE = 9, TO_FREE = 6;
// A run has at most capacity / PART_OF_CAPACITY items. Leased items do not count towards the capacity, so
// this limits how far the total number of items can exceed `capacity`.
constexpr uint64_t PART_OF_CAPACITY = 8;
// Minimum interval between two checks for workers that are slow with an item of their run. The resolution of
// the coarse clock may make the interval longer.
constexpr uint64_t SLOW_NS = 1'000'000;

uint64_t started(const Session& s) {
    return std::atomic_ref(const_cast<uint64_t&>(s.begun)).load(std::memory_order_seq_cst);
}

}  // namespace

// Put the first few of these items together, and stop before the first item of another size class. None of
// them may be an output for an input item. Return how many were put, or 0 if they must be put singly.
uint64_t Ring::put_run(const Small* items, uint64_t count, Wakes& wakes) {
    if (h_->state != OPEN || map_incomplete_ || (h_->head && !slot_exists(h_->tail))) return 0;
    const uint64_t inside = h_->puts - h_->takes + h_->parked + h_->claimed;
    const uint64_t most = std::min({count, Redo::MOST - TO_PUT, capacity_ - std::min(capacity_, inside)});
    const uint32_t cls = class_of(items[0].size);
    const uint64_t before = h_->bytes_in - h_->bytes_out, first = h_->free_slots[cls];
    Slot* run[Redo::MOST];
    uint64_t n = 0, bytes = 0, rest = first;
    for (; n < most && slot_exists(rest); ++n) {
        Slot* slot = at<Slot>(rest);
        const Small& item = items[n];
        if (slot->place() != SlotState::Free || slot->cls != cls || !payload_exists(slot)) break;
        if (class_of(item.size) != cls || before + bytes + item.size > most_inside()) break;
        memcpy(payload(slot), item.at, item.size);
        slot->size = item.size;
        slot->kind = uint32_t(item.kind);
        slot->number = Slot::KEYLESS;
        bytes += item.size;
        run[n] = slot;
        rest = slot->next;
    }
    if (n < 2) return 0;
    if (rest) prefetch(at<Slot>(rest));  // for the next run
    Change change(record(Side::Writer), windows_);
    for (uint64_t i = 0; i < n; ++i)
        change.set(run[i]->state, uint64_t(SlotState::Inside) | items[i].deaths * Slot::DEATH);
    change.set(run[n - 1]->next, 0);
    change.set(h_->free_slots[cls], rest);
    change.set(h_->slots_used, h_->slots_used + n);
    change.set(h_->head ? at<Slot>(h_->tail)->next : h_->head, first);
    change.set(h_->tail, offset(run[n - 1]));
    change.set(h_->puts, h_->puts + n);
    change.set(h_->bytes_in, h_->bytes_in + bytes);
    change.commit();
    wake_readers(n, wakes);
    return n;
}

// Lease up to `count` items, stopping at `most_bytes` bytes. Return how many were leased, or 0 if they must
// be taken singly.
uint64_t Ring::take_run(ReaderState& reader, InRun* run, uint64_t count, uint64_t most_bytes, Wakes& wakes) {
    Session& s = session(reader.session);
    if (!can_take_runs() || s.reserved_head) return 0;
    if (s.lease_head && !slot_exists(s.lease_tail)) return 0;
    const uint64_t most = std::min({count, h_->puts - h_->takes, (Redo::MOST - TO_TAKE) / 2});
    uint64_t n = 0, bytes = 0, rest = h_->head;
    for (; n < most && bytes < most_bytes && slot_exists(rest); ++n) {
        Slot* slot = at<Slot>(rest);
        const bool inside = slot->place() == SlotState::Inside || slot->place() == SlotState::Parked;
        if (!inside || !payload_exists(slot) || slot->numbered()) break;
        if (slot->cls >= VIEWABLE || is_taken_singly(slot->kind)) break;
        run[n] = {slot, slot->number};
        bytes += slot->size;
        rest = slot->next;
    }
    if (n < 2) return 0;
    const uint64_t first = h_->head, last = offset(run[n - 1].slot), number = h_->numbered;
    Change change(record(Side::Reader), windows_);
    for (uint64_t i = 0; i < n; ++i) {
        Slot* slot = run[i].slot;
        change.set(slot->number, number + i);
        change.set(slot->state, Slot::placed(slot->state | Slot::NUMBERED, SlotState::Leased));
    }
    change.set(run[n - 1].slot->next, 0);
    change.set(h_->head, rest);
    change.set(h_->takes, h_->takes + n);
    change.set(h_->bytes_out, h_->bytes_out + bytes);
    change.set(h_->numbered, number + n);
    change.set(s.lease_head ? at<Slot>(s.lease_tail)->next : s.lease_head, first);
    change.set(s.lease_tail, last);
    change.set(s.leased, s.leased + n);
    change.set(h_->leased, h_->leased + n);
    change.commit();
    if (reader.leases == 0) reader.number = number;
    reader.leases += uint32_t(n);
    memory_freed(wakes);
    if (h_->head) h_->reader_queue.wake_by_rank(1, wakes);
    wake_writers(wakes, &reader, uint32_t(n));
    wake_at_end(wakes);
    return n;
}

// Lease a run for a worker that has no leases, and start its first item. Return the number of items, or 0.
uint64_t Ring::begin_run(ReaderState& reader, InRun* run, Wakes& wakes) {
    Session& s = session(reader.session);
    if (s.orders || s.leased || h_->notify_writer || h_->reader_queue.waiting) return 0;
    if (reader.once || reader.alone || !h_->readers) return 0;
    recall_from_slow(reader.session, wakes);
    const uint64_t most = std::min((h_->puts - h_->takes) / h_->readers, capacity_ / PART_OF_CAPACITY);
    if (most < 2) return 0;
    h_->has_runs = 1;
    s.begun = 1;
    const uint64_t n = take_run(reader, run, most, UINT64_MAX, wakes);
    s.run_limit = n;
    if (!n) s.begun = 0;
    return n;
}

// Start the nth item of this worker's run. If this returns false, call `may_start` under the lock.
bool Ring::start_in_run(uint32_t index, uint64_t nth) {
    Session& s = session(index);
    std::atomic_ref(s.begun).store(nth, std::memory_order_seq_cst);
    fault_point();
    return nth <= std::atomic_ref(s.run_limit).load(std::memory_order_seq_cst);
}

// Return whether the worker still has the item that it wants to start. If not, the run is over.
bool Ring::may_start(ReaderState& reader) {
    Session& s = session(reader.session);
    const bool may = s.begun <= s.leased;
    s.run_limit = reader.leases = uint32_t(s.leased);
    if (!may) s.begun = s.leased;
    return may;
}

// End a run early. Finish all started items except the last one, and give back the items that were not
// started. Also give back the last started item, unless the worker keeps it.
void Ring::cut_run(ReaderState& reader, bool keeps_current, Wakes& wakes) {
    Session& s = session(reader.session);
    const uint64_t finished = std::min(s.begun, s.leased) - 1, kept = finished + keeps_current;
    if (s.leased > kept) give_back(s, s.leased - kept, wakes);
    free_leased(s, finished, wakes);
    s.begun = s.run_limit = 0;
    reader.leases = uint32_t(s.leased);
}

// Give back the items that the worker of a run has not started: all of them, or half. Return whether there
// are any such items.
bool Ring::recall(Session& s, bool all, Wakes& wakes) {
    const uint64_t before = started(s), leased = s.leased;
    if (before >= leased) return false;
    const uint64_t kept = all ? before : before + (leased - before) / 2;
    std::atomic_ref limit(s.run_limit);
    limit.store(kept, std::memory_order_seq_cst);
    fault_point();
    const uint64_t last = std::min(std::max(kept, started(s)), leased);
    if (last != kept) limit.store(last, std::memory_order_seq_cst);
    if (last < leased) give_back(s, leased - last, wakes);
    return last < leased;
}

// Recall items from any run, because this reader finds the channel empty.
bool Ring::recall_any(uint32_t index, Wakes& wakes) {
    for (uint32_t i = 1; i < h_->sessions().size() && !h_->damaged; ++i) {
        Session& s = session(i);
        const bool runs = i != index && s.role == Session::READER && s.run_limit;
        if (runs && recall(s, false, wakes)) return true;
    }
    return false;
}

// If a worker is still processing the same item of its run as at the last check, recall all unstarted items
// of the run. This reader then gets them before any item behind them.
void Ring::recall_from_slow(uint32_t index, Wakes& wakes) {
    const uint64_t now = uint64_t(coarse_now_ns());
    if (now - h_->runs_checked_ns < SLOW_NS) return;
    h_->runs_checked_ns = now;
    for (uint32_t i = 1; i < h_->sessions().size() && !h_->damaged; ++i) {
        Session& s = session(i);
        if (i == index || s.role != Session::READER || !s.run_limit || !slot_exists(s.lease_head)) continue;
        const uint64_t current = at<Slot>(s.lease_head)->number + started(s);
        if (std::exchange(s.run_seen, current) == current) recall(s, true, wakes);
    }
}

// Return whether there are items to take, in the channel or in other readers' runs. Recall them if necessary.
bool Ring::has_items_for(const ReaderState* reader, uint32_t index, bool recalls, Wakes& wakes) {
    if (reader && h_->has_runs) recall_from_slow(index, wakes);
    return h_->head || (recalls && h_->has_runs && recall_any(index, wakes));
}

// Return how many leased items have been started and finished in runs. Set `unstarted` to the number of
// leased items that have not been started.
uint64_t Ring::all_started(uint64_t& unstarted) const {
    uint64_t finished = unstarted = 0;
    if (!h_->has_runs) return 0;
    for (const Session& s : h_->sessions()) {
        if (s.role != Session::READER || !s.run_limit || !s.leased) continue;
        const uint64_t begun = std::min(started(s), s.leased);
        finished += begun - (begun > 0);
        unstarted += s.leased - begun;
    }
    return finished;
}

// End the run of a dead worker. `committed`: one more than the number of its last item with an output.
void Ring::finish_in_run(uint32_t index, uint64_t committed, Wakes& wakes) {
    Session& s = session(index);
    if (!s.run_limit) return;
    uint64_t finished = 0;
    for (const Slot* slot : leased_slots(index)) finished += slot->number < committed;
    acknowledge_oldest(index, finished, wakes);
    s.begun -= std::min(s.begun, finished);
    if (!s.begun) s.at = Session::OURS;  // the worker had started no other item
    s.run_limit = 0;
}

// Free up to `most` of the oldest leases of a session. They are either several items with the same size class
// and no viewer, or a single item. Return how many were freed, or 0 if the memory is damaged.
uint64_t Ring::free_run(Session& s, uint64_t most) {
    const uint64_t first = s.lease_head;
    Slot* run[Redo::MOST];
    uint64_t n = 0, rest = first;
    for (most = std::min({most, s.leased, Redo::MOST - TO_FREE}); n < most && rest; ++n) {
        Slot* slot = at<Slot>(rest);
        if (!slot_exists(rest) || !is_leased(slot) || slot->cls >= CLASSES) return 0;
        if (n && (slot->viewer() || slot->cls != run[0]->cls)) break;
        run[n] = slot;
        rest = slot->next;
        if (slot->viewer()) break;
    }
    if (most == 0) return 0;  // there are leases, but the count says 0
    Change change(record(Side::Reader), windows_);
    change.set(s.lease_head, rest);
    if (run[0]->viewer()) {
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        free_slot(run[0], change);
        change.commit();
        return 1;
    }
    for (uint64_t i = 0; i < n; ++i) change.set(run[i]->state, 0);
    change.set(run[n - 1]->next, h_->free_slots[run[0]->cls]);
    change.set(h_->free_slots[run[0]->cls], first);
    change.set(h_->slots_used, h_->slots_used - n);
    change.set(s.leased, s.leased - n);
    change.set(h_->leased, h_->leased - n);
    change.commit();
    return n;
}

}  // namespace flowchan
