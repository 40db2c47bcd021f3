// The native steps of two operators' loops.
//
// `map` in a worker process takes an item, calls the function, and puts the result. The worker takes the
// first item as any reader does, and may wait for it. If more items are waiting, it leases a run of them
// (ring_runs.cpp). It puts each output before it starts the next item, so an output never waits for the items
// behind it. Three events end the run early: an error, an item that cannot be unpickled, and an item that has
// already killed workers. The worker then holds only the current item, as if it had taken each item alone,
// and Python code handles the case. If the function is slow, runs save nothing, so the worker takes each item
// alone.
//
// `collect` naps between two gets (Ring::begin_nap), because its list is complete only at the end. One
// wake-up can then serve many items.
#include "channel.hpp"
#include "raising.hpp"

namespace flowchan {

namespace {

// A call returns to the interpreter after this many items, because other threads may need it.
constexpr uint64_t MOST_ITEMS = 64;
// A worker leases runs only while the average time per item is below this limit, which is many times the
// cost of a get.
constexpr int64_t FAST_NS = 20'000;
constexpr int64_t LONGEST_NAP_NS = 1'000'000;

// Return the current error as the result of the loop: a tuple of the item, the error, and whether the
// function had returned. If the error does not belong to the item, raise it.
nb::object stop(nb::handle item, bool returned) {
    if (returned && !PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
    nb::object error = take_error();
    return nb::make_tuple(item, error, returned);
}

// Process one item. Return an invalid object, or the loop's result if the loop must stop.
nb::object process(nb::handle port, PyObject* function, nb::object item) {
    nb::object result = nb::steal(PyObject_CallOneArg(function, item.ptr()));
    if (!result.is_valid()) return stop(item, false);
    nb::ft_object_guard guard(port);
    Out& out = *nb::inst_ptr<Out>(port);
    if (!ready(out)) return stop(item, true);
    nb::object none = nb::steal(put_item(*out.ch, &out, result.ptr(), Deadline{}));
    return none.is_valid() ? nb::object() : stop(item, true);
}

// A run of items that the worker has on lease. If it ends early, the items that were not started go back.
class WorkerRun {
  public:
    WorkerRun(Ring& ring, In& in) : ring_(ring), in_(in) {}
    ~WorkerRun() {
        if (started_ < n_) cut(true);
    }
    WorkerRun(const WorkerRun&) = delete;

    // Finish all earlier items, and lease a run. Return false if no run can begin.
    bool begin() {
        if (in_.turn.enter(Deadline{0}) != Step::Done) return false;
        Ring::InRun run[Redo::MOST];
        Wakes wakes;
        Locked<Ring> locked(ring_);
        if (in_.open) ring_.acknowledge(in_.state, wakes);
        if (in_.open) n_ = ring_.begin_run(in_.state, run, wakes);
        for (uint64_t i = 0; i < n_; ++i) {
            const Slot* slot = run[i].slot;
            items_[i] = {ring_.payload_of(run[i].slot), slot->kind, slot->size, slot->deaths()};
        }
        locked.unlock(wakes);
        first_ = in_.state.number;
        in_.turn.leave();
        in_.call_due();
        return n_ > 0;
    }
    bool has_next() const { return started_ < n_; }
    // Start the next item. Return whether the run still has this item.
    bool start() {
        if (started_ && !ring_.start_in_run(in_.state.session, started_ + 1) && !still_has_next())
            return false;
        if (started_) in_.call_due();  // if this worker dies now, no other worker gets the previous item
        in_.state.number = first_ + started_++;
        return true;
    }
    // Return the item that was started, or an invalid object if it must be taken alone.
    nb::object item() {
        const Item& one = items_[started_ - 1];
        if (!ready(in_)) throw nb::python_error();
        if (in_.max_deaths && one.deaths >= in_.max_deaths) return nb::object();
        Receiving receiving;
        runs(&in_, Session::UNPICKLING);
        in_.copying = true;
        nb::object item = nb::steal(decode(one.kind, one.at, one.size));
        in_.copying = false;
        runs(&in_, item.is_valid() ? Session::USERS : Session::OURS);
        if (!item.is_valid()) return item;
        receiving.received(&in_);
        return is_traced(item.ptr()) ? nb::steal(unboxed(&in_, item.release().ptr())) : item;
    }
    // End the run early; see Ring::cut_run.
    void cut(bool keeps_current) {
        n_ = started_ = 0;
        if (in_.forks != fork_count) return;  // a forked child does not have the items
        Wakes wakes;
        Locked<Ring> locked(ring_);
        if (in_.open) ring_.cut_run(in_.state, keeps_current, wakes);
        locked.unlock(wakes);
    }

  private:
    bool still_has_next() {
        Wakes wakes;
        Locked<Ring> locked(ring_);
        const bool may = in_.open && ring_.may_start(in_.state);
        locked.unlock(wakes);
        n_ = may ? in_.state.leases : started_;
        return may;
    }

    struct Item {
        const char* at;
        uint64_t kind, size, deaths;
    };
    Ring& ring_;
    In& in_;
    Item items_[Redo::MOST];
    uint64_t n_ = 0, started_ = 0, first_ = 0;
};

// End the turns of the finished item's outputs. Throw if a signal handler raises an error during a wait.
void end_item(In& in) {
    if (in.holds_traced) finish_traced(in);
    if (!pass_turns(in)) throw nb::python_error();
    runs(&in, Session::OURS);
}

// Process the items that are there now. Return an invalid object, or the loop's result if the loop must stop.
nb::object process_more(Ring& ring, In& in, nb::handle out, PyObject* function, int64_t began) {
    uint64_t before = 0;
    for (uint64_t done = 1; done < MOST_ITEMS;) {
        const int64_t now = now_ns();
        if (now - began > int64_t(done - before) * FAST_NS) return {};
        began = now, before = done;
        WorkerRun run(ring, in);
        end_item(in);
        if (!run.begin()) return {};
        for (uint64_t first = done; run.has_next(); ++done) {
            if (done > first) end_item(in);
            if (!run.start()) break;
            nb::object item = run.item();
            if (!item.is_valid()) {
                const bool raises = PyErr_Occurred() && is_interrupt();
                nb::object error = raises ? take_error() : nb::object();
                PyErr_Clear();
                run.cut(false);
                if (!raises) return {};
                raise_again(error);
                throw nb::python_error();
            }
            nb::object stopped = process(out, function, std::move(item));
            if (stopped.is_valid()) {
                run.cut(true);
                return stopped;
            }
        }
    }
    return {};
}

nb::object process_more(LocalQueue&, In&, nb::handle, PyObject*, int64_t) { return {}; }

void nap(LocalQueue&, In&) {}

void nap(Ring& ring, In& in) {
    Wakes wakes;
    Locked<Ring> locked(ring);
    if (in.open) ring.acknowledge(in.state, wakes);
    const bool naps = in.open && ring.begin_nap();
    locked.unlock(wakes);
    in.call_due();
    if (!naps) return;
    const int64_t began = now_ns();
    {
        WithoutGil without;
        futex_wait(ring.header().nap, 1, LONGEST_NAP_NS, true);
        ring.header().nap.store(0, std::memory_order_relaxed);
    }
    Locked<Ring> again(ring);
    if (in.open) ring.count_nap(in.state.session, now_ns() - began);
    again.unlock({});
}

}  // namespace

// Take items, and put the function's result for each. Wait only for the first item. Return True, or False if
// the channel is drained. If Python code must handle an item, return a tuple; see `stop`.
nb::object map_items(In& in, nb::handle out, nb::handle function) {
    if (!nb::isinstance<Out>(out)) throw nb::type_error("_map: out must be a port that writes");
    if (!ready(in)) throw nb::python_error();
    nb::object item = nb::steal(get_item(*in.ch, &in, Deadline{}, false, true));
    if (!item.is_valid() && PyErr_Occurred()) throw nb::python_error();
    if (!item.is_valid()) return nb::bool_(false);
    const int64_t began = now_ns();
    nb::object stopped = process(out, function.ptr(), std::move(item));
    if (!stopped.is_valid())
        stopped = in.ch->with(
            [&](auto& transport) { return process_more(transport, in, out, function.ptr(), began); });
    return stopped.is_valid() ? stopped : nb::bool_(true);
}

// Finish the leased items, and let more items arrive before the next get.
void nap(In& in) {
    if (!ready(in)) throw nb::python_error();
    if (in.holds_traced) finish_traced(in);
    if (!pass_turns(in)) throw nb::python_error();
    in.ch->with([&](auto& transport) { nap(transport, in); });
}

}  // namespace flowchan
