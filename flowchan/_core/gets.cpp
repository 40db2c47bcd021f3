// Gets, from the transport up to the Python object.
#include "channel.hpp"
#include "raising.hpp"

namespace flowchan {

namespace {

PyObject* py_unreadable = nullptr;
PyObject* py_is_of_a_handler = nullptr;

// Return the stand-in for an item that cannot be unpickled, as a new reference, or null with a Python error
// set.
PyObject* unreadable(uint64_t kind, const char* at, uint64_t size) {
    const uint64_t pin = needs_its_slot(kind) ? PIN : 0;
    // The pickle is the whole payload, unless a buffer table says otherwise.
    uint64_t from = 0, length = size;
    if ((kind == BUFFERS || pin) && size >= pin + 24) {
        memcpy(&from, at + pin + 8, 8);
        memcpy(&length, at + pin + 16, 8);
        from += pin;
        if (from > size || length > size - from) from = 0, length = size;
    }
    nb::object data = nb::steal(PyBytes_FromStringAndSize(at + from, Py_ssize_t(length)));
    return data.is_valid() ? PyObject_CallOneArg(py_unreadable, data.ptr()) : nullptr;
}

// Return whether a signal handler raised this error. If so, the item is not to blame.
bool is_of_a_handler(PyObject* error) {
    PyObject* is = PyObject_CallOneArg(py_is_of_a_handler, error);
    const bool answer = !is || is == Py_True;  // null: a signal handler has just raised an error in this call
    Py_XDECREF(is);
    PyErr_Clear();
    return answer;
}

// How a get treats the items already on lease. Next: finish them. More: keep them. Rest: keep them. If
// an item cannot be received, leave it for the next call, which then raises the error.
enum class Taking { Next, More, Rest };

// Pass an unusable item to the handler instead of the caller. This function takes ownership of the
// references. `error` is the reason, or null if the item has killed several workers. Return Wait if the get
// must continue with the next item.
Step give_up(In& in, PyObject* item, uint64_t deaths, PyObject* error) {
    PyObject* done =
        item ? PyObject_CallFunction(in.on_poison.ptr(), "OKO", item, static_cast<unsigned long long>(deaths),
                                     error ? error : Py_None)
             : nullptr;
    Py_XDECREF(item);
    Py_XDECREF(error);
    if (!done) return Step::Interrupted;
    Py_DECREF(done);
    return Step::Wait;
}

}  // namespace

// Any signal handler may have raised the error, not just the handler for Ctrl-C. The error interrupts only
// this call.
bool is_interrupt() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
    nb::object error = take_error();
    const bool is = is_of_a_handler(error.ptr());
    raise_again(error);
    return is;
}

namespace {

// Return whether the current error means that this process lacks memory or descriptors. If so, the item is
// not to blame.
bool is_shortage() {
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) return true;
    if (!PyErr_ExceptionMatches(PyExc_OSError)) return false;
    nb::object error = take_error();
    nb::object number = nb::getattr(error, "errno", nb::none());
    const long code = PyLong_Check(number.ptr()) ? PyLong_AsLong(number.ptr()) : 0;
    raise_again(error);
    return code == EMFILE || code == ENFILE || code == ENOMEM;
}

// Handle an item that could not be unpickled. The Python error is set.
Step not_received(Ring& ring, In* in, Taking taking, Taken& taken) {
    const bool ordinary = !is_interrupt();
    const bool leave = !ordinary || taking == Taking::Rest || is_shortage();
    const bool handled = !leave && in && in->on_poison.is_valid() && !in->on_poison.is_none();
    nb::object error = leave || handled ? take_error() : nb::object();
    nb::object item = handled ? nb::steal(unreadable(taken.kind, taken.at, taken.size)) : nb::object();
    Wakes wakes;
    Locked locked(ring);
    if (leave && (!in || in->open)) ring.put_back(taken, in ? &in->state : nullptr, wakes);
    if (taken.held) ring.release(taken.held, wakes);
    if (!in) ring.end_decoding(taken.number, wakes);
    locked.unlock(wakes);
    if (handled) return give_up(*in, item.release().ptr(), taken.deaths, error.release().ptr());
    if (taking == Taking::Rest && ordinary) return Step::NotNow;
    if (leave) raise_again(error);
    return Step::Interrupted;
}

// Return an item's descriptors in the form that `loads` needs: a list, and the errno if some are missing.
// Return null with an error set.
nb::object opened_bundle(Ring& ring, const Taken& taken) {
    const uint64_t id = bundle_of(taken.kind, taken.at, taken.size);
    if (!id) return nb::none();
    std::vector<int> descriptors;
    Locked<Ring> locked(ring);
    const int error = ring.open_bundle(id, descriptors);
    locked.unlock({});
    nb::list list;
    for (int fd : descriptors) list.append(fd);
    return nb::make_tuple(list, error);
}

// Take the next item without decoding it.
[[gnu::always_inline]] inline Step take_encoded(Ring& ring, Channel& ch, In* in, Deadline deadline,
                                                Taking taking, Taken& taken) {
    ReaderState* reader = in ? &in->state : nullptr;
    const uint32_t session = reader ? reader->session : ch.plain_session();
    bool finished = false;
    // Whether this get may recall items from another reader's run. A call that may wait first tries without
    // recalling, because a new item usually arrives sooner.
    bool recalls = deadline.now_only();
    if (reader && !reader->once) runs(in, Session::OURS);
    const Step step = perform(
        ring,
        [&](bool) {
            return Caller{
                .side = Side::Reader, .port = in, .session = session, .exchangeable = reader && reader->lazy};
        },
        [&](Wakes& wakes) {
            if (in && !in->open) return ring.header().state == BROKEN ? Step::Broken : Step::PortClosed;
            if (reader && taking == Taking::Next) {
                finished = true;
                ring.acknowledge(*reader, wakes);
                ring.session(session).at = Session::OURS;
            }
            const Step tried = ring.try_take(taken, reader, session, wakes, std::exchange(recalls, true));
            if (tried != Step::Done) return tried;
            if (in) in->copying = true;
            if (!in) ring.begin_decoding(taken.number);
            return tried;
        },
        deadline);
    if (finished) in->call_due();
    if (step != Step::Done && in && in->state.leases) runs(in, Session::USERS);
    return step;
}

// Finish a decoded item by freeing its memory, unless it was copied. Its descriptors are already open.
void finish_decoded(Ring& ring, In* in, const Taken& taken, bool with_bundle) {
    Wakes wakes;
    Locked<Ring> locked(ring);
    if (taken.held) ring.release(taken.held, wakes);
    if (taken.held && with_bundle) ring.drop_bundles();
    if (!in) ring.end_decoding(taken.number, wakes);
    locked.unlock(wakes);
}

// Give up an item that has killed too many workers after they unpickled it. If its output was already put, it
// is finished, so return Wait instead.
Step give_up_suspect(In& in, PyObject*& item, uint64_t deaths) {
    runs(&in, Session::OURS);
    if (has_its_output(in)) {
        Py_CLEAR(item);
        return Step::Wait;
    }
    return give_up(in, std::exchange(item, nullptr), deaths, nullptr);
}

// Take an item and decode it. The item stays in the ring until it is decoded; see In::copying.
Step get_decoded(Ring& ring, Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    Taken taken;
    const Step step = take_encoded(ring, ch, in, deadline, taking, taken);
    if (step != Step::Done) return step;
    const std::shared_ptr<Block> block =
        taken.viewed ? std::make_shared<Block>(ring.shared_from_this(), taken.slot) : nullptr;
    const bool killer = in && in->max_deaths && taken.deaths >= in->max_deaths;
    if (killer && taken.died_unpickling)
        return give_up(*in, unreadable(taken.kind, taken.at, taken.size), taken.deaths, nullptr);
    nb::object bundle = needs_its_slot(taken.kind) ? opened_bundle(ring, taken) : nb::object();
    runs(in, Session::UNPICKLING);
    {
        Receiving receiving;
        result = decode(taken.kind, taken.at, taken.size, block, bundle.ptr());
        if (result) receiving.received(in);
    }
    runs(in, result ? Session::USERS : Session::OURS);
    if (result && is_traced(result)) result = unboxed(in, result);
    if (!result) return not_received(ring, in, taking, taken);
    if (taken.held || (!in && ring.is_filled_by_link())) finish_decoded(ring, in, taken, bundle.is_valid());
    return killer ? give_up_suspect(*in, result, taken.deaths) : Step::Done;
}

// Wait until the channel has room for another output, or until only a few other writers wait for room.
Step await_place(LocalQueue& queue, Out& out) {
    const auto waits = [&] { return out.open && queue.is_crowded(); };
    Locked lock(queue);
    const bool now = waits();
    lock.unlock({});
    if (!now) return Step::Done;
    // keeps the port alive, because other threads may close it during the wait
    nb::object kept = nb::find(out);
    if (!kept.is_valid()) return Step::Done;  // the port is being destroyed
    return perform(
        queue,
        [&](bool) { return Caller{Side::Writer, &out, 0, 0, true, ANY_TURN, false, &out.state.clock}; },
        [&](Wakes&) { return waits() ? Step::Wait : Step::Done; }, Deadline{});
}

// In a ring, each waiting writer sleeps on its own word, so even many waiting writers cost nothing.
Step await_place(Ring&, Out&) { return Step::Done; }

// Call this before a worker of an ordered stage takes an item. If too many outputs are waiting for room, wait
// until some of them have room (wait_list.hpp).
Step await_places(In& in) {
    for (size_t i = 0; i < in.feeds.size(); ++i) {
        Out& out = *in.feeds[i];
        if (!out.state.ordered) continue;
        const Step step = out.ch->with([&](auto& transport) { return await_place(transport, out); });
        if (step != Step::Done) return step;
    }
    return Step::Done;
}

Step get(LocalQueue& queue, Channel&, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    ReaderState* reader = in ? &in->state : nullptr;
    // Do not wait if the channel keeps numbers: it has only one reader, so no other worker could take the
    // item.
    if (in && !in->feeds.empty() && deadline.at == NEVER && !queue.keeps_numbers()) {
        const Step step = await_places(*in);
        if (step != Step::Done) return step;
    }
    LocalQueue::Item item{};
    std::vector<LocalQueue::Item> before;
    Step step = perform(
        queue,
        [&](bool) {
            return Caller{.side = Side::Reader,
                          .port = in,
                          .exchangeable = reader && reader->lazy,
                          .clock = reader ? &reader->clock : nullptr,
                          .orders = reader ? &reader->orders : nullptr};
        },
        [&](Wakes& wakes) {
            if (in && !in->open) return queue.state == BROKEN ? Step::Broken : Step::PortClosed;
            if (reader && taking == Taking::Next) {
                queue.acknowledge(*reader, wakes);
                before.swap(in->leased_items);
            }
            return queue.try_take(item, reader, wakes);
        },
        deadline);
    result = item.object;
    if (in && result) {
        in->leased_items.push_back(item);
        Py_INCREF(result);
    }
    if (result && is_traced(result)) result = unboxed(in, result);
    drop_items(before);  // last, because a destructor may get an item from this port
    return step;
}

// Ends a get from a ring. The constructing thread must have entered the port's turn.
struct EndOfGet {
    In& in;
    bool copying = in.copying;
    ~EndOfGet() {
        in.copying = copying;
        in.turn.leave();
    }
};

Step get(Ring& ring, Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    if (!in) return get_decoded(ring, ch, in, deadline, taking, result);
    const Step turn = in->turn.enter(deadline);
    if (turn != Step::Done) return turn;
    EndOfGet end{*in};
    return get_decoded(ring, ch, in, deadline, taking, result);
}

// Small items that a call leased together. They are decoded in their slots.
struct LeasedRun {
    static constexpr uint64_t MOST = 64;
    struct Item {
        const char* at;
        uint64_t kind, size, deaths;
    };
    Item items[MOST];
    uint64_t n = 0;

    // Lease up to `most` items that are in the channel now.
    void take(Ring& ring, In& in, uint64_t most) {
        Ring::InRun run[Redo::MOST];
        Wakes wakes;
        Locked<Ring> locked(ring);
        bool more = in.open;
        while (more && n < std::min(most, MOST)) {
            const uint64_t took = ring.take_run(in.state, run, std::min(most, MOST) - n, UINT64_MAX, wakes);
            for (uint64_t i = 0; i < took; ++i) {
                const Slot* slot = run[i].slot;
                items[n++] = {ring.payload_of(run[i].slot), slot->kind, slot->size, slot->deaths()};
            }
            more = took > 0;
        }
        if (n) in.copying = true;
        locked.unlock(wakes);
    }
    // Give back the items, starting with number `from`.
    void give_back(Ring& ring, In& in, uint64_t from) {
        if (from == n) return;
        Wakes wakes;
        Locked<Ring> locked(ring);
        if (in.open) {
            ring.give_back_newest(in.state.session, n - from, wakes);
            in.state.leases -= uint32_t(n - from);
        }
        locked.unlock(wakes);
    }
};

// Take the small items that are in the channel now, and append them to the list. All items of one call stay
// on lease together. Return Wait if the next item must be taken alone, and NotNow if it cannot be received.
Step get_run(Ring& ring, In& in, PyObject* list, uint64_t most) {
    const Step turn = in.turn.enter(Deadline{0});
    if (turn != Step::Done) return turn;
    EndOfGet end{in};
    LeasedRun run;
    run.take(ring, in, most);
    if (!run.n) return Step::Wait;
    uint64_t done = 0;
    runs(&in, Session::UNPICKLING);
    for (; done < run.n && in.open; ++done) {
        const LeasedRun::Item& one = run.items[done];
        if (in.max_deaths && one.deaths >= in.max_deaths) break;  // the next call takes it alone
        Receiving receiving;
        nb::object item = nb::steal(decode(one.kind, one.at, one.size));
        if (item.is_valid()) receiving.received(&in);
        if (item.is_valid() && is_traced(item.ptr())) item = nb::steal(unboxed(&in, item.release().ptr()));
        if (!item.is_valid() || PyList_Append(list, item.ptr()) != 0) break;
    }
    runs(&in, Session::USERS);
    if (done == run.n) return Step::Done;
    const bool interrupted = PyErr_Occurred() && is_interrupt();
    nb::object error = take_error();
    run.give_back(ring, in, done);
    if (interrupted) raise_again(error);
    return interrupted ? Step::Interrupted : Step::NotNow;
}

Step get_run(LocalQueue&, In&, PyObject*, uint64_t) { return Step::Wait; }

// Return the first item for which this port's worker may still put outputs. In a LocalQueue, no worker is
// ever replaced, so all earlier items went through this port. In a ring, workers may die, but the ring knows
// which items are unfinished.
uint64_t first_unfinished(In& in) {
    return in.ch->with(Each{[&](LocalQueue&) { return in.state.number + 1; },
                            [&](Ring& ring) {
                                Locked locked(ring);
                                const uint64_t first = ring.first_unfinished();
                                locked.unlock({});
                                return first;
                            }});
}

// Make the port's outputs take turns from now on, because the stage is getting more workers. This worker must
// have no leased items.
void keep_turns(In& in) {
    const uint64_t first = first_unfinished(in);
    for (Out* out : in.feeds) {
        if (!out->may_have_turns) continue;
        out->ch->with([&](auto& transport) {
            Wakes wakes;
            Locked locked(transport);
            transport.start_turns_at(first, wakes);
            out->state.ordered = true;
            locked.unlock(wakes);
        });
    }
    in.state.keeps_turns = true;
}

// Get one item. The caller must continue with the next item if this returns Wait.
Step get_step(Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    const Step step =
        ch.with([&](auto& transport) { return get(transport, ch, in, deadline, taking, result); });
    if (step != Step::KeepTurns) return step;
    keep_turns(*in);
    return Step::Wait;
}

}  // namespace

void finish_traced(In& in) {
    in.holds_traced = false;
    if (!in.tracing) return;
    const nb::object owner = in.tracing_owner;
    in.tracing->held -= in.tracing->held > 0;
    call_recorder(*in.tracing, "finished", &in);
}

PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating) {
    if (!ch.usable()) return nullptr;
    PyObject* result = nullptr;
    Step step;
    do {
        if (in && !keep && in->holds_traced) finish_traced(*in);
        if (in && !keep && !pass_turns(*in)) return nullptr;
        step = get_step(ch, in, deadline, keep ? Taking::More : Taking::Next, result);
    } while (step == Step::Wait);
    if (step == Step::Done) return result;
    if (step == Step::Drained && iterating) return nullptr;  // the interpreter then raises StopIteration
    return raise_step(ch, step, Side::Reader, 0, deadline);
}

Step try_get(Channel& ch, In* in, PyObject*& item) {
    Step step;
    do {
        if (in && in->holds_traced) finish_traced(*in);
        if (in && !pass_turns(*in)) return Step::Interrupted;
        step = get_step(ch, in, Deadline{0}, Taking::Next, item);
    } while (step == Step::Wait);
    if (step != Step::Done && step != Step::NotNow && step != Step::Drained)
        raise_step(ch, step, Side::Reader, 0, Deadline{0});
    return step;
}

PyObject* get_all(Channel& ch, In* in, Py_ssize_t most, Deadline deadline) {
    PyObject* first = get_item(ch, in, deadline, false, false);
    if (!first) return nullptr;
    PyObject* list = PyList_New(0);
    if (!list || PyList_Append(list, first) != 0) {
        Py_DECREF(first);
        return nullptr;
    }
    Py_DECREF(first);
    while (PyList_GET_SIZE(list) < most) {
        PyObject* item = nullptr;
        const uint64_t more = uint64_t(most - PyList_GET_SIZE(list));
        Step step =
            in && more > 1 ? ch.with([&](auto& m) { return get_run(m, *in, list, more); }) : Step::Wait;
        if (step == Step::Done) continue;
        if (step == Step::Wait) step = get_step(ch, in, Deadline{0}, Taking::Rest, item);
        if (step == Step::Wait) continue;
        if (step == Step::Interrupted) {
            add_to_error("items_got", list);
            return nullptr;
        }
        if (step != Step::Done) break;  // the next call raises the error, if there is any
        int failed = PyList_Append(list, item);
        Py_DECREF(item);
        if (failed) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    return list;
}

void set_unreadable(PyObject* unreadable, PyObject* is_of_a_handler) {
    Py_XSETREF(py_unreadable, Py_NewRef(unreadable));
    Py_XSETREF(py_is_of_a_handler, Py_NewRef(is_of_a_handler));
}

}  // namespace flowchan
