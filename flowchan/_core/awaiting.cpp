// Waits of async calls (awaiting.py). Coroutines enter the wait queues of their channels, and one thread
// sleeps for all of them.
//
// Algorithm. A coroutine that cannot continue enters the wait queue, as a thread would, and then tries once
// more. From then on, every event that the coroutine waits for changes the queue's word. The coroutine stays
// in the queue until its operation succeeds, or until it is woken or cancelled.
//
// The watcher thread sleeps in futex_waitv on the words of all its coroutines. When words change, it removes
// their coroutines from the queues, and the event loop resumes them. A coroutine that leaves the queue
// without using its wake-up passes the wake-up on to the next waiter.
#include "channel.hpp"

namespace flowchan {

namespace {

bool changed(const Await& wait) {
    return (wait.in && !wait.in->open) || (wait.out && !wait.out->open) || wait.place->changed();
}

}  // namespace

void Place::enter(bool again) {
    ch->with([&]<class M>(M& m) {
        auto& waiting = std::get<typename Traits<M>::Waiting>(waiting_);
        Locked locked(m);
        Traits<M>::enter(m, caller, waiting, true, again);
        word_ = &Traits<M>::word(m, caller, waiting);
        seen_ = waiting.seen;
        locked.unlock({});
    });
}

void Place::leave(bool unused) {
    ch->with([&]<class M>(M& m) {
        auto& waiting = std::get<typename Traits<M>::Waiting>(waiting_);
        Wakes wakes;
        Locked locked(m);
        const bool called = Traits<M>::leave(m, caller, waiting, true);
        Traits<M>::check_for_dead(m, wakes);
        // A wait list wakes one waiter at a time: it wakes no other until the woken waiter has run. So wake
        // the next waiter now, even if this call failed.
        if (called ? unused || !Traits<M>::processes : unused) Traits<M>::pass_on(m, caller, wakes);
        locked.unlock(wakes);
    });
}

void Place::pass_on() {
    locked(*ch, [&]<class M>(M& m, Wakes& wakes) {
        Traits<M>::pass_on(m, caller, wakes);
        return 0;
    });
}

Await::Await(nb::object target_, bool reading, bool again) : target(std::move(target_)) {
    if (nb::isinstance<In>(target))
        in = nb::inst_ptr<In>(target);
    else if (nb::isinstance<Out>(target))
        out = nb::inst_ptr<Out>(target);
    if ((in && !ready(*in)) || (out && !ready(*out))) throw nb::python_error();
    Channel& whole = in ? *in->ch : out ? *out->ch : *nb::inst_ptr<Channel>(target);
    Channel& ch = whole.through(reading ? Side::Reader : Side::Writer);
    if (!ch.usable()) throw nb::python_error();
    Caller caller =
        reading ? Caller{Side::Reader, in, in ? in->state.session : 0} : writing(ch, out, 0, true);
    if (in) caller.clock = &in->state.clock;
    if (!caller.session) caller.session = ch.plain_session();
    place.emplace(&ch, caller);
    place->enter(again);
    ch.awaiting += 1;
    entered = true;
}

Await::~Await() {
    if (entered && forks == fork_count) leave(true);
}

nb::object Await::channel() const { return in ? in->channel : out ? out->channel : target; }

// Leave the wait queue. `unused`: if this caller was woken but took nothing, wake another waiter.
void Await::leave(bool unused) {
    if (forks != fork_count || (!entered && !unused)) return;
    if (entered.exchange(false)) {
        place->leave(unused);
        place->ch->awaiting -= place->ch->awaiting > 0;
    } else {
        place->pass_on();
    }
}

void Watch::ring() {
    // pairs with `sleep`, which sets `asleep_` and then reads the doorbell
    doorbell_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) futex_wake(doorbell_, 1, false);
}

// Sleep until the doorbell rings, a wait changes, or `seconds` have passed. `heard` is the value of the
// doorbell before the caller last checked its waits. If the doorbell has rung since then, the sleep ends at
// once. Remove the changed waits from their queues, and return their indices.
nb::list Watch::sleep(uint32_t heard, nb::list waits, double seconds) {
    std::vector<Await*> all;
    std::vector<WaitedWord> words{
        {heard, reinterpret_cast<uint64_t>(&doorbell_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0}};
    bool any = false;
    for (nb::handle one : waits) {
        Await* wait = nb::inst_ptr<Await>(one);
        all.push_back(wait);
        words.push_back(wait->place->waited());
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
        // The process that should have woken this waiter may be dead.
        all[i]->place->ch->with([](auto& transport) { check_for_dead(transport); });
        if (!changed(*all[i])) continue;
        all[i]->leave(false);
        found.append(i);
    }
    return found;
}

}  // namespace flowchan
