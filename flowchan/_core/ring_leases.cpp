// Items that readers lease: they are finished, given back to the front, or reserved for a replacement that
// tries them again.
#include <algorithm>

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
    free_leased(session(reader.session), UINT64_MAX, wakes);
    reader.leases = 0;
}

void Ring::acknowledge_oldest(uint32_t index, uint64_t n, Wakes& wakes) {
    if (n) free_leased(session(index), n, wakes);
}

// Move the newest `n` leased items to the front. They keep their order and their numbers.
void Ring::give_back(Session& s, uint64_t n, Wakes& wakes) {
    if (h_->damaged || !slot_exists(s.lease_tail)) return void(found_damage());
    if (h_->head && !slot_exists(h_->head)) return void(found_damage());
    const Slot* front = h_->head ? at<Slot>(h_->head) : nullptr;
    if (front && front->numbered() && front->number < at<Slot>(s.lease_tail)->number) {
        uint64_t before = 0, p = s.lease_head;
        for (uint64_t more = s.leased; more > n; more -= 1, before = p, p = at<Slot>(p)->next)
            if (!slot_exists(p)) return void(found_damage());
        return give_back_between(s, before, p, n, wakes);
    }
    uint64_t bytes = 0, last = 0, left = s.leased, kept = 0, first = 0;
    for (uint64_t p = s.lease_head; p; last = p, p = at<Slot>(p)->next, left -= 1) {
        Slot* slot = at<Slot>(p);
        if (!slot_exists(p) || left == 0 || !is_leased(slot)) return void(found_damage());
        if (left > n) {
            kept = p;
            continue;
        }
        if (!first) first = p;
        bytes += slot->size;
        slot->state = slot->with_place(SlotState::Inside);
        fault_point();
    }
    if (left || last != s.lease_tail) return void(found_damage());
    Change change(record(Side::Writer), windows_);
    change.set(at<Slot>(s.lease_tail)->next, h_->head);
    if (!h_->head) change.set(h_->tail, s.lease_tail);
    change.set(h_->head, first);
    change.set(h_->takes, h_->takes - n);
    change.set(h_->bytes_out, h_->bytes_out - bytes);
    change.set(h_->leased, h_->leased - n);
    change.set(kept ? at<Slot>(kept)->next : s.lease_head, 0);
    change.set(s.lease_tail, kept);
    change.set(s.leased, s.leased - n);
    change.commit();
    wakes.readers += h_->reader_queue.call(uint32_t(n));
}

// Do the same if other items were given back earlier. Each item goes to its place among them, because the
// front of the FIFO is sorted by number. If this process dies in between, the call that cleans up after it
// gives back the remaining items.
//
// `p` is the first of the items, and `kept` is the item before it, or 0.
void Ring::give_back_between(Session& s, uint64_t kept, uint64_t p, uint64_t n, Wakes& wakes) {
    uint64_t before = 0, after = h_->head, steps = inside();
    for (; n && !h_->damaged; --n) {
        Slot* slot = at<Slot>(p);
        if (!slot_exists(p) || !is_leased(slot)) return void(found_damage());
        for (; after && at<Slot>(after)->numbered() && at<Slot>(after)->number < slot->number; --steps) {
            before = after;
            after = at<Slot>(after)->next;
            if ((after && !slot_exists(after)) || !steps) return void(found_damage());
        }
        const uint64_t own_offset = p;
        p = slot->next;
        Change change(record(Side::Writer), windows_);
        change.set(kept ? at<Slot>(kept)->next : s.lease_head, p);
        if (!p) change.set(s.lease_tail, kept);
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        change.set(slot->next, after);
        change.set(slot->state, slot->with_place(SlotState::Inside));
        change.set(before ? at<Slot>(before)->next : h_->head, own_offset);
        if (!after) change.set(h_->tail, own_offset);
        change.set(h_->takes, h_->takes - 1);
        change.set(h_->bytes_out, h_->bytes_out - slot->size);
        change.commit();
        before = own_offset;
        steps += 1;
        wakes.readers += h_->reader_queue.call(1);
    }
}

void Ring::give_back_newest(uint32_t index, uint64_t n, Wakes& wakes) {
    if (n && n <= session(index).leased) give_back(session(index), n, wakes);
}

void Ring::give_back_replays(uint32_t index, uint64_t n, Wakes& wakes) {
    Session& s = session(index);
    n = std::min(n, s.leased);
    if (h_->damaged || h_->state == BROKEN || !n) return;
    uint64_t p = s.lease_head;
    for (uint64_t i = 0; i < n; ++i, p = at<Slot>(p)->next) {
        if (!slot_exists(p) || !is_leased(at<Slot>(p))) return void(found_damage());
        at<Slot>(p)->state |= Slot::REPLAY;  // correct from now on, whether or not this process dies
    }
    give_back_between(s, 0, s.lease_head, n, wakes);
}

// Remove all items that were put and never taken, as if they had not been put. Their owner can put them into
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

// Count the reader's death for the first `suspects` of its leased items. Return false if the ring is damaged.
// Set `last` to the last of the first `most` items, and `rest` to the item after it.
bool Ring::count_deaths(uint64_t suspects, uint64_t most, uint64_t& last, uint64_t& rest) {
    for (uint64_t n = 0; n < most; ++n, last = rest, rest = at<Slot>(rest)->next) {
        if (!slot_exists(rest) || !is_leased(at<Slot>(rest))) return false;
        if (n >= suspects) continue;
        // If this process dies between this point and the commit, the death is counted twice. The only effect
        // is that `deaths` is one too high.
        at<Slot>(rest)->state += Slot::DEATH;
        fault_point();
    }
    return true;
}

// Reserve leased items of a dead reader for its replacement. These items may have killed the reader;
// reserving them spares the other readers that risk (R10). If `all` is set, reserve all its items, because no
// other reader may take them. Otherwise the remaining items go back to all readers. Reserved items stay
// leased. If `blame` is not set, flowchan ended the reader, so no item is suspected.
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

// Reserve the leased items of this reader for itself. It takes them again before any others.
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

// Return the number of the first unfinished item. Items are taken in the order of their numbers. Therefore it
// is the oldest item that is leased, reserved or given back. If no such item exists, it is the next item to
// be taken.
uint64_t Ring::first_unfinished() const {
    uint64_t first = h_->numbered;
    const auto check = [&](uint64_t slot) {
        if (slot && slot_exists(slot) && at<Slot>(slot)->numbered())
            first = std::min(first, at<Slot>(slot)->number);
    };
    check(h_->head);
    for (const Session& s : h_->sessions()) {
        if (s.role != Session::READER) continue;
        check(s.lease_head);
        check(s.reserved_head);
    }
    return first;
}

void Ring::order(uint32_t index, Orders what, Wakes& wakes) {
    session(index).orders |= what;
    wakes.readers += h_->reader_queue.call_all();
}

// Give the reserved items of a session back to all readers, because it ends before it tried them again.
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
