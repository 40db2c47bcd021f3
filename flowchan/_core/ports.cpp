// In and Out: the counted ports of a stage. They also decide which input item an output belongs to.
#include "channel.hpp"
#include "raising.hpp"
#include "references.hpp"

#include <optional>

namespace flowchan {

namespace {

// Record that all outputs for item `number` have been put. Like a put, this waits if the item is too far
// ahead of its turn. Return false with a Python error set if a signal handler raised during the wait.
template <class M>
bool done_with(M& m, Out& out, uint64_t number) {
    if (!out.state.ordered) {
        Wakes wakes;
        if (out.state.keyed || !Traits<M>::resumes(m)) {  // no dead worker's output count to forget
            out.state.keyed = false;
            return true;
        }
        Locked<M> locked(m);
        finish_item(m, out.state, number, wakes);
        locked.unlock(wakes);
        return true;
    }
    if (out.state.has_passed(number)) return true;  // the put of the only output ended the turn
    Step step = perform(
        m,
        [&](bool) {
            return Caller{Side::Writer, &out, out.state.session, 0, true, number, false, &out.state.clock};
        },
        [&](Wakes& wakes) { return out.open ? finish_item(m, out.state, number, wakes) : Step::Done; },
        Deadline{});
    return step != Step::Interrupted;
}

// Open a session for a port, or adopt the session that another process has opened for the port. Return its
// generation.
uint64_t open_session(LocalQueue& queue, Channel&, int, bool writer, uint32_t&) {
    Locked locked(queue);
    (writer ? queue.writers : queue.readers) += 1;
    locked.unlock({});
    return 0;
}

uint64_t open_session(Ring& ring, Channel& ch, int given, bool writer, uint32_t& session) {
    Wakes wakes;
    std::string failure;
    Locked locked(ring);
    try {
        if (given) ring.adopt(uint32_t(given));
        session =
            given ? uint32_t(given) : ring.open_session(writer ? Session::WRITER : Session::READER, wakes);
    } catch (const std::exception& e) {
        failure = e.what();
    }
    uint64_t generation = ring.session(session).generation;
    locked.unlock(wakes);
    if (failure.empty()) return generation;
    raise("ChannelError", ch.describe() + ": " + failure);
    throw nb::python_error();
}

uint64_t open_port(Channel& ch, int given, bool writer, uint32_t& session) {
    if (!ch.usable()) throw nb::python_error();
    return ch.with([&](auto& transport) { return open_session(transport, ch, given, writer, session); });
}

// Return whether the session still belongs to this port.
bool owns(Ring& ring, uint32_t session, uint64_t generation) {
    Session& s = ring.session(session);
    return s.generation == generation && s.role != Session::NONE;
}

}  // namespace

Step Turn::enter(Deadline deadline) {
    for (uint32_t other = 0;
         !is_own() && !owner_.compare_exchange_strong(other, me(), std::memory_order_acquire); other = 0) {
        if (deadline.now_only() || deadline.passed()) return Step::NotNow;
        if (PyErr_CheckSignals() != 0) return Step::Interrupted;
        WithoutGil without;
        // This thread increments `waiting_` and then reads `owner_`; `leave` writes `owner_` and then reads
        // `waiting_`. So at least one of the two threads sees the other's write.
        waiting_ += 1;
        futex_wait(owner_, other, deadline.slice(), false);
        waiting_ -= 1;
    }
    depth_ += 1;
    return Step::Done;
}

void Turn::leave() {
    if (--depth_ > 0) return;
    owner_.store(0, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst)) futex_wake(owner_, 1, false);
}

// Take the transport's lock at a moment when no thread of this process reads or writes the port's items in
// place. Do not hold the lock while waiting for that moment.
template <class Transport, class Busy>
static void lock_when_idle(Transport& transport, Busy busy, std::optional<Locked<Transport>>& locked) {
    for (;;) {
        locked.emplace(transport);
        if (!busy()) return;
        locked->unlock({});
        locked.reset();
        WithoutGil without;
        usleep(100);
    }
}

// Forget which threads use a port, because these threads do not exist in a forked child.
static void forget_threads(In& in) {
    in.turn.forget();
    in.copying = false;
}
static void forget_threads(Out& out) { out.copying = 0; }

template <class Port>
bool ready(Port& port) {
    if (!port.open) {
        raise_step(*port.ch, Step::PortClosed, Side::Reader, 0, {});
        return false;
    }
    if (port.forks == fork_count) return true;
    nb::object self = nb::find(port);
    nb::ft_object_guard guard(self);
    if (port.forks == fork_count) return true;  // another thread has already done this
    if (!port.ch->usable()) return false;
    forget_threads(port);
    locked_ring(*port.ch, [&](Ring& ring, Wakes&) { ring.adopt(port.state.session); });
    port.forks = fork_count;
    return true;
}

template bool ready(In&);
template bool ready(Out&);

bool pass_turns(In& in) {
    if (!in.state.leases) return true;
    for (Out* out : in.feeds) {
        const bool ok =
            out->ch->with([&](auto& transport) { return done_with(transport, *out, in.state.number); });
        if (!ok) return false;
        out->state.count = 0;
    }
    return true;
}

void runs(In* in, Session::At at) {
    if (!in) return;
    in->ch->with(Each{[](LocalQueue&) {}, [&](Ring& ring) { ring.session(in->state.session).at = at; }});
}

// Return whether the port is open and still in this process.
template <class Port>
static bool is_own(Port& port) {
    if (!port.open || port.forks != fork_count) return false;
    return port.ch->with(Each{
        [](LocalQueue&) { return true; },
        [&](Ring& ring) { return ring.session(port.state.session).pid == uint64_t(getpid()); },
    });
}

// Call each function. Report errors as unraisable, because they are not the caller's fault.
static void call_all(const std::vector<nb::object>& calls) {
    if (calls.empty()) return;
    nb::error_scope kept;
    for (const nb::object& call : calls) {
        PyObject* none = PyObject_CallNoArgs(call.ptr());
        if (!none) PyErr_WriteUnraisable(call.ptr());
        Py_XDECREF(none);
    }
}

thread_local Receiving* Receiving::current_ = nullptr;

void Receiving::when_finished(nb::object call) {
    std::vector<nb::object> one{std::move(call)};
    if (current_)
        current_->calls_.push_back(std::move(one[0]));
    else
        call_all(one);
}

void Receiving::received(In* in) {
    if (calls_.empty()) return;
    if (!in) return call_all(calls_);
    for (nb::object& call : calls_) in->due.push_back(std::move(call));
}

void In::call_due() {
    if (!due.empty()) call_all(std::exchange(due, {}));
}

In::In(nb::object channel_, int session) : channel(std::move(channel_)), ch(nb::inst_ptr<Channel>(channel)) {
    generation = open_port(*ch, session, false, state.session);
}

Out::Out(nb::object channel_, int session)
    : channel(std::move(channel_)), ch(nb::inst_ptr<Channel>(channel)) {
    generation = open_port(*ch, session, true, state.session);
}

In::~In() {
    for (Out* out : feeds) out->reader.reset();
    drop();
}

void In::drop() {
    if (is_own(*this)) close(false);
}

Out::~Out() {
    if (In* in = follows()) std::erase(in->feeds, this);
    if (is_own(*this)) close();
}

void In::close(bool finished) {
    if (!open.exchange(false)) return;
    // A signal may interrupt the wait, but the port closes anyway.
    if (finished && !pass_turns(*this)) PyErr_Clear();
    ch->with([&](auto& transport) { leave(transport, finished); });
    const std::vector<nb::object> calls = std::exchange(due, {});
    if (finished) call_all(calls);
}

void In::leave(LocalQueue& queue, bool finished) {
    Wakes wakes;
    Locked locked(queue);
    const bool drops = finished || queue.state == BROKEN;
    if (drops)
        queue.acknowledge(state, wakes);
    else
        queue.give_back(leased_items, state, wakes);
    const std::vector<LocalQueue::Item> items = std::exchange(leased_items, {});
    queue.end_port(Side::Reader, this, wakes);
    locked.unlock(wakes);
    if (drops) drop_items(items);
}

void In::leave(Ring& ring, bool finished) {
    Wakes wakes;
    std::optional<Locked<Ring>> locked;
    lock_when_idle(ring, [&] { return copying && !turn.is_own(); }, locked);
    if (owns(ring, state.session, generation)) {
        if (finished) references().release_leased(ring, state.session);
        ring.end_session(state.session, finished, wakes);
        references().release_unread(ring);
    }
    locked->unlock(wakes);
    state.leases = 0;
}

void Out::close() {
    if (!open.exchange(false)) return;
    ch->with([&](auto& transport) { leave(transport); });
}

void Out::leave(LocalQueue& queue) {
    Wakes wakes;
    Locked locked(queue);
    queue.end_port(Side::Writer, this, wakes);
    locked.unlock(wakes);
}

void Out::leave(Ring& ring) {
    Wakes wakes;
    std::optional<Locked<Ring>> locked;
    lock_when_idle(ring, [&] { return copying > 0; }, locked);
    if (owns(ring, state.session, generation)) ring.end_session(state.session, true, wakes);
    locked->unlock(wakes);
}

}  // namespace flowchan
