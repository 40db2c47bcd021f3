// The order of outputs in an ordered stage, and the writers that wait for their turns.
//
// Order (`ordered=True`). The workers of an ordered stage take items i = 0, 1, 2, … from one channel, each
// worker one item at a time. They put the outputs for i into another channel. Outputs for i = `turn` go
// directly into the FIFO, and outputs for a later i are parked in i's group. When the worker of item `turn`
// reports that all outputs for this item have been put, `turn` advances. The parked outputs of the new turn
// then enter the FIFO. When the channel is closed, all parked outputs enter the FIFO.
//
// Invariants. No outputs are parked for i = turn, or in a closed channel. Every parked i satisfies i - turn <
// groups. Parked outputs always leave one of the `capacity` places to the worker of `turn`, so this worker
// waits only for readers. Parked outputs therefore cannot deadlock the stage.
#include <algorithm>

#include "ring.hpp"

namespace flowchan {

// --- the order of outputs ---

void Ring::begin_item(WriterState& writer, uint64_t number) {
    writer.number = number;
    writer.count = writer.skip = 0;
    Session& s = session(writer.session);
    // A worker that processes the item again skips the outputs that it has already put.
    if (s.committed_item == number + 1) writer.skip = s.committed_count;
    if (!h_->resumes) return;
    for (Session& old : h_->sessions()) {
        if (old.role != Session::RESUME || old.committed_item != number + 1) continue;
        writer.skip = old.committed_count;
        Change change(record(Side::Writer), windows_);
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
    Change change(record(Side::Writer), windows_);
    change.set(group(writer.number).complete, 1);
    change.commit();
    if (writer.number == h_->turn) advance(wakes);
    return Step::Done;
}

void Ring::advance(Wakes& wakes) {
    Change change(record(Side::Writer), windows_);
    uint64_t before = h_->turn, linked = 0;
    // A closed channel gets no more outputs, so parked outputs need not wait for earlier outputs.
    const auto waits = [&](const Group& g) { return !g.complete && (h_->state != CLOSED || !h_->parked); };
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
        if (waits(g)) break;
        if (h_->turn - before > groups_) {
            found_damage();
            break;
        }
        change.set(g.complete, 0);
        change.set(h_->turn, h_->turn + 1);
        change.commit();
    }
    if (linked) wake_readers(linked, wakes);
    if (h_->turn != before) {
        wake_turns(wakes);
        wake_at_end(wakes);
    }
}

// Continue with the next turn after `link` has ended a turn.
void Ring::turn_moved(Wakes& wakes) {
    const Group& g = group(h_->turn);
    if (g.count || g.complete) advance(wakes);
    wake_turns(wakes);
    wake_at_end(wakes);
}

// Begin to keep turns at item `number`. A stage with a single worker keeps no turns. When it gets more
// workers, its port gets the order KEEP_TURNS. The first turn goes to the first unfinished item, because the
// outputs for all earlier items are already in the FIFO. If other workers have already started, their outputs
// for earlier items are parked and complete.
void Ring::start_turns_at(uint64_t number, Wakes& wakes) {
    if (h_->state != OPEN || number <= h_->turn) return;
    const uint64_t parked_to = std::min(number, h_->turn + groups_);
    for (uint64_t i = h_->turn; i < parked_to; ++i) {
        Change change(record(Side::Writer), windows_);
        change.set(group(i).complete, 1);
        change.commit();
    }
    advance(wakes);
    if (h_->turn >= number || h_->damaged) return;
    Change change(record(Side::Writer), windows_);
    change.set(h_->turn, number);
    change.commit();
    wake_turns(wakes);
    wake_at_end(wakes);
}

// --- waiting for a turn ---
//
// A writer that waits for its turn sleeps on a word in its session. Therefore, only writers that can continue
// are woken, in the order of their numbers. No redo record covers these waits. If such a writer dies while it
// sleeps or right after it was woken, drop_copies removes it and counts the waiting writers again.

uint32_t Ring::await_turn(Session& s, uint64_t number, bool again) {
    h_->writer_queue.begin_wait(again);
    s.called = 0;
    s.awaits = number + 1;
    h_->writer_queue.ordered += 1;
    const bool for_turn = number > h_->turn && inside() == 0;
    s.clock.begin(for_turn);
    h_->writer_queue.turns.set(h_->writer_queue.turns.waiting + for_turn, now_ns());
    return s.word.load(std::memory_order_relaxed);
}

void Ring::end_turn_wait(Session& s) {
    if (!s.awaits) return;  // the port was closed during the wait
    s.awaits = s.called = 0;
    h_->writer_queue.ordered -= std::min(h_->writer_queue.ordered, 1u);
    const int64_t now = now_ns();
    h_->writer_queue.waited_ns += now;
    const uint32_t in_turn = h_->writer_queue.turns.waiting;
    h_->writer_queue.turns.set(in_turn - std::min(in_turn, s.clock.turn.waiting), now);
    s.clock.end(true);
}

// Return whether an output for item `number` would still have room after `more` other outputs.
bool Ring::has_turn(uint64_t number, uint64_t more) const {
    const uint64_t inside = h_->puts - h_->takes + h_->claimed;
    if (number <= h_->turn) return inside < capacity_;
    return number - h_->turn < groups_ && inside + h_->parked + 1 + more < capacity_;
}

void Ring::wake_turns(Wakes& wakes) {
    for (;;) {
        Session* next = nullptr;
        uint64_t more = 0;
        uint32_t seen = 0;
        for (uint32_t i = 1; i < h_->sessions().size() && seen < h_->writer_queue.ordered; ++i) {
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

void Ring::wake_all_writers(Wakes& wakes) {
    wakes.writers += h_->writer_queue.call_all();
    if (!h_->writer_queue.ordered) return;
    for (Session& s : h_->sessions()) {
        if (!s.awaits) continue;
        s.called = 1;
        s.word.store(s.word.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        wakes.add(s.word, true);
    }
}

}  // namespace flowchan
