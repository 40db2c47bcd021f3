// What happens to the items of a ring: put, take, lease, acknowledge, and the order of an ordered stage's
// outputs.
//
// The life of an item:   claim -> FILLING -> publish        (large: the copy is made outside the lock)
//                        put -> INSIDE, or PARKED until its turn -> INSIDE
//                        take -> LEASED -> acknowledged, or given back to the front
//                        take -> copied and freed; large: HELD until the copy is made, or the last view is
//                        gone take -> put back to the front, when it can't be received now
//                        loan -> HELD until it is put
//
// Order (`ordered=True`). The workers of an ordered stage take items i = 0, 1, 2, … from one channel,
// one each, and put the outputs for i into another. `turn` is the i whose outputs go straight into the FIFO.
// Outputs for a later i are parked in its group. When the worker of `turn` says that i has no more outputs,
// turn moves on, and what is parked for the new turn enters the FIFO. Invariants: nothing is parked for i =
// turn; i - turn < groups for every parked i; the worker of `turn` never waits for anything but readers, so
// parked outputs cannot deadlock the stage: parked items leave one place of `capacity` free for it.
#include <algorithm>

#include "ring.hpp"

namespace flowchan {

// --- put ---

Step Ring::room(const Frame& frame, const WriterState* writer) {
    if (h_->state == BROKEN) return Step::Broken;
    if (h_->state > BROKEN || (h_->head && !slot_exists(h_->tail))) return found_damage();
    if (h_->state == CLOSED) return broken() ? Step::Broken : Step::Closed;
    if (frame.size > max_bytes_) return Step::TooLarge;
    if (blind_) return Step::NoMemory;
    const uint64_t inside = h_->puts - h_->takes, all = inside + h_->parked + h_->claimed;
    const bool parks = is_parked(writer);
    // An item larger than what is left waits, but the worker of `turn` never waits for parked bytes: only it
    // can free them.
    const bool alone = parks ? all == 0 : inside + h_->claimed == 0;
    if (h_->bytes_in - h_->bytes_out + frame.size > most_inside() && !alone) {
        h_->short_of_memory = 1;
        return Step::Wait;
    }
    if (parks && (writer->number - h_->turn >= groups_ || all + 1 >= capacity_)) return Step::Wait;
    if (parks && group(writer->number).head && !slot_exists(group(writer->number).tail))
        return found_damage();
    return all < capacity_ ? Step::Done : Step::Wait;
}

void Ring::link(Slot* slot, WriterState* writer, Change& change) {
    uint64_t here = offset(slot);
    change.set(slot->next, 0);
    if (is_parked(writer)) {
        Group& g = group(writer->number);
        change.set(g.head ? at<Slot>(g.tail)->next : g.head, here);
        change.set(g.tail, here);
        change.set(g.count, g.count + 1);
        change.set(h_->parked, h_->parked + 1);
    } else {
        change.set(h_->head ? at<Slot>(h_->tail)->next : h_->head, here);
        change.set(h_->tail, here);
        change.set(h_->puts, h_->puts + 1);
    }
    if (writer && writer->keyed) {
        Session& s = session(writer->session);
        change.set(s.committed_item, writer->number + 1);
        change.set(s.committed_count, writer->count + 1);
    }
}

void Ring::finish_put(WriterState* writer, Wakes& wakes, bool parked) {
    if (!parked) wakes.readers += h_->reader_gate.call(1);
    if (!writer || !writer->keyed) return;
    writer->count += 1;
    if (writer->single && writer->ordered) item_done(*writer, wakes);
}

Step Ring::try_put(const Frame& frame, WriterState* writer, Wakes& wakes) {
    Step step = room(frame, writer);
    if (step != Step::Done) return step;
    Change change(record(Side::Writer), base_);
    Slot* slot = take_slot(frame.size, change);
    if (!slot) return no_slot();
    frame.write(payload(slot));
    slot->size = frame.size;
    slot->kind = frame.kind;
    bool parked = is_parked(writer);
    change.set(slot->state, uint64_t(parked ? SlotState::Parked : SlotState::Inside));
    change.set(h_->bytes_in, h_->bytes_in + frame.size);
    link(slot, writer, change);
    if (frame.parcel && !send_parcel(frame)) return Step::Refused;
    change.commit();
    finish_put(writer, wakes, parked);
    return Step::Done;
}

Step Ring::claim(const Frame& frame, WriterState* writer, uint32_t session, Slot*& slot) {
    Step step = room(frame, writer);
    if (step != Step::Done) return step;
    Change change(record(Side::Writer), base_);
    slot = take_slot(frame.size, change);
    if (!slot) return no_slot();
    slot->size = frame.size;
    slot->kind = frame.kind;
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
    if (frame.parcel && !send_parcel(frame)) {
        unclaim(slot, wakes);
        return Step::Refused;
    }
    bool parked = is_parked(writer);
    const bool behind_others = parked ? group(writer->number).head != 0 : h_->head != 0;
    if (behind_others && !slot_exists(parked ? group(writer->number).tail : h_->tail)) return found_damage();
    Change change(record(Side::Writer), base_);
    change.set(slot->state, uint64_t(parked ? SlotState::Parked : SlotState::Inside));
    change.set(h_->claimed, h_->claimed - 1);
    link(slot, writer, change);
    change.commit();
    finish_put(writer, wakes, parked);
    return Step::Done;
}

void Ring::unclaim(Slot* slot, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Writer), base_);
    change.set(h_->claimed, h_->claimed - 1);
    change.set(h_->bytes_in, h_->bytes_in - slot->size);
    free_slot(slot, change);
    change.commit();
    memory_freed(wakes);
    call_writers(wakes);
    tell_end(wakes);
}

// --- take ---

Step Ring::try_take(Taken& taken, ReaderState* reader, uint32_t session, Wakes& wakes) {
    if (h_->state >= BROKEN) return h_->state == BROKEN ? Step::Broken : found_damage();
    if (reader && this->session(reader->session).again_head) return take_again(taken, *reader);
    if (h_->head == 0) return at_end_for(reader) ? end() : Step::Wait;
    if (blind_) return Step::NoMemory;
    Slot* slot = at<Slot>(h_->head);
    if (!slot_exists(h_->head) || !payload_exists(slot)) return found_damage();
    if (slot->place() != SlotState::Inside && slot->place() != SlotState::Parked) return found_damage();
    if (reader && this->session(reader->session).lease_head &&
        !slot_exists(this->session(reader->session).lease_tail))
        return found_damage();
    taken.kind = slot->kind;
    taken.size = slot->size;
    taken.deaths = slot->deaths();
    taken.number = slot->numbered() ? slot->number : h_->numbered;
    taken.slot = slot;
    taken.viewed = may_view(slot);
    Change change(record(Side::Reader), base_);
    if (slot->next != h_->tail) prefetch(at<Slot>(slot->next));  // for the next get
    change.set(h_->head, slot->next);
    change.set(h_->takes, h_->takes + 1);
    change.set(h_->bytes_out, h_->bytes_out + slot->size);
    uint64_t state = slot->state;
    if (!slot->numbered()) {
        change.set(h_->numbered, h_->numbered + 1);
        state |= Slot::NUMBERED;
    }
    if (taken.viewed) state = view(state, slot, session, change);
    if (reader) {
        Session& s = this->session(reader->session);
        change.set(slot->next, 0);
        change.set(slot->number, taken.number);
        change.set(slot->state, Slot::placed(state, SlotState::Leased));
        change.set(s.lease_head ? at<Slot>(s.lease_tail)->next : s.lease_head, offset(slot));
        change.set(s.lease_tail, offset(slot));
        change.set(s.leased, s.leased + 1);
        change.set(h_->leased, h_->leased + 1);
        change.commit();
        if (reader->in_hand++ == 0) reader->number = taken.number;
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
    call_writers(wakes, reader);
    tell_end(wakes);
    return Step::Done;
}

void Ring::link_front(Slot* slot, Change& change) {
    change.set(slot->next, h_->head);
    if (!h_->head) change.set(h_->tail, offset(slot));
    change.set(h_->head, offset(slot));
    change.set(h_->takes, h_->takes - 1);
    change.set(h_->bytes_out, h_->bytes_out - slot->size);
}

// To the front, with its old number and its old deaths, over the capacity if need be. Nothing, if it is not
// ours any more, or is lost anyway because the channel is broken. (A small one that a plain reader took was
// freed, and gets a new slot.)
void Ring::put_back(Taken& taken, ReaderState* reader, Wakes& wakes) {
    if (h_->damaged || h_->state == BROKEN) {
        if (taken.held) release(taken.held, wakes);
        taken.held = nullptr;
        return;
    }
    Change change(record(Side::Writer), base_);
    Slot* slot = taken.slot;
    if (reader) {
        Session& s = session(reader->session);
        if (slot->place() != SlotState::Leased || slot->number != taken.number ||
            s.lease_tail != offset(slot))
            return;
        Slot* before = nullptr;
        for (uint64_t p = s.lease_head, left = s.leased; p != offset(slot); p = before->next, left -= 1) {
            before = at<Slot>(p);
            if (!slot_exists(p) || left <= 1) return void(found_damage());
        }
        change.set(before ? before->next : s.lease_head, 0);
        if (before) change.set(s.lease_tail, offset(before));
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        change.set(slot->state, slot->with_place(SlotState::Inside));
        reader->in_hand -= 1;
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
    link_front(slot, change);
    change.commit();
    taken.held = nullptr;
    wakes.readers += h_->reader_gate.call(1);
}

void Ring::release(Slot* slot, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Reader), base_);
    free_slot(slot, change);
    change.commit();
    memory_freed(wakes);
}

// --- the end ---

// Whether nothing more can come for this reader now. Others may still give back what they have in hand, so
// who has nothing in hand waits for that. Who has something does not: two who gather (get_more) would wait
// for each other.
bool Ring::at_end_for(const ReaderState* reader) const {
    const bool gathers = reader && session(reader->session).leased > 0;
    return h_->state == CLOSED && nothing_coming() && (gathers || h_->leased == 0);
}

// When the last item may have gone, all who wait must look: for some the end has come.
void Ring::tell_end(Wakes& wakes) {
    if (h_->state == CLOSED && nothing_coming()) wakes.readers += h_->reader_gate.call_all();
}

// --- leases ---

// Inside: whoever was giving it back died before it was done.
static bool is_leased(const Slot* slot) {
    return slot->place() == SlotState::Leased || slot->place() == SlotState::Inside;
}

void Ring::free_leased(Session& s, Wakes& wakes) {
    while (s.lease_head && !h_->damaged) {
        Slot* slot = at<Slot>(s.lease_head);
        if (!slot_exists(s.lease_head) || s.leased == 0 || !is_leased(slot)) return void(found_damage());
        Change change(record(Side::Reader), base_);
        change.set(s.lease_head, slot->next);
        change.set(s.leased, s.leased - 1);
        change.set(h_->leased, h_->leased - 1);
        free_slot(slot, change);
        change.commit();
    }
    memory_freed(wakes);
    tell_end(wakes);
}

void Ring::acknowledge(ReaderState& reader, Wakes& wakes) {
    if (!reader.in_hand) return;
    free_leased(session(reader.session), wakes);
    reader.in_hand = 0;
}

// To the front, in their old order, with their old numbers.
void Ring::give_back(Session& s, Wakes& wakes) {
    if (h_->damaged || !slot_exists(s.lease_tail)) return void(found_damage());
    uint64_t bytes = 0, last = 0, left = s.leased;
    for (uint64_t p = s.lease_head; p; last = p, p = at<Slot>(p)->next, left -= 1) {
        Slot* slot = at<Slot>(p);
        if (!slot_exists(p) || left == 0 || !is_leased(slot)) return void(found_damage());
        bytes += slot->size;
        slot->state = slot->with_place(SlotState::Inside);
        fault_point();
    }
    if (left || last != s.lease_tail) return void(found_damage());
    uint32_t n = uint32_t(s.leased);
    Change change(record(Side::Writer), base_);
    change.set(at<Slot>(s.lease_tail)->next, h_->head);
    if (!h_->head) change.set(h_->tail, s.lease_tail);
    change.set(h_->head, s.lease_head);
    change.set(h_->takes, h_->takes - n);
    change.set(h_->bytes_out, h_->bytes_out - bytes);
    change.set(h_->leased, h_->leased - n);
    change.set(s.lease_head, 0);
    change.set(s.leased, 0);
    change.commit();
    wakes.readers += h_->reader_gate.call(n);
}

// What a dead reader had in hand, and has not been worked on since: to its successor alone where it may have
// killed it, so that the others go on meanwhile (R10); else nothing, and it goes back to all. All of it stays
// on lease.
void Ring::hand_on(uint32_t from, uint32_t to) {
    Session &s = session(from), &next = session(to);
    const bool suspect = s.lease_head && s.at != Session::OURS;
    if (h_->damaged || (!suspect && !s.again_head) || next.again_head) return;
    if ((s.lease_head && !slot_exists(s.lease_tail)) || (s.again_head && !slot_exists(s.again_tail)))
        return void(found_damage());
    uint64_t left = suspect ? s.leased : 0;
    for (uint64_t p = s.lease_head; left; p = at<Slot>(p)->next, left -= 1) {
        if (!slot_exists(p) || !is_leased(at<Slot>(p))) return void(found_damage());
        // A death between here and the commit counts twice: `deaths` may then be one too high, nothing else.
        at<Slot>(p)->state += Slot::DEATH;
        fault_point();
    }
    Change change(record(Side::Writer), base_);
    if (suspect && s.again_head) change.set(at<Slot>(s.lease_tail)->next, s.again_head);
    change.set(next.again_head, suspect ? s.lease_head : s.again_head);
    change.set(next.again_tail, s.again_head ? s.again_tail : s.lease_tail);
    change.set(next.again, s.again + (suspect ? s.leased : 0));
    change.set(next.again_at, suspect ? s.at : s.again_at);
    if (suspect) {
        change.set(s.lease_head, 0);
        change.set(s.leased, 0);
    }
    change.set(s.again_head, 0);
    change.set(s.again, 0);
    change.commit();
}

// Takes the first of the items that are this session's own to try again.
Step Ring::take_again(Taken& taken, ReaderState& reader) {
    Session& s = session(reader.session);
    Slot* slot = at<Slot>(s.again_head);
    if (!slot_exists(s.again_head) || !payload_exists(slot) || !is_leased(slot)) return found_damage();
    if (s.lease_head && !slot_exists(s.lease_tail)) return found_damage();
    taken.kind = slot->kind;
    taken.size = slot->size;
    taken.deaths = slot->deaths();
    taken.kills_who_unpickles = s.again_at == Session::UNPICKLING;
    taken.slot = slot;
    taken.at = payload(slot);
    Change change(record(Side::Reader), base_);
    change.set(s.again_head, slot->next);
    change.set(s.again, s.again - 1);
    change.set(slot->next, 0);
    change.set(s.lease_head ? at<Slot>(s.lease_tail)->next : s.lease_head, offset(slot));
    change.set(s.lease_tail, offset(slot));
    change.set(s.leased, s.leased + 1);
    change.commit();
    if (reader.in_hand++ == 0) reader.number = slot->number;
    return Step::Done;
}

// A session that ends before it has tried them again: they are everybody's.
void Ring::give_back_again(Session& s, Wakes& wakes) {
    if (h_->damaged) return;
    Change change(record(Side::Writer), base_);
    change.set(s.lease_head, s.again_head);
    change.set(s.lease_tail, s.again_tail);
    change.set(s.leased, s.again);
    change.set(s.again_head, 0);
    change.set(s.again, 0);
    change.commit();
    give_back(s, wakes);
}

// --- the order of outputs ---

void Ring::begin_item(WriterState& writer, uint64_t number) {
    writer.number = number;
    writer.count = writer.skip = 0;
    if (!h_->resumes) return;
    for (Session& old : h_->sessions()) {
        if (old.role != Session::RESUME || old.committed_item != number + 1) continue;
        Session& s = session(writer.session);
        writer.skip = old.committed_count;
        Change change(record(Side::Writer), base_);
        change.set(s.committed_item, old.committed_item);
        change.set(s.committed_count, old.committed_count);
        change.set(old.role, Session::NONE);
        change.set(h_->resumes, h_->resumes - 1);
        change.commit();
        return;
    }
}

Step Ring::item_done(WriterState& writer, Wakes& wakes) {
    const bool behind = !writer.ordered || h_->state != OPEN || writer.number < h_->turn;
    if (!behind && writer.number - h_->turn >= groups_) return Step::Wait;
    writer.keyed = false;
    if (behind) return Step::Done;
    Change change(record(Side::Writer), base_);
    change.set(group(writer.number).complete, 1);
    change.commit();
    if (writer.number == h_->turn) advance(wakes);
    return Step::Done;
}

void Ring::advance(Wakes& wakes) {
    Change change(record(Side::Writer), base_);
    uint64_t before = h_->turn, linked = 0;
    while (!h_->damaged) {
        Group& g = group(h_->turn);
        if (g.count) {
            if (!slot_exists(g.head) || !slot_exists(g.tail) || (h_->head && !slot_exists(h_->tail))) {
                found_damage();
                break;
            }
            change.set(h_->head ? at<Slot>(h_->tail)->next : h_->head, g.head);
            change.set(h_->tail, g.tail);
            change.set(h_->puts, h_->puts + g.count);
            change.set(h_->parked, h_->parked - g.count);
            linked += g.count;
            change.set(g.head, 0);
            change.set(g.count, 0);
            change.commit();
        }
        if (!g.complete) break;
        change.set(g.complete, 0);
        change.set(h_->turn, h_->turn + 1);
        change.commit();
    }
    if (linked) wakes.readers += h_->reader_gate.call(uint32_t(std::min<uint64_t>(linked, UINT32_MAX)));
    if (h_->turn != before) {
        call_turns(wakes);
        tell_end(wakes);
    }
}

// --- waiting for a turn ---
//
// Each such writer sleeps on a word of its own session, so that those are woken who can go on and no others:
// of two that wait, the one with the lower number first. None of it is in the redo record: who dies while it
// waits, or called and on its way, is taken off by drop_copies, which counts anew.

uint32_t Ring::await_turn(Session& s, uint64_t number, bool again) {
    h_->writer_gate.begin_wait(again);
    s.called = 0;
    s.awaits = number + 1;
    h_->writer_gate.ordered += 1;
    return s.word.load(std::memory_order_relaxed);
}

void Ring::have_turn(Session& s) {
    if (!s.awaits) return;  // its port was closed meanwhile
    s.awaits = s.called = 0;
    h_->writer_gate.ordered -= std::min(h_->writer_gate.ordered, 1u);
    h_->writer_gate.waited_ns += now_ns();
}

// Whether the output of item `number` has a place when `more` others are still to take theirs.
bool Ring::has_turn(uint64_t number, uint64_t more) const {
    const uint64_t inside = h_->puts - h_->takes + h_->claimed;
    if (number <= h_->turn) return inside < capacity_;
    return number - h_->turn < groups_ && inside + h_->parked + 1 + more < capacity_;
}

void Ring::call_turns(Wakes& wakes) {
    for (;;) {
        Session* next = nullptr;
        uint64_t more = 0;
        uint32_t seen = 0;
        for (uint32_t i = 1; i < h_->sessions().size() && seen < h_->writer_gate.ordered; ++i) {
            Session& s = session(i);
            if (!s.awaits) continue;
            seen += 1;
            if (s.called)
                more += 1;
            else if (!next || s.awaits < next->awaits)
                next = &s;
        }
        if (!next || !has_turn(next->awaits - 1, more)) return;
        next->called = 1;
        next->word.store(next->word.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        wakes.add(next->word, true);
    }
}

void Ring::call_all_writers(Wakes& wakes) {
    wakes.writers += h_->writer_gate.call_all();
    if (!h_->writer_gate.ordered) return;
    for (Session& s : h_->sessions()) {
        if (!s.awaits) continue;
        s.called = 1;
        s.word.store(s.word.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        wakes.add(s.word, true);
    }
}

}  // namespace flowchan
