// The loop of a blocking channel call. It tries the operation, waits in a queue (waiting.hpp), tries again,
// and gives up at the deadline.
//
// `op` performs the operation on the transport and returns a Step. The loop calls it under the transport's
// lock; on a ring, `op` must not touch Python objects. The caller must hold the GIL, which the loop releases
// only while it sleeps.
#pragma once

#include <Python.h>

#include "gil.hpp"
#include "queue.hpp"
#include "ring.hpp"

namespace flowchan {

static_assert(Transport<LocalQueue> && Transport<Ring>);

// The functions of a transport that the loop calls.
template <class M>
struct Traits;

template <>
struct Traits<LocalQueue> {
    static constexpr const char* across = "threads";
    static constexpr bool processes = false;
    using Waiting = Node;
    static std::atomic<uint32_t>& word(LocalQueue&, const Caller&, Node& node) { return node.word; }
    static void enter(LocalQueue& q, const Caller& caller, Node& node, bool selecting, bool again) {
        const bool for_turn = caller.ordered && caller.number > q.turn && q.inside() == 0;
        q.wait_list(caller.side).enter(node, caller, selecting, again, for_turn);
    }
    static bool leave(LocalQueue& q, const Caller& caller, Node& node, bool) {
        return q.wait_list(caller.side).leave(node);
    }
    static bool may_pass(LocalQueue& q, const Caller& caller, const Node* node) {
        const Node* first = q.wait_list(caller.side).starving;
        if (!first || caller.ordered || first == node) return true;
        return (caller.orders && *caller.orders) || !q.could_continue(first->caller);
    }
    static void starve(LocalQueue& q, const Caller& caller, Node& node) {
        Node*& first = q.wait_list(caller.side).starving;
        if (!first && !caller.ordered) first = &node;
    }
    // End a call. The wait list wakes one waiter at a time: it wakes no other until the woken waiter has run
    // (wait_list.hpp). So wake the next waiter now, even if this call failed.
    static void end(LocalQueue& q, const Caller& caller, Node& node, bool, Wakes& wakes) {
        Node*& first = q.wait_list(caller.side).starving;
        if (first == &node) first = nullptr;
        pass_on(q, caller, wakes);
    }
    // Put a woken waiter back to sleep, because it must not overtake the starving waiter. Wake a waiter that
    // can continue, because the wake-up may have been meant for the starving waiter.
    static void sleep_again(LocalQueue& q, const Caller& caller, Wakes& wakes) {
        q.wake_waiting(caller.side, wakes);
    }
    // Put a woken waiter back to sleep. A waiter with an earlier turn may have arrived in the meantime, and
    // nothing has woken it yet, so wake it now.
    static void in_vain(LocalQueue& q, const Caller& caller, const Node& node, Wakes& wakes) {
        if (q.wait_list(caller.side).is_behind(node)) pass_on(q, caller, wakes);
    }
    static void pass_on(LocalQueue& q, const Caller& caller, Wakes& wakes) {
        q.wake_waiting(caller.side, wakes);
    }
    static bool ready(LocalQueue&, Side) { return false; }
    static bool tries_again(LocalQueue& q, const Caller& caller) { return may_pass(q, caller, nullptr); }
    static void check_for_dead(LocalQueue&, Wakes&) {}
    static constexpr bool is_check_due(LocalQueue&) { return false; }
    static bool ended(LocalQueue& q) { return q.state != OPEN; }
    static uint64_t resumes(LocalQueue&) { return 0; }
    // Only the main thread must check again after each slice of sleep, because only the main thread handles
    // signals. Other threads sleep until another thread of this process wakes them. That thread can die only
    // together with the whole process.
    static int64_t slice(Deadline deadline) {
        return thread_number() == uint32_t(getpid()) ? deadline.slice() : deadline.left();
    }
    static int sleep(LocalQueue&, const Caller&, Node& node, int64_t ns) {
        return futex_wait(node.word, node.seen, ns, false);
    }
};

template <>
struct Traits<Ring> {
    static constexpr const char* across = "processes";
    static constexpr bool processes = true;
    struct Waiting {
        uint32_t seen = 0;
        // the bit of the caller's rank, or all bits if the caller has no rank
        uint32_t rank = FUTEX_BITSET_MATCH_ANY;
        bool selecting = false;
        bool ordered = false;
    };
    static WaitQueue& wait_queue(Ring& r, Side side) {
        return side == Side::Reader ? r.header().reader_queue : r.header().writer_queue;
    }
    static std::atomic<uint32_t>& word(Ring& r, const Caller& caller, Waiting& waiting) {
        return waiting.ordered ? r.session(caller.session).word : wait_queue(r, caller.side).seq;
    }
    static void enter(Ring& r, const Caller& caller, Waiting& waiting, bool selecting, bool again) {
        Session& s = r.session(caller.session);
        waiting.ordered = caller.ordered;
        waiting.selecting = selecting && !caller.ordered;
        if (caller.side == Side::Writer && r.header().nap.exchange(0, std::memory_order_relaxed))
            futex_wake(r.header().nap, 1, true);
        if (caller.ordered) {
            waiting.seen = r.await_turn(s, caller.number, again);
            return;
        }
        waiting.seen = wait_queue(r, caller.side).enter(again);
        if (caller.exchangeable) wait_queue(r, caller.side).idle |= waiting.rank = 1u << caller.session % 32;
        if (waiting.selecting) wait_queue(r, caller.side).count_selecting(+1);
        (caller.side == Side::Reader ? s.in_reader_queue : s.in_writer_queue) += 1;
        s.clock.begin(false);
        if (caller.side == Side::Reader && r.header().notify_writer)
            futex_wake(r.header().writer_queue.seq, r.header().writer_queue.call(1), true);
        // If puts are limited, the reader is a link. Wake it, because it must now ask for a higher limit.
        if (caller.side == Side::Writer && r.is_limited())
            futex_wake(r.header().reader_queue.seq, r.header().reader_queue.call(1), true);
    }
    // Leave the queue. Return whether the futex word has changed. If the session ended during the wait, the
    // call has already been removed from the queue.
    static bool leave(Ring& r, const Caller& caller, Waiting& waiting, bool) {
        Session& s = r.session(caller.session);
        const bool called = word(r, caller, waiting).load(std::memory_order_relaxed) != waiting.seen;
        if (waiting.ordered) {
            r.end_turn_wait(s);
            return called;
        }
        uint32_t& n = caller.side == Side::Reader ? s.in_reader_queue : s.in_writer_queue;
        const bool counted = n > 0;
        if (counted) n -= 1;
        if (counted) s.clock.end(false);
        if (caller.exchangeable) wait_queue(r, caller.side).idle &= ~waiting.rank;
        // Subtract from the session first, as in Ring::drop_copies. If the process dies between the two
        // updates, the queue's count is one too high, but never too low.
        keep_order();
        if (counted) wait_queue(r, caller.side).leave();
        if (waiting.selecting) wait_queue(r, caller.side).count_selecting(counted ? -1 : 0);
        return called;
    }
    static bool may_pass(Ring& r, const Caller& caller, const Waiting* waiting) {
        const WaitQueue& g = wait_queue(r, caller.side);
        if (!g.starving || caller.ordered || (waiting && g.starving == thread_number())) return true;
        return caller.side == Side::Writer && !r.has_room(g.starving_size);
    }
    static void starve(Ring& r, const Caller& caller, Waiting&) {
        WaitQueue& g = wait_queue(r, caller.side);
        if (g.starving || caller.ordered) return;
        g.starving_size = caller.size;
        g.starving = thread_number();
    }
    static void end(Ring& r, const Caller& caller, Waiting&, bool used, Wakes& wakes) {
        WaitQueue& g = wait_queue(r, caller.side);
        uint32_t& count = caller.side == Side::Reader ? wakes.readers : wakes.writers;
        if (g.starving && g.starving == thread_number()) {
            g.starving = 0;
            count += g.call_all();  // callers that waited behind the starving one
        } else if (!used) {
            pass_on(r, caller, wakes);
        }
    }
    // While a caller is starving, each wake-up wakes all callers, so this wake-up need not be passed on.
    static void sleep_again(Ring&, const Caller&, Wakes&) {}
    // nothing to do: wake_turns() wakes the ordered writers, one per turn
    static void in_vain(Ring&, const Caller&, const Waiting&, Wakes&) {}
    static void pass_on(Ring& r, const Caller& caller, Wakes& wakes) {
        if (caller.ordered)
            r.wake_turns(wakes);
        else
            (caller.side == Side::Reader ? wakes.readers : wakes.writers) +=
                wait_queue(r, caller.side).call(1);
        if (caller.side == Side::Reader && r.header().notify_writer)  // one fewer reader is waiting now
            wakes.writers += r.header().writer_queue.call(1);
        if (caller.side == Side::Writer && r.is_limited()) wakes.readers += r.header().reader_queue.call(1);
    }
    // Return whether a call on this side could continue. This is only a hint, because it is read without the
    // lock. A caller that relies on it must check again under the lock.
    static bool ready(Ring& r, Side side) {
        Header& h = r.header();
        auto seen = [](uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_relaxed); };
        if (seen(h.state) != OPEN) return true;
        if (side == Side::Reader) return seen(h.head) != 0;
        return seen(h.puts) - seen(h.takes) < h.capacity && !r.is_withheld() && r.is_worth_waking();
    }
    // Return whether a call that could not continue tries again before it sleeps.
    static bool tries_again(Ring& r, const Caller& caller) {
        const bool worth = caller.side == Side::Reader || caller.ordered || r.is_worth_waking();
        return worth && may_pass(r, caller, nullptr);
    }
    static bool ended(Ring& r) { return r.header().state != OPEN; }
    static uint64_t resumes(Ring& r) {
        return std::atomic_ref(r.header().resumes).load(std::memory_order_relaxed);
    }
    static void check_for_dead(Ring& r, Wakes& wakes) { r.sweep(wakes); }
    static bool is_check_due(Ring& r) { return r.is_sweep_due(); }
    static int64_t slice(Deadline deadline) { return deadline.slice(); }
    static int sleep(Ring& r, const Caller& caller, Waiting& waiting, int64_t ns) {
        return futex_wait_as(waiting.rank, word(r, caller, waiting), waiting.seen, ns);
    }
};

// Record, under the lock, that an item gets no more outputs. Like a put, return Wait if the item is too far
// ahead of its turn.
template <class M>
Step finish_item(M& m, WriterState& writer, uint64_t number, Wakes& wakes) {
    // The item has no output, so forget how many outputs a dead predecessor put for it.
    if (!writer.ordered) {
        if (!writer.keyed && Traits<M>::resumes(m)) m.begin_item(writer, number);
        writer.keyed = false;
        return Step::Done;
    }
    // A `single` writer has already ended the item's turn by putting the only output. Without an output, the
    // turn ends now.
    if (writer.has_passed(number)) return Step::Done;
    if (!writer.keyed) m.begin_item(writer, number);
    writer.keyed = true;
    return m.item_done(writer, wakes);
}

// Takes the lock; while the lock is busy, waits without the GIL. `released` is set while the GIL is released.
template <class M>
struct Locked {
    explicit Locked(M& transport) : m(transport) {
        if (m.lock(false)) return;
        released = PyEval_SaveThread();
        m.lock(true);
    }
    // Release the lock and wake the waiters before taking the GIL again.
    void unlock(const Wakes& wakes) {
        m.unlock();
        m.wake(wakes);
        if (released) take_gil(released);
        released = nullptr;
    }
    M& m;
    PyThreadState* released = nullptr;
};

// How one sleep of a waiting call ended. If `interrupted` or `late` is set, the call did not sleep at all.
struct SleepResult {
    bool interrupted = false, late = false;
    int error = 0;
};

template <class M>
[[gnu::always_inline]] inline SleepResult sleep_without_gil(M& m, const Caller& caller,
                                                            typename Traits<M>::Waiting& waiting,
                                                            Deadline deadline) {
    SleepResult woken{.interrupted = PyErr_CheckSignals() != 0};
    woken.late = !woken.interrupted && deadline.passed();
    if (woken.interrupted || woken.late) return woken;
    PyThreadState* state = PyEval_SaveThread();
    woken.error = Traits<M>::sleep(m, caller, waiting, Traits<M>::slice(deadline));
    take_gil(state);
    return woken;
}

template <class M, class Op>
Step wait(M& m, const Caller& caller, Op&& op, Deadline deadline) {
    using T = Traits<M>;
    typename T::Waiting waiting;
    uint32_t vain = 0;
    const int64_t since = now_ns();
    const bool selecting = deadline.at != NEVER;  // a wait with a deadline may end without a wake-up
    Wakes wakes;

    if constexpr (T::processes) {
        PyThreadState* state = PyEval_SaveThread();
        m.spin.wait([&] { return T::ready(m, caller.side); });
        take_gil(state);
    }
    Locked<M> first(m);
    Step step = T::tries_again(m, caller) || T::ended(m) ? op(wakes) : Step::Wait;
    if (step == Step::Wait) T::enter(m, caller, waiting, selecting, false);
    first.unlock(wakes);

    while (step == Step::Wait) {
        wakes.clear();
        const auto [interrupted, late, error] = sleep_without_gil(m, caller, waiting, deadline);
        const bool slice_over = error == ETIMEDOUT;
        Locked<M> locked(m);
        const bool called = T::leave(m, caller, waiting, selecting);
        T::check_for_dead(m, wakes);
        // An interrupted call must not take an item, because it raises an error and could not return the
        // item. After a full slice of sleep, a call may overtake the starving waiter, which may be dead.
        const bool passes = T::may_pass(m, caller, &waiting) || slice_over || T::ended(m);
        if (!interrupted && passes) step = op(wakes);
        if (!passes) T::sleep_again(m, caller, wakes);
        if (step == Step::Wait && !interrupted && !late) {
            if (error == 0 && ++vain >= 2 && now_ns() - since > PATIENCE_NS) T::starve(m, caller, waiting);
            T::enter(m, caller, waiting, selecting, true);
            if (called) T::in_vain(m, caller, waiting, wakes);
        } else {
            T::end(m, caller, waiting, step != Step::Wait, wakes);
            if (step == Step::Wait) step = interrupted ? Step::Interrupted : Step::NotNow;
        }
        locked.unlock(wakes);
    }
    return step;
}

// Perform `op` as soon as the channel permits it. `caller(waits)` returns the identity of the call. A call
// that waits needs a session, so `caller` opens one if `waits` is set.
template <class M, class Op, class Who>
Step perform(M& m, Who&& caller, Op&& op, Deadline deadline) {
    using T = Traits<M>;
    Wakes wakes;
    Locked<M> locked(m);
    // Even callers that never wait must learn of deaths (C5). A get that finds an item can skip the check. A
    // put cannot, because its item would be lost if all readers are dead.
    if (T::processes && caller(false).side == Side::Writer && T::is_check_due(m)) T::check_for_dead(m, wakes);
    // After the channel has ended, no caller may wait behind a starving caller. The starving caller may
    // itself be waiting for items that this caller has on lease.
    const bool behind = !deadline.now_only() && !T::ended(m) && !T::may_pass(m, caller(false), nullptr);
    Step step = behind ? Step::Wait : op(wakes);
    if (step == Step::Wait && !behind && T::is_check_due(m)) {
        T::check_for_dead(m, wakes);
        step = op(wakes);
    }
    locked.unlock(wakes);
    if (step != Step::Wait) return step;
    if (deadline.now_only()) return Step::NotNow;
    return wait(m, caller(true), op, deadline);
}

}  // namespace flowchan
