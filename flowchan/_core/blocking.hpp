// How a call on a channel tries, waits, and gives up: the loop around the gates of waiting.hpp.
//
// `op` is the operation on the medium; it is called with the medium's lock held and answers with a Step. For a ring it
// touches no Python object. The GIL is held on entry and on return, and released while the call sleeps.
#pragma once

#include <Python.h>

#include "gil.hpp"
#include "queue.hpp"
#include "ring.hpp"

namespace flowchan {

enum class Side { Reader, Writer };

// What the loop must know of a medium.
template <class M> struct Traits;

template <> struct Traits<LocalQueue> {
    static constexpr bool processes = false;
    static Gate& gate(LocalQueue& q, Side side) { return side == Side::Reader ? q.reader_gate : q.writer_gate; }
    static bool at_gate(LocalQueue&, uint32_t, Side, int) { return true; }
    static bool ready(LocalQueue&, Side) { return false; }
    static void look_for_dead(LocalQueue&, Wakes&) {}
    static constexpr bool time_to_look(LocalQueue&) { return false; }
    static bool ended(LocalQueue& q) { return q.state != OPEN; }
    static uint64_t resumes(LocalQueue&) { return 0; }
    static bool readable(LocalQueue& q) { return q.inside() || q.state == BROKEN || q.drained(); }
    static bool writable(LocalQueue& q, uint64_t capacity) { return q.state != OPEN || q.inside() + q.parked < capacity; }
};

template <> struct Traits<Ring> {
    static constexpr bool processes = true;
    static Gate& gate(Ring& r, Side side) {
        return side == Side::Reader ? r.header().reader_gate : r.header().writer_gate;
    }
    // False when the session has ended while its caller waited, and was taken off the gate with that.
    static bool at_gate(Ring& r, uint32_t session, Side side, int change) {
        Session& s = r.session(session);
        uint32_t& n = side == Side::Reader ? s.at_reader_gate : s.at_writer_gate;
        if (change < 0 && n == 0) return false;
        n += uint32_t(change);
        return true;
    }
    // A hint read without the lock; whoever believes it takes the lock and looks.
    static bool ready(Ring& r, Side side) {
        Header& h = r.header();
        auto seen = [](uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_relaxed); };
        if (seen(h.state) != OPEN) return true;
        if (side == Side::Reader) return seen(h.head) != 0;
        return seen(h.puts) - seen(h.takes) < h.capacity;
    }
    static bool ended(Ring& r) { return r.header().state != OPEN; }
    static uint64_t resumes(Ring& r) { return std::atomic_ref(r.header().resumes).load(std::memory_order_relaxed); }
    static bool readable(Ring& r) { return r.header().head || r.header().state == BROKEN || r.at_end(); }
    static bool writable(Ring& r, uint64_t capacity) {
        Header& h = r.header();
        return h.state != OPEN || h.puts - h.takes + h.parked + h.claimed < capacity;
    }
    static void look_for_dead(Ring& r, Wakes& wakes) { r.sweep(wakes); }
    static bool time_to_look(Ring& r) { return r.is_sweep_due(); }
};

// Gets the lock; when that means waiting, without the GIL. Returns whether the GIL is released now.
template <class M>
struct Locked {
    explicit Locked(M& medium) : m(medium) {
        if (m.lock(false)) return;
        released = PyEval_SaveThread();
        m.lock(true);
    }
    // Drops the lock first, then wakes who can go on, then takes the GIL again.
    void unlock(const Wakes& wakes) {
        m.unlock();
        m.wake(wakes);
        if (released) take_gil(released);
        released = nullptr;
    }
    M& m;
    PyThreadState* released = nullptr;
};

template <class M, class Op>
Step wait(M& m, Side side, uint32_t session, Op&& op, Deadline deadline) {
    using T = Traits<M>;
    Gate& gate = T::gate(m, side);
    const uint32_t me = uint32_t(gettid());
    uint32_t seq = 0, vain = 0;
    const int64_t since = now_ns();
    Wakes wakes;

    if constexpr (T::processes) {
        PyThreadState* state = PyEval_SaveThread();
        m.spin.wait([&] { return T::ready(m, side); });
        take_gil(state);
    }
    Locked<M> first(m);
    Step step = gate.may_pass(me) || T::ended(m) ? op(wakes) : Step::Wait;
    if (step == Step::Wait) {
        seq = gate.enter();
        if (deadline.at != NEVER) gate.ends_by_itself(+1);
        T::at_gate(m, session, side, +1);
    }
    first.unlock(wakes);

    while (step == Step::Wait) {
        wakes = {};
        const bool interrupted = PyErr_CheckSignals() != 0;
        const bool late = !interrupted && deadline.passed();
        int error = 0;
        if (!interrupted && !late) {
            PyThreadState* state = PyEval_SaveThread();
            error = futex_wait(gate.seq, seq, deadline.slice(), T::processes);
            take_gil(state);
        }
        const bool slice_over = error == ETIMEDOUT;
        Locked<M> locked(m);
        const bool counted = T::at_gate(m, session, side, -1);
        keep_order();  // as in Ring::drop_copies: dead in between, it counts as waiting once too often, never too seldom
        if (counted) gate.leave();
        if (counted && deadline.at != NEVER) gate.ends_by_itself(-1);
        T::look_for_dead(m, wakes);
        // An interrupted call must not take an item that it can't return. One whose slice is over ignores who starves:
        // that one may be dead.
        if (!interrupted && (gate.may_pass(me) || slice_over || T::ended(m))) step = op(wakes);
        if (step == Step::Wait && !interrupted && !late) {
            if (error == 0 && ++vain >= 2 && gate.starving == 0 && now_ns() - since > PATIENCE_NS) gate.starving = me;
            seq = gate.enter(true);
            if (deadline.at != NEVER) gate.ends_by_itself(+1);
            T::at_gate(m, session, side, +1);
        } else {
            if (gate.starving == me) {
                gate.starving = 0;
                (side == Side::Reader ? wakes.readers : wakes.writers) += gate.call_all();  // who had to queue up
            } else if (step == Step::Wait) {
                (side == Side::Reader ? wakes.readers : wakes.writers) += gate.call(1);  // pass the wake-up on
            }
            if (step == Step::Wait) step = interrupted ? Step::Interrupted : Step::NotNow;
        }
        locked.unlock(wakes);
    }
    return step;
}

// Does `op` as soon as it can be done. `session()` names the caller's session; it is asked only if the call must wait.
template <class M, class Op, class Session>
Step perform(M& m, Side side, Session&& session, Op&& op, Deadline deadline) {
    using T = Traits<M>;
    Wakes wakes;
    Locked<M> locked(m);
    // Who never waits learns of deaths too (C5). A get that finds an item need not know, a put would go nowhere.
    if (side == Side::Writer && T::time_to_look(m)) T::look_for_dead(m, wakes);
    // Nobody queues up in a channel that has ended: what is in hand here may be what the others wait for.
    bool behind = T::gate(m, side).starving != 0 && !deadline.now_only() && !T::ended(m);
    Step step = behind ? Step::Wait : op(wakes);
    if (step == Step::Wait && !behind && T::time_to_look(m)) {
        T::look_for_dead(m, wakes);
        step = op(wakes);
    }
    locked.unlock(wakes);
    if (step != Step::Wait) return step;
    if (deadline.now_only()) return Step::NotNow;
    return wait(m, side, session(), op, deadline);
}

}  // namespace flowchan
