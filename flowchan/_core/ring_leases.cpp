// Leases: readers finish items or give them back, and the ring reserves items for a replacement worker.
//
// Invariant. An item gets its number when it is first taken, so numbers follow the FIFO order. Returned items
// are therefore at the front, sorted by number, and the items behind them have no numbers yet. The number of
// a returning item determines its position (`find_place`). The item must not simply go to the head, because
// items with lower numbers may have returned before it.
//
// A session's lease list keeps the order in which the session took the items, and links rely on this order.
// This order may differ from the order of the numbers. A reader that has item 3 may next take item 1, which
// another reader gave back.
#include <algorithm>
#include <utility>

#include "ring.hpp"

namespace flowchan {

void Ring::free_leased(Session& s, uint64_t most, Wakes& wakes) {
    while (s.lease_head && most && !h_->damaged) {
        const uint64_t n = free_run(s, most);
        if (!n) return void(found_damage());
        most -= n;
    }
    memory_freed(wakes);
    if (h_->notify_writer) wakes.writers += h_->writer_queue.call(1);
    if (h_->leased == 0) wake_at_end(wakes);  // see LocalQueue::acknowledge
}

void Ring::acknowledge(ReaderState& reader, Wakes& wakes) {
    if (!reader.leases) return;
    Session& s = session(reader.session);
    free_leased(s, UINT64_MAX, wakes);
    if (s.run_limit) s.begun = s.run_limit = 0;
    reader.leases = 0;
}

void Ring::acknowledge_oldest(uint32_t index, uint64_t n, Wakes& wakes) {
    if (n) free_leased(session(index), n, wakes);
}

// Find the position of item `number` in the FIFO, between `before` and `after`; 0 means an end of the list.
// The search starts from the passed values: 0 and the head, or the position of the previous item. Return
// false if the ring is damaged.
bool Ring::find_place(uint64_t number, uint64_t& before, uint64_t& after) const {
    if (before && at<Slot>(before)->number > number) before = 0, after = h_->head;
    for (uint64_t left = h_->puts - h_->takes; after; before = after, after = at<Slot>(after)->next, --left) {
        if (!left || !slot_exists(after)) return false;
        const Slot* slot = at<Slot>(after);
        if (!slot->numbered() || slot->number > number) break;
    }
    return true;
}

// Return a numbered item to the FIFO, even beyond its capacity.
void Ring::link_between(Slot* slot, uint64_t before, uint64_t after, Change& change) {
    change.set(slot->next, after);
    change.set(before ? at<Slot>(before)->next : h_->head, offset(slot));
    if (!after) change.set(h_->tail, offset(slot));
    change.set(h_->takes, h_->takes - 1);
    change.set(h_->bytes_out, h_->bytes_out - slot->size);
}

// Move the newest `n` leased items back to the FIFO, with their numbers. If this process dies halfway, the
// cleanup after its death gives back the rest.
void Ring::give_back(Session& s, uint64_t n, Wakes& wakes) {
    if (h_->damaged) return;
    uint64_t kept = 0, p = s.lease_head;
    for (uint64_t left = s.leased; left > n; left -= 1, kept = p, p = at<Slot>(p)->next)
        if (!slot_exists(p)) return void(found_damage());
    give_back_from(s, kept, p, n, wakes);
    if (kept ? at<Slot>(kept)->next : s.lease_head) found_damage();
}

// Move back `n` leased items, starting with `p`. `kept` precedes `p` in the lease list, or is 0.
void Ring::give_back_from(Session& s, uint64_t kept, uint64_t p, uint64_t n, Wakes& wakes) {
    uint64_t before = 0, after = h_->head;
    for (uint64_t left = n; left; --left) {
        Slot* slot = at<Slot>(p);
        if (!slot_exists(p) || !is_leased(slot) || !find_place(slot->number, before, after))
            return void(found_damage());
        Change change(record(Side::Writer), windows_);
        change.set(kept ? at<Slot>(kept)->next : s.lease_head, slot->next);
        if (!slot->next) change.set(s.lease_tail, kept);
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        change.set(slot->state, slot->with_place(SlotState::Inside));
        link_between(slot, before, after, change);
        before = std::exchange(p, slot->next);
        change.commit();
    }
    wakes.readers += h_->reader_queue.call(uint32_t(n));
}

void Ring::give_back_replays(uint32_t index, uint64_t n, Wakes& wakes) {
    Session& s = session(index);
    n = std::min(n, s.leased);
    if (h_->damaged || h_->state == BROKEN || !n) return;
    uint64_t p = s.lease_head;
    for (uint64_t left = n; left; --left, p = at<Slot>(p)->next) {
        if (!slot_exists(p) || !is_leased(at<Slot>(p))) return void(found_damage());
        at<Slot>(p)->state |= Slot::REPLAY;  // a replay from now on, even if this process dies
    }
    give_back_from(s, 0, s.lease_head, n, wakes);
}

void Ring::give_back_newest(uint32_t index, uint64_t n, Wakes& wakes) {
    if (n && n <= session(index).leased) give_back(session(index), n, wakes);
}

// Remove all items that were put and never taken, as if they had not been put. The caller can put them into
// another channel.
uint64_t Ring::take_back(Wakes& wakes) {
    uint64_t before = 0, p = h_->head, n = 0;
    for (uint64_t left = inside(); p && left && at<Slot>(p)->numbered(); before = p, p = at<Slot>(p)->next)
        if (!slot_exists(p) || --left > inside()) return found_damage(), 0;
    for (; p && !h_->damaged; ++n) {
        Slot* slot = at<Slot>(p);
        if (!slot_exists(p) || slot->place() != SlotState::Inside || inside() == 0) return found_damage(), n;
        p = slot->next;
        Change change(record(Side::Writer), windows_);
        change.set(before ? at<Slot>(before)->next : h_->head, p);
        if (!p) change.set(h_->tail, before);
        change.set(h_->puts, h_->puts - 1);
        change.set(h_->bytes_in, h_->bytes_in - slot->size);
        free_slot(slot, change);
        change.commit();
    }
    memory_freed(wakes);
    return n;
}

// Count the death of a reader against the first `suspects` of its leased items. Set `last` to leased item
// number `most`, and `rest` to the item after it. Return false if the ring is damaged.
bool Ring::count_deaths(uint64_t suspects, uint64_t most, uint64_t& last, uint64_t& rest) {
    for (uint64_t n = 0; n < most; ++n, last = rest, rest = at<Slot>(rest)->next) {
        if (!slot_exists(rest) || !is_leased(at<Slot>(rest))) return false;
        if (n >= suspects) continue;
        // If this process dies before the caller commits, the next process that cleans up counts the death
        // again, so `deaths` is one too high. This has no other effect.
        at<Slot>(rest)->state += Slot::DEATH;
        fault_point();
    }
    return true;
}

// Reserve leased items of a dead reader for its replacement. These items may have killed the reader, so no
// other reader should risk taking them (R10). The other leased items go back to all readers. `all`: no other
// reader may take any leased item, so reserve all of them. If `blame` is not set, flowchan ended the reader
// itself, and no item is suspected. Reserved items stay on lease.
void Ring::reserve_for(uint32_t from, uint32_t to, bool all, bool blame) {
    Session &s = session(from), &next = session(to);
    const bool suspect = blame && s.lease_head && s.at != Session::OURS;
    const uint64_t suspects = suspect ? s.suspects() : 0, most = all ? s.leased : suspects;
    if (h_->damaged || (!most && !s.reserved_head) || next.reserved_head) return;
    if ((s.lease_head && !slot_exists(s.lease_tail)) || (s.reserved_head && !slot_exists(s.reserved_tail)))
        return void(found_damage());
    uint64_t last = 0, rest = s.lease_head;
    if (!count_deaths(suspects, most, last, rest)) return void(found_damage());
    Change change(record(Side::Writer), windows_);
    if (most) change.set(at<Slot>(last)->next, s.reserved_head);
    change.set(next.reserved_head, most ? s.lease_head : s.reserved_head);
    change.set(next.reserved_tail, s.reserved_head ? s.reserved_tail : last);
    change.set(next.reserved, s.reserved + most);
    change.set(next.reserved_at, suspect ? s.at : s.reserved_at);
    if (most) {
        change.set(s.lease_head, rest);
        change.set(s.leased, s.leased - most);
    }
    change.set(s.reserved_head, 0);
    change.set(s.reserved, 0);
    change.commit();
}

// Take the first item that is reserved for this session.
Step Ring::take_reserved(Taken& taken, ReaderState& reader) {
    Session& s = session(reader.session);
    Slot* slot = at<Slot>(s.reserved_head);
    if (!slot_exists(s.reserved_head) || !payload_exists(slot) || !is_leased(slot)) return found_damage();
    if (s.lease_head && !slot_exists(s.lease_tail)) return found_damage();
    taken.kind = slot->kind;
    taken.size = slot->size;
    taken.deaths = slot->deaths();
    taken.is_replay = slot->is_replay();
    taken.died_unpickling = s.reserved_at == Session::UNPICKLING;
    taken.number = slot->number;
    taken.made_for = Slot::KEYLESS;
    taken.slot = slot;
    taken.at = payload(slot);
    Change change(record(Side::Reader), windows_);
    change.set(s.reserved_head, slot->next);
    change.set(s.reserved, s.reserved - 1);
    change.set(slot->next, 0);
    change.set(s.lease_head ? at<Slot>(s.lease_tail)->next : s.lease_head, offset(slot));
    change.set(s.lease_tail, offset(slot));
    change.set(s.leased, s.leased + 1);
    change.commit();
    if (reader.leases++ == 0) reader.number = slot->number;
    return Step::Done;
}

// Reserve this reader's leased items for itself, so that it takes them again before any others.
void Ring::begin_again(ReaderState& reader) {
    Session& s = session(reader.session);
    reader.leases = 0;
    if (h_->damaged || !s.lease_head) return;
    if (!slot_exists(s.lease_tail) || (s.reserved_head && !slot_exists(s.reserved_tail)))
        return void(found_damage());
    Change change(record(Side::Reader), windows_);
    change.set(at<Slot>(s.lease_tail)->next, s.reserved_head);
    if (!s.reserved_head) change.set(s.reserved_tail, s.lease_tail);
    change.set(s.reserved_head, s.lease_head);
    change.set(s.reserved, s.reserved + s.leased);
    change.set(s.reserved_at, Session::OURS);
    change.set(s.lease_head, 0);
    change.set(s.leased, 0);
    change.commit();
}

// Return the lowest number of all items that are leased, reserved or returned. If there are none, return the
// number of the next item.
uint64_t Ring::first_unfinished() const {
    uint64_t first = h_->numbered;
    const auto check = [&](uint64_t number) { first = std::min(first, number); };
    if (is_next_before(first)) check(at<Slot>(h_->head)->number);
    for (uint32_t i = 1; i < h_->sessions().size(); ++i) {
        if (h_->sessions()[i].role != Session::READER) continue;
        for (const Slot* slot : leased_slots(i)) check(slot->number);
        for (const uint64_t number : reserved_numbers(i)) check(number);
    }
    return first;
}

void Ring::order(uint32_t index, Orders what, Wakes& wakes) {
    session(index).orders |= what;
    wakes.readers += h_->reader_queue.call_all();
}

// Give a session's reserved items back to all readers, because the session is ending before it has taken
// them.
void Ring::give_back_reserved(Session& s, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Writer), windows_);
    change.set(s.lease_head, s.reserved_head);
    change.set(s.lease_tail, s.reserved_tail);
    change.set(s.leased, s.reserved);
    change.set(s.reserved_head, 0);
    change.set(s.reserved, 0);
    change.commit();
    give_back(s, s.leased, wakes);
}

}  // namespace flowchan
