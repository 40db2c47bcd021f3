// Runs: batches of small items. A put or a get changes the words of the item's slot, and words that link and
// count items. A run changes the latter only once. It is a single Change in the redo record, so all of it
// happens or none does.
//
// A run contains only items that need no other change. Items that were given back, are viewed, have
// descriptors, or wait for a turn are handled singly. So are items that do not fit into the ring, because the
// call for a single item then reports why.
#include <algorithm>

#include "ring.hpp"

namespace flowchan {

namespace {

// How many words a Change needs for a run, besides those of each item.
constexpr uint64_t TO_PUT = 7, TO_TAKE = 9, TO_FREE = 6;

}  // namespace

// Put the first of these items, up to the first one of another size class. None of them may be an output for
// an input item. Return how many were put, or 0 if they must be put singly.
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
    h_->reader_queue.wake_by_rank(uint32_t(n), wakes);
    return n;
}

// Lease up to `count` items, stopping at `most_bytes` bytes. Return how many were leased, or 0 if they must
// be taken singly.
uint64_t Ring::take_run(ReaderState& reader, InRun* run, uint64_t count, uint64_t most_bytes, Wakes& wakes) {
    Session& s = session(reader.session);
    if (h_->state >= BROKEN || map_incomplete_ || s.reserved_head) return 0;
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

// Free up to `most` of a session's oldest leases: a run of items with the same size class and no viewer, or a
// single item. Return how many were freed, or 0 if the memory is damaged.
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
