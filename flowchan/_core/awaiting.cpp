// What the async calls wait with (asynchronous.py): coroutines that stand at the gates of their channels, and a thread
// that sleeps for all of them.
//
// Algorithm. A coroutine that can't go on enters the gate, as a thread would, and tries once more: what happens later
// changes the gate's word. It stays at the gate until its operation is done, until it is told, or until it is cancelled;
// meanwhile the watching thread sleeps in futex_waitv on the words of all its coroutines. Those whose word has changed it
// takes off their gates, and the event loop tells them. One that leaves without having used its wake-up passes it on.
#include "channel.hpp"

namespace flowchan {

namespace {

template <class F> decltype(auto) on_medium(Channel& ch, F&& f) { return ch.queue ? f(*ch.queue) : f(*ch.ring); }

Gate& gate_of(Await& wait) {
    return on_medium(*wait.ch, [&](auto& m) -> Gate& {
        return Traits<std::remove_reference_t<decltype(m)>>::gate(m, wait.side);
    });
}

bool port_closed(const Await& wait) {
    return (wait.in && !wait.in->open) || (wait.out && !wait.out->open);
}

bool changed(Await& wait) {
    return port_closed(wait) || gate_of(wait).seq.load(std::memory_order_relaxed) != wait.seq;
}

}  // namespace

Await::Await(nb::object target_, bool reading, bool again)
    : target(std::move(target_)), side(reading ? Side::Reader : Side::Writer) {
    if (nb::isinstance<In>(target)) in = nb::inst_ptr<In>(target);
    else if (nb::isinstance<Out>(target)) out = nb::inst_ptr<Out>(target);
    if ((in && !ready(*in)) || (out && !ready(*out))) throw nb::python_error();
    ch = in ? in->ch : out ? out->ch : nb::inst_ptr<Channel>(target);
    if (!ch->usable()) throw nb::python_error();
    session = in ? in->state.session : out ? out->state.session : 0;
    if (ch->ring && !session) session = ch->plain_session();
    on_medium(*ch, [&](auto& m) {
        using M = std::remove_reference_t<decltype(m)>;
        Locked<M> locked(m);
        Gate& gate = Traits<M>::gate(m, side);
        seq = gate.enter(again);
        gate.ends_by_itself(+1);
        Traits<M>::at_gate(m, session, side, +1);
        ch->awaiting += 1;
        locked.unlock({});
    });
    entered = true;
}

Await::~Await() {
    if (entered && forks == fork_count) leave(true);
}

nb::object Await::channel() const { return in ? in->channel : out ? out->channel : target; }

// `unused`: somebody else may go on in this caller's place, if it was woken.
void Await::leave(bool unused) {
    if (forks != fork_count || (!entered && !unused)) return;
    const bool enters = std::exchange(entered, false);
    on_medium(*ch, [&](auto& m) {
        using M = std::remove_reference_t<decltype(m)>;
        Wakes wakes;
        Locked<M> locked(m);
        Gate& gate = Traits<M>::gate(m, side);
        if (enters) {
            const bool counted = Traits<M>::at_gate(m, session, side, -1);
            keep_order();
            if (counted) gate.leave();
            gate.ends_by_itself(counted ? -1 : 0);
            ch->awaiting -= ch->awaiting > 0;
        }
        if (unused) (side == Side::Reader ? wakes.readers : wakes.writers) += gate.call(1);
        locked.unlock(wakes);
    });
}

void Watch::ring() {
    bell_.fetch_add(1, std::memory_order_seq_cst);  // partner: the load in `sleep`, after `asleep_` was set
    if (asleep_.load(std::memory_order_seq_cst)) futex_wake(bell_, 1, false);
}

// Until the bell has rung since `heard` was read, one of the waits has changed, or `seconds` are over. Answers the indices
// of those that have changed; they have left their gates then.
nb::list Watch::sleep(uint32_t heard, nb::list waits, double seconds) {
    std::vector<Await*> all;
    std::vector<WaitedWord> words{{heard, reinterpret_cast<uint64_t>(&bell_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0}};
    bool any = false;
    for (nb::handle one : waits) {
        Await* wait = nb::inst_ptr<Await>(one);
        const uint32_t flags = FUTEX_WORD_32 | (wait->ch->queue ? FUTEX_PRIVATE_FLAG : 0);
        all.push_back(wait);
        words.push_back({wait->seq, reinterpret_cast<uint64_t>(&gate_of(*wait).seq), flags, 0});
        any = any || changed(*wait);
    }
    if (!any) {
        asleep_.store(true, std::memory_order_seq_cst);
        {
            WithoutGil without;
            sleep_on_any(words, now_ns() + int64_t(seconds * 1e9));
        }
        asleep_.store(false, std::memory_order_relaxed);
    }
    nb::list found;
    for (size_t i = 0; i < all.size(); ++i) {
        if (all[i]->ch->ring && all[i]->ch->ring->is_sweep_due()) {  // who would have woken it may be dead
            Ring& ring = *all[i]->ch->ring;
            Wakes wakes;
            Locked<Ring> locked(ring);
            ring.sweep(wakes);
            locked.unlock(wakes);
        }
        if (!changed(*all[i])) continue;
        all[i]->leave(false);
        found.append(i);
    }
    return found;
}

}  // namespace flowchan
