// Puts items into a ring and takes them out.
//
// The states of an item:
//   claim -> FILLING -> publish        (large item: copied without holding the lock)
//   put -> INSIDE, or PARKED until its turn -> INSIDE
//   take -> LEASED -> acknowledged, or given back (ring_leases.cpp)
//   take -> copied and freed; large item: HELD until it is copied or its last view is gone
//   take -> put back, if it cannot be received now
//   loan -> HELD until it is put
#include <algorithm>
#include <utility>

#include "ring.hpp"

namespace flowchan {

// --- put ---

Step Ring::room(const Frame& frame, const WriterState* writer) {
    if (h_->state == BROKEN) return Step::Broken;
    if (h_->state > BROKEN || (h_->head && !slot_exists(h_->tail))) return found_damage();
    if (h_->state == CLOSED) return broken() ? Step::Broken : Step::Closed;
    if (frame.size > max_bytes_) return Step::TooLarge;
    if (map_incomplete_) return Step::NoMemory;
    const uint64_t inside = h_->puts - h_->takes, all = inside + h_->parked + h_->claimed;
    const bool parks = is_parked(writer);
    // An item that exceeds the remaining bytes must wait, unless the channel contains no other item. For the
    // worker whose turn it is, parked items do not count here, because they stay until this worker ends its
    // turn.
    const bool alone = parks ? all == 0 : inside + h_->claimed == 0;
    if (h_->bytes_in - h_->bytes_out + frame.size > most_inside() && !alone) {
        h_->short_of_memory = 1;
        return Step::Wait;
    }
    if (parks && (writer->number - h_->turn >= groups_ || all + 1 >= capacity_)) return Step::Wait;
    if (parks && group(writer->number).head && !slot_exists(group(writer->number).tail))
        return found_damage();
    if (is_withheld()) return Step::Wait;
    return all < capacity_ ? Step::Done : Step::Wait;
}

void Ring::allow(uint64_t puts, Wakes& wakes) {
    const bool raised = puts + 1 > put_limit_.exchange(puts + 1, std::memory_order_relaxed);
    if (raised) wake_all_writers(wakes);
}

void Ring::link(Slot* slot, WriterState* writer, Change& change) {
    uint64_t own_offset = offset(slot);
    const bool ends_turn = writer && writer->keyed && writer->single && writer->ordered;
    slot->number = writer && writer->keyed ? writer->number : Slot::KEYLESS;
    change.set(slot->next, 0);
    if (is_parked(writer)) {
        Group& g = group(writer->number);
        if (ends_turn) change.set(g.complete, 1);
        change.set(g.head ? at<Slot>(g.tail)->next : g.head, own_offset);
        change.set(g.tail, own_offset);
        change.set(g.count, g.count + 1);
        change.set(h_->parked, h_->parked + 1);
    } else {
        change.set(h_->head ? at<Slot>(h_->tail)->next : h_->head, own_offset);
        change.set(h_->tail, own_offset);
        change.set(h_->puts, h_->puts + 1);
        if (ends_turn && writer->number == h_->turn) change.set(h_->turn, h_->turn + 1);
    }
    if (writer && writer->keyed) {
        Session& s = session(writer->session);
        change.set(s.committed_item, writer->number + 1);
        change.set(s.committed_count, writer->count + 1);
    }
}

// Wake readers for new items.
void Ring::wake_readers(uint64_t items, Wakes& wakes) {
    h_->reader_queue.wake_by_rank(uint32_t(std::min<uint64_t>(items, UINT32_MAX - 1)), wakes);
    if (h_->puts - h_->takes >= capacity_ / 2) end_nap(wakes);
}

bool Ring::begin_nap() {
    const bool awake = h_->state != OPEN || h_->writer_queue.all_waiting() || inside() >= capacity_ / 2;
    if (!awake) h_->nap.store(1, std::memory_order_relaxed);
    return !awake;
}

void Ring::finish_put(WriterState* writer, Wakes& wakes, bool parked) {
    if (!parked) wake_readers(1, wakes);
    if (!writer || !writer->keyed) return;
    writer->count += 1;
    if (!writer->single || !writer->ordered) return;
    writer->keyed = false;
    if (!parked) turn_moved(wakes);
}

Step Ring::try_put(const Frame& frame, WriterState* writer, Wakes& wakes) {
    Step step = room(frame, writer);
    if (step != Step::Done) return step;
    Change change(record(Side::Writer), windows_);
    Slot* slot = take_slot(frame.size, change);
    if (!slot) return no_slot();
    frame.write(payload(slot));
    slot->size = frame.size;
    slot->kind = frame.kind;
    if (slot->block) memcpy(slot->data, &frame.route, sizeof frame.route);
    bool parked = is_parked(writer);
    change.set(slot->state,
               uint64_t(parked ? SlotState::Parked : SlotState::Inside) | frame.deaths * Slot::DEATH);
    change.set(h_->bytes_in, h_->bytes_in + frame.size);
    link(slot, writer, change);
    if (frame.bundle && !send_bundle(frame)) return Step::Refused;
    change.commit();
    finish_put(writer, wakes, parked);
    return Step::Done;
}

Step Ring::claim(const Frame& frame, WriterState* writer, uint32_t session, Slot*& slot) {
    Step step = room(frame, writer);
    if (step != Step::Done) return step;
    Change change(record(Side::Writer), windows_);
    slot = take_slot(frame.size, change);
    if (!slot) return no_slot();
    slot->size = frame.size;
    slot->kind = frame.kind;
    if (slot->block) memcpy(slot->data, &frame.route, sizeof frame.route);
    change.set(slot->state, Slot::placed(0, SlotState::Filling, session));
    change.set(h_->bytes_in, h_->bytes_in + frame.size);
    change.set(h_->claimed, h_->claimed + 1);
    change.commit();
    return Step::Done;
}

Step Ring::publish(const Frame& frame, Slot* slot, WriterState* writer, Wakes& wakes) {
    if (h_->state != OPEN) {
        unclaim(slot, wakes);
        return h_->state == BROKEN ? Step::Broken : Step::Closed;
    }
    if (frame.bundle && !send_bundle(frame)) {
        unclaim(slot, wakes);
        return Step::Refused;
    }
    bool parked = is_parked(writer);
    const bool behind_others = parked ? group(writer->number).head != 0 : h_->head != 0;
    if (behind_others && !slot_exists(parked ? group(writer->number).tail : h_->tail)) return found_damage();
    Change change(record(Side::Writer), windows_);
    change.set(slot->state,
               uint64_t(parked ? SlotState::Parked : SlotState::Inside) | frame.deaths * Slot::DEATH);
    change.set(h_->claimed, h_->claimed - 1);
    link(slot, writer, change);
    change.commit();
    finish_put(writer, wakes, parked);
    return Step::Done;
}

void Ring::unclaim(Slot* slot, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Writer), windows_);
    change.set(h_->claimed, h_->claimed - 1);
    change.set(h_->bytes_in, h_->bytes_in - slot->size);
    free_slot(slot, change);
    change.commit();
    memory_freed(wakes);
    wake_writers(wakes);
    wake_at_end(wakes);
}

// --- take ---

// Return whether the slot at the head and the session's newest leased slot are valid.
[[gnu::always_inline]] inline bool Ring::head_is_valid(const Session* session) const {
    const Slot* slot = at<Slot>(h_->head);
    if (!slot_exists(h_->head) || !payload_exists(slot)) return false;
    if (slot->place() != SlotState::Inside && slot->place() != SlotState::Parked) return false;
    return !session || !session->lease_head || slot_exists(session->lease_tail);
}

// Fill `taken` with a description of the slot at the head, without the address of the payload.
[[gnu::always_inline]] inline void Ring::describe(Taken& taken, Slot* slot) const {
    taken.kind = slot->kind;
    taken.size = slot->size;
    taken.deaths = slot->deaths();
    taken.is_replay = slot->is_replay();
    const bool keeps = slot->numbered() || (h_->keeps_numbers && slot->number != Slot::KEYLESS);
    taken.number = keeps ? slot->number : h_->numbered;
    taken.made_for = slot->numbered() ? Slot::KEYLESS : slot->number;
    taken.slot = slot;
    taken.viewed = may_view(slot);
}

// Lease the slot that was the head.
[[gnu::always_inline]] inline void Ring::lease(Slot* slot, uint64_t number, uint64_t state, Session& session,
                                               Change& change) {
    change.set(slot->next, 0);
    change.set(slot->number, number);
    change.set(slot->state, Slot::placed(state, SlotState::Leased));
    change.set(session.lease_head ? at<Slot>(session.lease_tail)->next : session.lease_head, offset(slot));
    change.set(session.lease_tail, offset(slot));
    change.set(session.leased, session.leased + 1);
    change.set(h_->leased, h_->leased + 1);
}

// Take the slot at the head, which the caller has checked. `leases`: the session that gets the lease, or
// null.
[[gnu::always_inline]] inline void Ring::take_head(Taken& taken, ReaderState* reader, Session* leases,
                                                   uint32_t session, Wakes& wakes) {
    Slot* slot = at<Slot>(h_->head);
    describe(taken, slot);
    Change change(record(Side::Reader), windows_);
    if (slot->next != h_->tail) prefetch(at<Slot>(slot->next));  // for the next get
    change.set(h_->head, slot->next);
    change.set(h_->takes, h_->takes + 1);
    change.set(h_->bytes_out, h_->bytes_out + slot->size);
    uint64_t state = slot->state;
    if (!slot->numbered()) {
        change.set(h_->numbered, taken.number + 1);
        state |= Slot::NUMBERED;
    }
    if (taken.viewed) state = view(state, slot, session, change);
    if (leases) {
        lease(slot, taken.number, state, *leases, change);
        change.commit();
        if (reader->leases++ == 0) reader->number = taken.number;
        taken.at = payload(slot);
    } else if (slot->size <= Taken::LOCAL && !taken.viewed && !needs_its_slot(slot->kind)) {
        memcpy(taken.local, payload(slot), slot->size);
        taken.at = taken.local;
        free_slot(slot, change);
        change.commit();
    } else {
        change.set(slot->number, taken.number);
        change.set(slot->state, Slot::placed(state, SlotState::Held, session));
        change.commit();
        taken.at = payload(slot);
        taken.held = taken.viewed ? nullptr : slot;
    }
    memory_freed(wakes);
    if (h_->head) h_->reader_queue.wake_by_rank(1, wakes);
    wake_writers(wakes, reader);
    wake_at_end(wakes);
}

Step Ring::try_take(Taken& taken, ReaderState* reader, uint32_t session, Wakes& wakes, bool recalls) {
    if (h_->state >= BROKEN) return h_->state == BROKEN ? Step::Broken : found_damage();
    Session* const leases = reader ? &this->session(reader->session) : nullptr;
    const uint64_t orders = reader && !reader->leases ? leases->orders : 0;
    if (orders & KEEP_TURNS && !reader->keeps_turns) return Step::KeepTurns;
    if (leases && leases->reserved_head) return take_reserved(taken, *reader);
    // A retired reader still takes items that were given back, because all other workers may wait for the
    // turns of these items.
    if (orders & RETIRE && !is_next_before(UINT64_MAX)) {
        // This reader may have been woken for an item that it does not take, so wake another reader.
        if (h_->head) h_->reader_queue.wake_by_rank(1, wakes);
        return Step::Drained;
    }
    if (!has_items_for(reader, session, recalls, wakes)) return at_end_for(reader) ? end() : Step::Wait;
    if (map_incomplete_) return Step::NoMemory;
    if (!head_is_valid(leases)) return found_damage();
    take_head(taken, reader, leases, session, wakes);
    return Step::Done;
}

// Return an item to the FIFO, with its old number and deaths. Do nothing if another session has the item now.
// Also do nothing if the channel is broken, because its items are lost anyway. (A small item of a plain
// reader gets a new slot, because the get freed its old slot.)
void Ring::put_back(Taken& taken, ReaderState* reader, Wakes& wakes) {
    if (h_->damaged || h_->state == BROKEN) {
        if (taken.held) release(taken.held, wakes);
        taken.held = nullptr;
        return;
    }
    uint64_t before = 0, after = h_->head;
    if (!find_place(taken.number, before, after)) return void(found_damage());
    Change change(record(Side::Writer), windows_);
    Slot* slot = taken.slot;
    if (reader) {
        Session& s = session(reader->session);
        if (slot->place() != SlotState::Leased || slot->number != taken.number ||
            s.lease_tail != offset(slot))
            return;
        Slot* kept = nullptr;
        for (uint64_t p = s.lease_head, left = s.leased; p != offset(slot); p = kept->next, left -= 1) {
            kept = at<Slot>(p);
            if (!slot_exists(p) || left <= 1) return void(found_damage());
        }
        change.set(kept ? kept->next : s.lease_head, 0);
        if (kept) change.set(s.lease_tail, offset(kept));
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        change.set(slot->state, slot->with_place(SlotState::Inside));
        reader->leases -= 1;
    } else if (taken.held || taken.viewed) {
        change.set(slot->state, slot->with_place(SlotState::Inside));
    } else {
        slot = take_slot(taken.size, change);
        if (!slot) return;
        memcpy(payload(slot), taken.at, taken.size);
        slot->size = taken.size;
        slot->kind = taken.kind;
        slot->number = taken.number;
        change.set(slot->state, uint64_t(SlotState::Inside) | Slot::NUMBERED | taken.deaths * Slot::DEATH);
    }
    link_between(slot, before, after, change);
    change.commit();
    taken.held = nullptr;
    wakes.readers += h_->reader_queue.call(1);
}

uint64_t Ring::reference_next() const {
    const Slot* slot = h_->head && slot_exists(h_->head) ? at<Slot>(h_->head) : nullptr;
    if (!slot || slot->kind != REFERENCE || slot->numbered() || !payload_exists(slot)) return 0;
    uint64_t id;
    memcpy(&id, payload(const_cast<Slot*>(slot)), sizeof id);
    return id;
}

void Ring::end_decoding(uint64_t number, Wakes& wakes) {
    if (!std::erase(decoding_, number) || !std::exchange(decoding_seen_, false)) return;
    // The link checked first_undecoded() too early and must check again.
    wakes.writers += h_->writer_queue.call(1);
}

uint64_t Ring::first_undecoded() {
    decoding_seen_ = !decoding_.empty();
    uint64_t first = UINT64_MAX;
    for (uint64_t number : decoding_) first = std::min(first, number);
    const Slot* front = h_->head && slot_exists(h_->head) ? at<Slot>(h_->head) : nullptr;
    return front && front->numbered() ? std::min(first, front->number) : first;
}

void Ring::release(Slot* slot, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Reader), windows_);
    free_slot(slot, change);
    change.commit();
    memory_freed(wakes);
}

// --- the end ---

// Return whether this reader can get no more items. Other readers may still give back leased items. A reader
// without leases waits for these items, unless the items could never go to this reader (`alone`). A reader
// with leases does not wait, because two readers that gather items (get_more) would wait for each other.
bool Ring::at_end_for(const ReaderState* reader) const {
    const bool goes = reader && (reader->alone || session(reader->session).leased > 0);
    return h_->state == CLOSED && is_exhausted() && (goes || h_->leased == 0);
}

// After the last item, wake all readers, because they may now see the end.
void Ring::wake_at_end(Wakes& wakes) {
    if (h_->state == CLOSED && is_exhausted()) wakes.readers += h_->reader_queue.call_all();
}

}  // namespace flowchan
