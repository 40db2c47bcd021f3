// Waiting at several gates at once: what select and the async calls are made of.
//
// Algorithm. Register at every gate first, then try the operations, then sleep in futex_waitv on all the gates' words
// (Linux 5.16; where it is missing or refused, see `sleep_by_turns`). Because registering comes before trying, an
// operation that becomes possible later changes a word that is being watched. Leaving a gate without having used it
// passes the wake-up on, since this caller may have been the one that was woken.
#include "channel.hpp"
#include "system.hpp"

#include <algorithm>
#include <random>

namespace flowchan {

namespace {

constexpr size_t MOST = 128;  // FUTEX_WAITV_MAX

std::atomic<bool> waitv_refused{false};  // by this kernel or a filter of system calls, so for good; no partner

struct Place {
    Channel* ch;
    Side side;
    uint32_t session;
};

struct Entered {
    std::atomic<uint32_t>* word;
    uint32_t seq;
    bool ready;  // a try may succeed, or raise, already
};

template <class M> Entered enter(M& m, const Place& place, bool again) {
    Locked<M> locked(m);
    Gate& gate = Traits<M>::gate(m, place.side);
    uint32_t seq = gate.enter(again);
    gate.ends_by_itself(+1);
    Traits<M>::at_gate(m, place.session, place.side, +1);
    const bool ready = place.side == Side::Reader ? Traits<M>::readable(m) : Traits<M>::writable(m, place.ch->capacity);
    locked.unlock({});
    return {&gate.seq, seq, ready};
}

// `seen`: pass on, too, if the gate's word is no longer this one.
template <class M> void leave(M& m, const Place& place, bool pass_on, bool look, const uint64_t* seen = nullptr) {
    Wakes wakes;
    Locked<M> locked(m);
    Gate& gate = Traits<M>::gate(m, place.side);
    const bool counted = Traits<M>::at_gate(m, place.session, place.side, -1);
    keep_order();
    if (counted) gate.leave();
    gate.ends_by_itself(counted ? -1 : 0);
    if (look) Traits<M>::look_for_dead(m, wakes);
    if (seen && gate.seq.load(std::memory_order_relaxed) != uint32_t(*seen)) pass_on = true;
    if (pass_on) (place.side == Side::Reader ? wakes.readers : wakes.writers) += gate.call(1);
    locked.unlock(wakes);
}

// All the gates of one wait; leaves them at its end.
class Gates {
public:
    Gates(std::vector<Place> places, bool again) : places_(std::move(places)) {
        for (const Place& p : places_) {
            Entered entered = p.ch->queue ? enter(*p.ch->queue, p, again) : enter(*p.ch->ring, p, again);
            uint32_t flags = FUTEX_WORD_32 | (p.ch->queue ? FUTEX_PRIVATE_FLAG : 0);
            words_.push_back({entered.seq, reinterpret_cast<uint64_t>(entered.word), flags, 0});
            ready_.push_back(entered.ready);
        }
    }
    // `used`: the place whose operation was done, which needs no passing on.
    void leave_all(size_t used, bool look) {
        for (size_t i = 0; i < places_.size(); ++i) {
            const Place& p = places_[i];
            if (p.ch->queue) leave(*p.ch->queue, p, i != used, look);
            else leave(*p.ch->ring, p, i != used, look);
        }
    }
    // Without the GIL: until a word changes or `ns` are over. True when the time ran out.
    bool sleep(int64_t ns) {
        PyThreadState* state = PyEval_SaveThread();
        const bool late = sleep_until(now_ns() + ns);
        take_gil(state);
        return late;
    }
    const uint64_t* seen(size_t i) const { return reinterpret_cast<const uint64_t*>(&words_[i].val); }
    // Those that were ready when they were entered, or whose words have changed since.
    std::vector<size_t> changed() const {
        std::vector<size_t> found;
        for (size_t i = 0; i < words_.size(); ++i) {
            if (ready_[i] || is_changed(words_[i])) found.push_back(i);
        }
        return found;
    }

private:
    bool sleep_until(int64_t at) {
        if (waitv_refused.load(std::memory_order_relaxed)) return sleep_by_turns(at);
        timespec until{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
        const int error = wait_for_any(words_.data(), words_.size(), until);
        if (error == 0 || error == EAGAIN || error == EINTR || error == ETIMEDOUT) return error == ETIMEDOUT;
        if (error != ENOMEM) waitv_refused.store(true, std::memory_order_relaxed);
        return sleep_by_turns(at);
    }
    // Without futex_waitv: asleep on one of the words, looking at the others now and then, ever less often. A single word
    // needs no looking. Costs at most 4 ms of delay, and 250 looks a second.
    bool sleep_by_turns(int64_t at) {
        for (int64_t nap = 125'000;; nap = std::min<int64_t>(2 * nap, 4'000'000)) {
            if (std::any_of(words_.begin(), words_.end(), [](const WaitedWord& w) { return is_changed(w); })) return false;
            const int64_t left = at - now_ns();
            if (left <= 0) return true;
            const int64_t ns = words_.size() == 1 ? left : std::min(nap, left);
            if (futex_wait(word(words_[0]), uint32_t(words_[0].val), ns, !places_[0].ch->queue) == EINTR) return false;
        }
    }
    static std::atomic<uint32_t>& word(const WaitedWord& w) { return *reinterpret_cast<std::atomic<uint32_t>*>(w.uaddr); }
    static bool is_changed(const WaitedWord& w) { return word(w).load(std::memory_order_relaxed) != uint32_t(w.val); }

    std::vector<Place> places_;
    std::vector<WaitedWord> words_;
    std::vector<bool> ready_;
};

struct Operation {
    Place place;
    In* in;
    Out* out;
    PyObject* item;  // of a put, borrowed
};

// A channel or a port, as the caller named it.
Operation parse(nb::handle target, Side side, PyObject* item) {
    Operation op{{nullptr, side, 0}, nullptr, nullptr, item};
    if (nb::isinstance<Channel>(target)) {
        op.place.ch = nb::inst_ptr<Channel>(target);
    } else if (side == Side::Reader && nb::isinstance<In>(target)) {
        op.in = nb::inst_ptr<In>(target);
        if (!ready(*op.in)) throw nb::python_error();
        op.place.ch = op.in->ch;
        op.place.session = op.in->state.session;
    } else if (side == Side::Writer && nb::isinstance<Out>(target)) {
        op.out = nb::inst_ptr<Out>(target);
        if (!ready(*op.out)) throw nb::python_error();
        op.place.ch = op.out->ch;
        op.place.session = op.out->state.session;
    } else {
        PyErr_Format(PyExc_TypeError, side == Side::Reader ? "select gets from channels and In ports, not from %R"
                                                           : "select puts into channels and Out ports, not into %R",
                     target.ptr());
        throw nb::python_error();
    }
    if (!op.place.ch->usable()) throw nb::python_error();
    if (op.place.ch->ring && !op.place.session) op.place.session = op.place.ch->plain_session();
    return op;
}

bool closed_port(nb::handle target) {
    if (nb::isinstance<In>(target)) return !nb::inst_ptr<In>(target)->open;
    return nb::isinstance<Out>(target) && !nb::inst_ptr<Out>(target)->open;
}

}  // namespace

// Tries each operation once, beginning at a random one, and answers (index, item) of the one that was done; index -1
// when all must wait, -2 when nothing is left that could ever be done. Raises what the operation raises.
static nb::object try_each(const std::vector<Operation>& ops) {
    static thread_local std::minstd_rand random{std::random_device{}()};
    size_t first = random() % ops.size(), drained = 0;
    for (size_t k = 0; k < ops.size(); ++k) {
        size_t i = (first + k) % ops.size();
        const Operation& op = ops[i];
        PyObject* item = nullptr;
        Step step = op.place.side == Side::Reader ? try_get(*op.place.ch, op.in, item)
                                                  : try_put(*op.place.ch, op.out, op.item);
        if (step == Step::Done) return nb::make_tuple(i, item ? nb::steal(item) : nb::none());
        if (step == Step::NotNow) continue;
        if (step == Step::Drained) {
            drained += 1;
            continue;
        }
        throw nb::python_error();
    }
    return nb::make_tuple(drained == ops.size() ? -2 : -1, nb::none());
}

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    std::vector<Operation> ops;
    for (nb::handle get : gets) ops.push_back(parse(get, Side::Reader, nullptr));
    for (nb::handle put : puts) ops.push_back(parse(put[0], Side::Writer, nb::borrow(put[1]).ptr()));
    if (ops.empty() || ops.size() > MOST) {
        PyErr_Format(PyExc_ValueError, "select takes 1 to %zu operations, not %zu", MOST, ops.size());
        throw nb::python_error();
    }
    nb::object done = try_each(ops);
    bool again = false;
    while (nb::cast<int64_t>(done[0]) == -1 && !deadline.now_only()) {
        std::vector<Place> places;
        for (const Operation& op : ops) places.push_back(op.place);
        Gates gates(std::move(places), again);
        again = true;
        bool over = false, late = false;
        try {
            done = try_each(ops);
            if (nb::cast<int64_t>(done[0]) == -1) {
                if (PyErr_CheckSignals()) throw nb::python_error();
                late = deadline.passed();
                if (!late) over = gates.sleep(deadline.slice());
            }
        } catch (...) {
            gates.leave_all(SIZE_MAX, false);
            throw;
        }
        int64_t used = nb::cast<int64_t>(done[0]);
        gates.leave_all(used < 0 ? SIZE_MAX : size_t(used), over);
        if (late) break;
        if (used == -1) done = try_each(ops);
    }
    return done;
}

// Sleeps until one of the (channel or port, is it a read) changes, or about `seconds` are over; answers the indices of
// those that changed; a port that was closed meanwhile has. The waiter that runs the async calls of an event loop does
// nothing else.
nb::list wait_any(nb::list targets, double seconds) {
    std::vector<Place> places;
    std::vector<size_t> numbers;
    nb::list found;
    for (size_t i = 0; i < targets.size(); ++i) {
        nb::handle target = targets[i][0];
        if (closed_port(target)) {
            found.append(i);
            continue;
        }
        places.push_back(parse(target, nb::cast<bool>(targets[i][1]) ? Side::Reader : Side::Writer, nullptr).place);
        numbers.push_back(i);
    }
    Gates gates(places, true);
    bool over = found.size() == 0 && gates.changed().empty() && gates.sleep(int64_t(seconds * 1e9));
    std::vector<size_t> changed = gates.changed();
    for (size_t i : changed) found.append(numbers[i]);
    for (size_t i = 0; i < places.size(); ++i) {
        // Those that changed are told to their callers, who try at once, or pass the wake-up on.
        bool told = std::find(changed.begin(), changed.end(), i) != changed.end();
        const Place& p = places[i];
        const uint64_t* seen = told ? nullptr : gates.seen(i);
        if (p.ch->queue) leave(*p.ch->queue, p, !told && over, over, seen);
        else leave(*p.ch->ring, p, !told && over, over, seen);
    }
    return found;
}

// A caller that was told and will not try: somebody else may.
void pass_on(nb::handle target, bool reading) {
    if (closed_port(target)) return;
    Place p = parse(target, reading ? Side::Reader : Side::Writer, nullptr).place;
    Wakes wakes;
    auto call = [&](auto& m) {
        using M = std::remove_reference_t<decltype(m)>;
        Locked<M> locked(m);
        (reading ? wakes.readers : wakes.writers) += Traits<M>::gate(m, p.side).call(1);
        locked.unlock(wakes);
    };
    if (p.ch->queue) call(*p.ch->queue);
    else call(*p.ch->ring);
}

}  // namespace flowchan
