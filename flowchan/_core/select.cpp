// Select: waits in several wait queues at once.
//
// Algorithm. Enter all wait queues, try the operations, and sleep on the words of all queues (sleeping.hpp).
// If an operation becomes possible after it was tried, a word changes, because the caller was already in the
// queue. A caller that leaves a queue without performing the operation there passes on any wake-up that it
// has received.
#include "channel.hpp"
#include "raising.hpp"

#include <unistd.h>
#include <algorithm>
#include <deque>
#include <numeric>
#include <random>

namespace flowchan {

namespace {

constexpr size_t MOST = 128;  // FUTEX_WAITV_MAX
constexpr int64_t ASKED_AGAIN_NS = 5'000'000;
constexpr size_t MOST_RECALLS = 8;
// limits the rounds of `try_now`, because other processes may keep moving items
constexpr size_t MOST_ROUNDS = 100;

// The queue entries of one wait. The wait leaves all of them when it ends.
class WaitQueues {
  public:
    WaitQueues(std::deque<Place>& places, bool again) : places_(places) {
        for (Place& p : places_) {
            p.enter(again);
            words_.push_back(p.waited());
        }
    }
    // `used`: index of the entry whose operation succeeded; its wake-up is not passed on.
    void leave_all(size_t used) {
        for (size_t i = 0; i < places_.size(); ++i) places_[i].leave(i != used);
    }
    // Sleep until a word changes, or for `ns`. Return true if the time ran out.
    bool sleep(int64_t ns) {
        WithoutGil without;
        return sleep_on_any(words_, now_ns() + ns);
    }

  private:
    std::deque<Place>& places_;
    std::vector<WaitedWord> words_;
};

struct Operation {
    Channel* ch;  // a remote channel's ring in this process
    Side side;
    uint32_t session;
    In* in;
    Out* out;
    PyObject* item;                  // the item of a put (borrowed)
    nb::handle target;               // the channel or the port
    bool checks_only = false;        // takes no item, but succeeds if a get would not wait
    Channel* owner_asked = nullptr;  // remote channel whose owner can be asked, or null

    Caller caller() const {
        Caller caller = side == Side::Writer ? writing(*ch, out, 0, false) : Caller{Side::Reader, in};
        caller.session = session;
        if (in) caller.clock = &in->state.clock;
        return caller;
    }
};

// Return the operation for a channel or port that the caller passed.
Operation parse(nb::handle target, Side side, PyObject* item) {
    Operation op{nullptr, side, 0, nullptr, nullptr, item, target};
    if (nb::isinstance<Channel>(target)) {
        Channel* whole = nb::inst_ptr<Channel>(target);
        op.ch = &whole->through(side);
        op.owner_asked = whole->elsewhere ? whole : nullptr;
    } else if (side == Side::Reader && nb::isinstance<In>(target)) {
        op.in = nb::inst_ptr<In>(target);
        if (!ready(*op.in)) throw nb::python_error();
        op.ch = op.in->ch;
        op.session = op.in->state.session;
    } else if (side == Side::Writer && nb::isinstance<Out>(target)) {
        op.out = nb::inst_ptr<Out>(target);
        if (!ready(*op.out)) throw nb::python_error();
        op.ch = op.out->ch;
        op.session = op.out->state.session;
    } else {
        PyErr_Format(PyExc_TypeError,
                     side == Side::Reader ? "select: gets must be channels or In ports, got %R"
                                          : "select: puts must go to channels or Out ports, got %R",
                     target.ptr());
        throw nb::python_error();
    }
    if (!op.ch->usable()) throw nb::python_error();
    if (!op.session) op.session = op.ch->plain_session();
    return op;
}

// Return Done if a get would not wait, because the channel has an item or is drained.
Step check_ready(Channel& ch) {
    ch.with([](auto& transport) { check_for_dead(transport); });
    const Step step = locked(ch, [](auto& transport, Wakes&) {
        if (transport.broken()) return Step::Broken;
        return transport.counts().inside || transport.drained() ? Step::Done : Step::NotNow;
    });
    if (step == Step::Broken) raise_step(ch, step, Side::Reader, 0, Deadline{0});
    return step;
}

Step try_once(const Operation& op, PyObject*& item) {
    if (op.checks_only) return check_ready(*op.ch);
    std::optional<nb::ft_object_guard> guard;  // see channel.hpp
    if (op.in || op.out) guard.emplace(op.target);
    return op.side == Side::Reader ? try_get(*op.ch, op.in, item) : try_put(*op.ch, op.out, op.item);
}

}  // namespace

// Try each operation once, in random order. Return (index, item) for the first operation that succeeds. The
// index is -1 if all operations would wait, and -2 if all channels are drained. An operation that fails
// raises its error.
static nb::object try_each(const std::vector<Operation>& ops) {
    static thread_local std::minstd_rand random{std::random_device{}()};
    std::vector<size_t> order(ops.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::shuffle(order.begin(), order.end(), random);
    size_t drained = 0;
    for (size_t i : order) {
        const Operation& op = ops[i];
        PyObject* item = nullptr;
        const Step step = try_once(op, item);
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

// Return how many items each channel has moved in and out. While these counts stay the same, no operation
// becomes possible.
static std::vector<uint64_t> moves(const std::vector<Operation>& ops) {
    std::vector<uint64_t> found;
    for (const Operation& op : ops) {
        const Counts now = locked(*op.ch, [](auto& transport, Wakes&) { return transport.counts(); });
        found.insert(found.end(), {now.items_in, now.items_out});
    }
    return found;
}

namespace {

bool is_ready(const Operation& op) {
    return op.ch->with(Each{[&](LocalQueue& queue) {
                                Locked locked(queue);
                                const bool is = queue.could_continue(op.caller());
                                locked.unlock({});
                                return is;
                            },
                            [&](Ring& ring) { return Traits<Ring>::ready(ring, op.side); }});
}

// Ask the owners of the remote channels whose operations would wait. Return whether any of these operations
// may be possible now, after a new item, the end of the channel, or new room. `moved` receives each owner's
// count of puts and gets.
bool ask_owners(const std::vector<Operation>& ops, std::vector<uint64_t>* moved = nullptr) {
    bool any = false;
    for (const Operation& op : ops) {
        if (!op.owner_asked || is_ready(op)) continue;
        const bool can = op.owner_asked->asks_again(op.side);
        if (moved) moved->push_back(op.owner_asked->moved_there);
        if (!can) continue;
        any = true;
        const Deadline soon{now_ns() + ON_ITS_WAY_NS};
        const std::vector<uint64_t> before = moves({op});
        while (!is_ready(op) && moves({op}) == before && !soon.passed()) {
            WithoutGil without;
            usleep(50);
        }
    }
    return any;
}

// Before choosing among the operations that are possible in this process, ask the owners. Otherwise, remote
// channels would be chosen less often than local channels. An owner that could not help is not asked again
// for ASKED_AGAIN_NS.
void ask_other_owners(const std::vector<Operation>& ops) {
    const auto is_waiting_remote = [](const Operation& op) { return op.owner_asked && !is_ready(op); };
    if (std::none_of(ops.begin(), ops.end(), is_waiting_remote)) return;
    if (std::none_of(ops.begin(), ops.end(), is_ready)) return;
    std::vector<Operation> due, possible;
    for (const Operation& op : ops) {
        if (op.owner_asked && is_ready(op)) possible.push_back(op);
        if (is_waiting_remote(op) && now_ns() - op.owner_asked->last_found_nothing > ASKED_AGAIN_NS)
            due.push_back(op);
    }
    for (const Operation& op : due) {
        if (is_ready(op) || ask_owners({op}) ||
            is_ready(op))  // the item may have arrived while another owner was asked
            possible.push_back(op);
        else
            op.owner_asked->last_found_nothing = now_ns();
    }
    // An owner recalls a prefetched item after a few milliseconds, perhaps while another owner is being
    // asked.
    for (size_t round = 0; round < MOST_RECALLS && !std::ranges::all_of(possible, is_ready); ++round)
        std::erase_if(possible, [](const Operation& op) { return !is_ready(op) && !ask_owners({op}); });
}

}  // namespace

// Try all operations as if at one moment, so that an item moving from one channel to another is not missed.
// If nothing moved between the first try and the last, there was a moment at which every operation would have
// had to wait. This is a double collect. The owners count the moves of remote channels. Each round needs a
// slow round trip to the owners, so the number of rounds is limited.
static nb::object try_now(const std::vector<Operation>& ops) {
    std::vector<uint64_t> there_before;
    for (size_t round = 1;; ++round) {
        const std::vector<uint64_t> before = moves(ops);
        nb::object done = try_each(ops);
        if (nb::cast<int64_t>(done[0]) != -1) return done;
        std::vector<uint64_t> there;
        const bool any = ask_owners(ops, &there);
        const bool same = there == there_before || (there.size() == 1 && ops.size() == 1);
        there_before = std::move(there);
        if (!any && moves(ops) == before && (same || there_before.empty())) return done;
        if (round >= MOST_ROUNDS && !there_before.empty()) return done;
        if (PyErr_CheckSignals()) throw nb::python_error();
    }
}

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout, nb::list ready) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    std::vector<Operation> ops;
    for (nb::handle get : gets) ops.push_back(parse(get, Side::Reader, nullptr));
    for (nb::handle put : puts) ops.push_back(parse(put[0], Side::Writer, nb::borrow(put[1]).ptr()));
    for (nb::handle channel : ready) {
        ops.push_back(parse(channel, Side::Reader, nullptr));
        ops.back().checks_only = true;
    }
    if (ops.empty() || ops.size() > MOST) {
        PyErr_Format(PyExc_ValueError,
                     "select: gets, puts and ready must contain 1 to %zu operations, got %zu", MOST,
                     ops.size());
        throw nb::python_error();
    }
    ask_other_owners(ops);
    nb::object done = deadline.now_only() ? try_now(ops) : try_each(ops);
    bool again = false;
    while (nb::cast<int64_t>(done[0]) == -1 && !deadline.now_only()) {
        std::deque<Place> places;
        for (const Operation& op : ops) places.emplace_back(op.ch, op.caller());
        WaitQueues wait_queues(places, again);
        again = true;
        bool late = false;
        try {
            done = try_each(ops);
            if (nb::cast<int64_t>(done[0]) == -1) {
                if (PyErr_CheckSignals()) throw nb::python_error();
                late = deadline.passed();
                if (!late) wait_queues.sleep(deadline.slice());
            }
        } catch (...) {
            wait_queues.leave_all(SIZE_MAX);
            throw;
        }
        int64_t used = nb::cast<int64_t>(done[0]);
        wait_queues.leave_all(used < 0 || ops[size_t(used)].checks_only ? SIZE_MAX : size_t(used));
        if (late) return ask_owners(ops) ? try_each(ops) : done;
        if (used == -1) done = try_each(ops);
    }
    return done;
}

}  // namespace flowchan
