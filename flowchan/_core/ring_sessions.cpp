// The sessions of a ring: who uses it in which role, and what happens to a session's items when it ends or
// its process dies.
#include "process.hpp"
#include "ring.hpp"

#include <unistd.h>
#include <algorithm>
#include <stdexcept>

namespace flowchan {

// Record that this process uses the ring. If it is the second process, wake all waiters, because links sleep
// longer on the rings that only their own process uses.
void Ring::note_user() {
    const uint64_t user = own_start() << 22 | uint64_t(getpid());  // a pid has at most 22 bits
    if (!h_->first_user) h_->first_user = user;
    if (h_->first_user == user || h_->has_more_users) return;
    std::atomic_ref(h_->has_more_users).store(1, std::memory_order_relaxed);
    for (WaitQueue* queue : {&h_->reader_queue, &h_->writer_queue})
        futex_wake(queue->seq, queue->call_all(), true);
}

// Return an unused record, initialised for this process, or 0 if all are used.
uint32_t Ring::free_session(Wakes& wakes) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (uint32_t i = 1; i < SESSIONS; ++i) {  // 0 means "no session"
            Session& s = session(i);
            if (!reserve_sessions(i + 1)) break;
            if (s.role != Session::NONE) continue;
            note_user();
            s.pid = uint64_t(getpid());
            s.started = own_start();
            s.generation += 1;
            s.supervised = s.lease_head = s.lease_tail = s.leased = s.committed_item = s.committed_count =
                s.views = s.forked = 0;
            s.in_reader_queue = s.in_writer_queue = s.called = 0;
            s.clock = PortClock();
            s.awaits = s.at = s.begun = s.run_limit = s.run_seen = s.reserved_head = s.reserved_tail =
                s.reserved = s.reserved_at = s.orders = 0;
            fault_point();
            return i;
        }
        sweep_now(wakes);
    }
    return 0;
}

uint32_t Ring::open_session(Session::Role role, Wakes& wakes) {
    const uint32_t i = free_session(wakes);
    if (!i)
        throw std::length_error(
            h_->reserved_sessions < SESSIONS
                ? "no memory is left for another port; close some ports"
                : "all " + std::to_string(SESSIONS - 1) +
                      " slots of this channel for ports and processes are in use; close some ports");
    Change change(record(Side::Writer), windows_);
    change.set(session(i).role, role);
    if (role == Session::READER) change.set(h_->readers, h_->readers + 1);
    if (role == Session::WRITER) change.set(h_->writers, h_->writers + 1);
    change.commit();
    return i;
}

void Ring::adopt(uint32_t index) {
    if (index == 0 || index >= SESSIONS)
        throw std::length_error("unknown port number " + std::to_string(index));
    note_user();
    Session& s = session(index);
    if (s.views && s.pid != uint64_t(getpid())) move_views(index);
    s.pid = uint64_t(getpid());
    s.started = own_start();
}

// When a port moves to another process, move its views to a HOLDER. The former process may still use these
// views, which must not end with the new process. Each slot takes one Change, so the process may die between
// any two. (If no record is free, the views stay with the port.)
void Ring::move_views(uint32_t index) {
    Wakes wakes;
    if (!memory_is_valid()) return void(found_damage());
    const uint32_t to = free_session(wakes);
    Session &s = session(index), &holder = session(to);
    if (to) {
        holder.pid = s.pid;
        holder.started = s.started;
        holder.forked = s.forked;
    }
    for (uint64_t p = first_slot(); to && p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        if (slot->viewer() != index) continue;
        const uint64_t owner = slot->owner() == index ? to : slot->owner();
        Change change(record(Side::Writer), windows_);
        const uint64_t unseen = slot->state & ~Slot::viewed_by(0xffff);
        change.set(slot->state, Slot::placed(unseen | Slot::viewed_by(to), slot->place(), uint32_t(owner)));
        change.set(s.views, s.views - 1);
        change.set(holder.views, holder.views + 1);
        change.set(holder.role, Session::HOLDER);
        change.commit();
    }
    wake(wakes);
}

// End the copies and waits of a session that is ending, perhaps because its process was killed. `views`: no
// process uses its views any more, so end these as well.
void Ring::drop_copies(uint32_t index, bool views, Wakes& wakes) {
    Session& s = session(index);
    if (!memory_is_valid()) found_damage();
    for (uint64_t p = first_slot(); !h_->damaged && p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        if (slot->viewer() == index) {
            if (views) unview(slot, wakes);
            continue;
        }
        if (slot->owner() != index) continue;
        if (slot->place() == SlotState::Held) release(slot, wakes);
        if (slot->place() == SlotState::Filling) unclaim(slot, wakes);
    }
    int64_t now = now_ns();
    auto leave = [now](WaitQueue& queue, uint32_t& in_queue) {
        const uint32_t n = in_queue;
        // Clear `in_queue` first. If the process dies before the subtraction, `waiting` stays too high, which
        // costs one useless wake-up. `waiting` must never be too low.
        in_queue = 0;
        keep_order();
        fault_point();
        queue.waiting -= std::min(queue.waiting, n);
        queue.woken = std::min(queue.woken, queue.waiting);
        queue.selecting = std::min(queue.selecting, queue.waiting);
        queue.waited_ns += int64_t(n) * now;
        return n ? queue.call_all() : 0;  // threads may be waiting in this port
    };
    wakes.readers += leave(h_->reader_queue, s.in_reader_queue);
    wakes.writers += leave(h_->writer_queue, s.in_writer_queue);
    s.clock.all.set(s.awaits != 0, now);
    if (s.awaits) {
        s.word.store(s.word.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        wakes.add(s.word, true);  // a thread may be waiting in this port
        end_turn_wait(s);
        const auto waits = [](const Session& one) { return one.awaits != 0; };
        h_->writer_queue.ordered = uint32_t(std::ranges::count_if(h_->sessions(), waits));
        const auto for_turn = [](const Session& one) { return one.clock.turn.waiting != 0; };
        h_->writer_queue.turns.set(uint32_t(std::ranges::count_if(h_->sessions(), for_turn)), now);
        wake_turns(wakes);
    }
    if (s.pid == uint64_t(getpid())) return;
    // The dead process may have been woken without taking the lock, or may have been about to wake another
    // process. Make all sleepers check again.
    h_->reader_queue.woken = h_->writer_queue.woken = 0;
    wakes.readers += h_->reader_queue.call_all();
    wake_all_writers(wakes);
}

// Return whether the session's views may still be used after its end: its process, or a child of that
// process, may be alive.
bool Ring::may_still_view(uint32_t index) const {
    const Session& s = session(index);
    return s.views && (s.forked || s.pid == uint64_t(getpid()) || process_alive(s.pid, s.started));
}

// End a session. If `finished` is set, finish its leased items; otherwise give them back. `died`: the process
// ended without closing the session. If a writer died, the channel has no clean end (C5), unless it was
// already closed.
void Ring::end_session(uint32_t index, bool finished, Wakes& wakes, bool died) {
    Session& s = session(index);
    if (s.role == Session::NONE) return;
    if (s.lease_head) finished ? free_leased(s, UINT64_MAX, wakes) : give_back(s, s.leased, wakes);
    if (s.reserved_head) give_back_reserved(s, wakes);
    const bool looks = may_still_view(index);
    drop_copies(index, !looks, wakes);
    Change change(record(Side::Writer), windows_);
    if (s.role == Session::READER) {
        if (h_->readers == 1) close_with(change, wakes);
        change.set(h_->readers, h_->readers - 1);
        if (h_->notify_writer) wakes.writers += h_->writer_queue.call_all();
    } else if (s.role == Session::WRITER) {
        if (h_->writers == 1) close_with(change, wakes);
        if (died && h_->state == OPEN && !h_->cut_off) change.set(h_->cut_off, s.pid);
        change.set(h_->writers, h_->writers - 1);
    } else if (s.role == Session::RESUME) {
        change.set(h_->resumes, h_->resumes - 1);
    }
    // From now on, any process may end this session when it notices the death of the viewing process.
    if (looks) change.set(s.supervised, 0);
    change.set(s.role, looks ? Session::HOLDER : Session::NONE);
    change.commit();
    if (h_->state == CLOSED) advance(wakes);
}

std::vector<Slot*> Ring::leased_slots(uint32_t index) const {
    std::vector<Slot*> slots;
    const Session& s = session(index);
    for (uint64_t p = s.lease_head; slot_exists(p) && slots.size() < s.leased; p = at<Slot>(p)->next)
        slots.push_back(at<Slot>(p));
    return slots;
}

std::vector<uint64_t> Ring::reserved_numbers(uint32_t index) const {
    std::vector<uint64_t> numbers;
    const Session& s = session(index);
    for (uint64_t p = s.reserved_head; slot_exists(p) && numbers.size() < s.reserved; p = at<Slot>(p)->next)
        numbers.push_back(at<Slot>(p)->number);
    return numbers;
}

void Ring::retire_writer(uint32_t index, const std::vector<uint64_t>& items, Wakes& wakes) {
    Session& s = session(index);
    bool again =
        s.committed_item && std::find(items.begin(), items.end(), s.committed_item - 1) != items.end();
    if (!again || s.role != Session::WRITER) {
        end_session(index, true, wakes);
        return;
    }
    drop_copies(index, true, wakes);
    Change change(record(Side::Writer), windows_);
    if (h_->writers == 1) close_with(change, wakes);
    change.set(h_->writers, h_->writers - 1);
    change.set(h_->resumes, h_->resumes + 1);
    change.set(s.role, Session::RESUME);
    change.commit();
    if (h_->state == CLOSED) advance(wakes);
}

void Ring::sweep(Wakes& wakes) {
    if (is_sweep_due()) sweep_now(wakes);
}

void Ring::sweep_now(Wakes& wakes) {
    h_->swept_ns.store(uint64_t(coarse_now_ns()), std::memory_order_relaxed);
    uint64_t me = uint64_t(getpid());
    const Session* alive = nullptr;
    const bool locked = !h_->damaged;  // if the lock is lost, other threads may be here too
    if (locked) peers_.begin_round();
    for (uint32_t i = 1; i < h_->sessions().size(); ++i) {
        Session& s = session(i);
        if (s.role == Session::NONE || s.role == Session::RESUME || s.supervised || s.pid == me) continue;
        if (s.role == Session::HOLDER && s.forked) continue;  // these views last until the channel ends
        if (alive && s.pid == alive->pid && s.started == alive->started)
            continue;  // another port of the same process
        if (locked ? peers_.alive(s.pid, s.started) : process_alive(s.pid, s.started))
            alive = &s;
        else
            end_session(i, false, wakes, true);
    }
    for (WaitQueue* queue : {&h_->reader_queue, &h_->writer_queue})
        if (queue->starving && !process_alive(queue->starving, 0)) queue->starving = 0;
}

}  // namespace flowchan
