// Waiting at several gates at once: what select is made of.
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

std::atomic<uint32_t>& word(const WaitedWord& w) { return *reinterpret_cast<std::atomic<uint32_t>*>(w.uaddr); }
bool is_changed(const WaitedWord& w) { return word(w).load(std::memory_order_relaxed) != uint32_t(w.val); }

// Without futex_waitv: asleep on one of the words, looking at the others now and then, ever less often. A single word
// needs no looking. Costs at most 4 ms of delay, and 250 looks a second.
bool sleep_by_turns(const std::vector<WaitedWord>& words, int64_t at) {
    for (int64_t nap = 125'000;; nap = std::min<int64_t>(2 * nap, 4'000'000)) {
        if (std::any_of(words.begin(), words.end(), is_changed)) return false;
        const int64_t left = at - now_ns();
        if (left <= 0) return true;
        const int64_t ns = words.size() == 1 ? left : std::min(nap, left);
        const bool shared = !(words[0].flags & FUTEX_PRIVATE_FLAG);
        if (futex_wait(word(words[0]), uint32_t(words[0].val), ns, shared) == EINTR) return false;
    }
}

struct Place {
    Channel* ch;
    Side side;
    uint32_t session;
};

struct Entered {
    std::atomic<uint32_t>* word;
    uint32_t seq;
};

template <class M> Entered enter(M& m, const Place& place, bool again) {
    Locked<M> locked(m);
    Gate& gate = Traits<M>::gate(m, place.side);
    uint32_t seq = gate.enter(again);
    gate.ends_by_itself(+1);
    Traits<M>::at_gate(m, place.session, place.side, +1);
    locked.unlock({});
    return {&gate.seq, seq};
}

template <class M> void leave(M& m, const Place& place, bool pass_on) {
    Wakes wakes;
    Locked<M> locked(m);
    Gate& gate = Traits<M>::gate(m, place.side);
    const bool counted = Traits<M>::at_gate(m, place.session, place.side, -1);
    keep_order();
    if (counted) gate.leave();
    gate.ends_by_itself(counted ? -1 : 0);
    Traits<M>::look_for_dead(m, wakes);
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
        }
    }
    // `used`: the place whose operation was done, which needs no passing on.
    void leave_all(size_t used) {
        for (size_t i = 0; i < places_.size(); ++i) {
            const Place& p = places_[i];
            if (p.ch->queue) leave(*p.ch->queue, p, i != used);
            else leave(*p.ch->ring, p, i != used);
        }
    }
    // Until a word changes or `ns` are over. True when the time ran out.
    bool sleep(int64_t ns) {
        WithoutGil without;
        return sleep_on_any(words_, now_ns() + ns);
    }

private:
    std::vector<Place> places_;
    std::vector<WaitedWord> words_;
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

}  // namespace

bool sleep_on_any(std::vector<WaitedWord>& words, int64_t at) {
    if (waitv_refused.load(std::memory_order_relaxed)) return sleep_by_turns(words, at);
    timespec until{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    const int error = wait_for_any(words.data(), words.size(), until);
    if (error == 0 || error == EAGAIN || error == EINTR || error == ETIMEDOUT) return error == ETIMEDOUT;
    if (error != ENOMEM) waitv_refused.store(true, std::memory_order_relaxed);
    return sleep_by_turns(words, at);
}

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
        bool late = false;
        try {
            done = try_each(ops);
            if (nb::cast<int64_t>(done[0]) == -1) {
                if (PyErr_CheckSignals()) throw nb::python_error();
                late = deadline.passed();
                if (!late) gates.sleep(deadline.slice());
            }
        } catch (...) {
            gates.leave_all(SIZE_MAX);
            throw;
        }
        int64_t used = nb::cast<int64_t>(done[0]);
        gates.leave_all(used < 0 ? SIZE_MAX : size_t(used));
        if (late) break;
        if (used == -1) done = try_each(ops);
    }
    return done;
}

}  // namespace flowchan
