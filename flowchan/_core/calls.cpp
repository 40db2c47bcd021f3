// What a call on a channel or port does, from the Python object to the medium and back.
#include "channel.hpp"
#include "raising.hpp"
#include "sizes.hpp"

#include <utility>

namespace flowchan {

using namespace nb::literals;

namespace {

// What a put says whose port was closed while it waited.
Step left(uint64_t state) {
    return state == OPEN ? Step::PortClosed : state == BROKEN ? Step::Broken : Step::Closed;
}

// Before the first output for an item: which item it is, and how many of its outputs are there already.
template <class M>
void begin(M& m, Out& out) {
    if (out.state.keyed) return;
    In* in = out.follows();
    if (!out.replays && (!in || !in->state.in_hand)) return;
    m.begin_item(out.state, out.replays ? 0 : in->state.number);
    out.state.keyed = true;
}

Step put(LocalQueue& queue, Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    if (queue.counts_bytes()) size = size_of(item);
    LocalQueue::Item entry{Py_NewRef(item), size};
    Step step = perform(
        queue, [&](bool waits) { return writing(ch, out, size, waits); },
        [&](Wakes& wakes) {
            if (out && !out->open) return left(queue.state);
            if (out) begin(queue, *out);
            return queue.try_put(entry, out ? &out->state : nullptr, wakes);
        },
        deadline);
    if (step != Step::Done) Py_DECREF(item);
    return step;
}

// What comes before every put into a ring, under its lock: Wait, unless that has settled it.
Step before_put(Ring& ring, Out* out) {
    if (!out) return Step::Wait;
    if (!out->open) return left(ring.header().state);
    begin(ring, *out);
    return out->state.skips() ? Step::Done : Step::Wait;
}

// Who puts faster than others read would use ever more memory for the first time, up to the channel's bound.
// Waiting for what they give back costs less, for about as long as new memory would cost, and as long as they
// do give some back.
Step await_warm_memory(Ring& ring, Channel& ch, Out* out, uint64_t size, Deadline deadline) {
    constexpr uint64_t WORTH_IT = 64 << 10, BYTES_A_NS = 4;
    if (size < WORTH_IT || deadline.now_only()) return Step::Done;
    const Deadline soon{std::min(deadline.at, now_ns() + int64_t(size / BYTES_A_NS))};
    const uint32_t session = out ? out->state.session : ch.plain_session();
    return perform(
        ring, [&](bool) { return Caller{Side::Writer, out, session, size}; },
        [&](Wakes&) {
            const bool waits = (!out || out->open) && ring.lacks_warm_memory(size, soon.passed());
            return waits ? Step::Wait : Step::Done;
        },
        soon);
}

// A large item is copied outside the lock, in two steps, so that nobody waits for the copy.
Step put_large(Ring& ring, Channel& ch, Out* out, const ObjectFrame& frame, Deadline deadline) {
    WriterState* writer = out ? &out->state : nullptr;
    uint32_t session = out ? out->state.session : ch.plain_session();
    Slot* slot = nullptr;
    if (await_warm_memory(ring, ch, out, frame.size, deadline) == Step::Interrupted) return Step::Interrupted;
    Step step = perform(
        ring, [&](bool waits) { return writing(ch, out, frame.size, waits); },
        [&](Wakes&) {
            const Step settled = before_put(ring, out);
            const Step claimed = settled == Step::Wait ? ring.claim(frame, writer, session, slot) : settled;
            if (out && slot && claimed == Step::Done) out->copying += 1;
            return claimed;
        },
        deadline);
    if (step != Step::Done || !slot) return step;
    {
        WithoutGil without;
        ring.write(frame, slot);
    }
    Wakes wakes;
    Locked<Ring> locked(ring);
    step = ring.publish(frame, slot, writer, wakes);
    if (out) out->copying -= 1;
    locked.unlock(wakes);
    return step;
}

// Puts an item whose large buffer was filled in place. Wait: it can't go that way, copy it like any other. So
// it is with memory that a forked child has inherited, which is on loan to its parent, and with what has come
// to where something was filled and put before. `put` is set first, so that two threads can't put the same
// memory twice.
Step put_loaned(Ring& ring, Channel& ch, Out* out, ObjectFrame& frame, Deadline deadline) {
    std::shared_ptr<Block> loan;  // of the pieces, 0 is the table and 1 the pickle
    const void* at = nullptr;
    for (size_t i = 2; !loan && i < frame.pieces.size(); ++i)
        loan = loan_with(ch.loans, at = frame.pieces[i].at);
    if (!loan || loan->forks != fork_count || (out && (out->follows() || out->replays))) return Step::Wait;
    if (loan->put.exchange(true)) {
        if (is_in_view(ring, at)) return Step::Wait;
        raise("ChannelError", "this array was on loan from " + ch.describe() +
                                  " and has been put: it belongs to the channel now; loan another one");
        return Step::Interrupted;
    }
    if (!lay_into(frame, *loan)) {
        loan->put = false;
        return Step::Wait;
    }
    Step step = perform(
        ring, [&](bool waits) { return writing(ch, out, frame.size, waits); },
        [&](Wakes& wakes) {
            if (out && !out->open) return left(ring.header().state);
            return ring.put_loan(loan->slot, frame, out ? &out->state : nullptr, wakes);
        },
        deadline);
    if (step != Step::Done) {
        loan->put = false;
        return step;
    }
    nb::object array = loan->array.is_valid() ? loan->array() : nb::none();
    if (!array.is_none()) array.attr("setflags")("write"_a = false);
    return step;
}

Step put_frame(Ring& ring, Channel& ch, Out* out, ObjectFrame& frame, Deadline deadline) {
    const uint64_t size = frame.size;
    if (!ch.loans.empty() && frame.kind == BUFFERS) {
        Step step = put_loaned(ring, ch, out, frame, deadline);
        if (step != Step::Wait) return step;
    }
    if (size > Taken::LOCAL && size <= ch.max_bytes) return put_large(ring, ch, out, frame, deadline);
    WriterState* writer = out ? &out->state : nullptr;
    return perform(
        ring, [&](bool waits) { return writing(ch, out, frame.size, waits); },
        [&](Wakes& wakes) {
            const Step settled = before_put(ring, out);
            return settled == Step::Wait ? ring.try_put(frame, writer, wakes) : settled;
        },
        deadline);
}

// Whose code runs now for the item that `in` has in hand (R10).
void runs(In* in, Session::At at) {
    if (!in) return;
    in->ch->with(Each{[](LocalQueue&) {}, [&](Ring& ring) { ring.session(in->state.session).at = at; }});
}

Step put(Ring& ring, Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    ObjectFrame frame;
    if (!encode(item, frame)) return Step::Interrupted;
    size = frame.size;
    if (ch.hosts && needs_its_slot(frame.kind)) return raise_stays_here(ch, item), Step::Interrupted;
    In* in = out ? out->follows() : nullptr;
    runs(in, Session::OURS);
    Step step = put_frame(ring, ch, out, frame, deadline);
    runs(in, Session::USERS);
    if (step == Step::Refused) return raise_refused(ch, frame.refused), Step::Interrupted;
    if (frame.kind == PINNED && step == Step::Done) tell_put(frame, nb::find(ch).ptr());
    return step;
}

Step put_step(Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    return ch.with([&](auto& medium) { return put(medium, ch, out, item, deadline, size); });
}

// What a get does about the items taken before it, and about its own when that can't be received. Next: those
// in hand are finished. More: they stay in hand. Rest: as More, and what can't be received is left for the
// next call to tell.
enum class Taking { Next, More, Rest };

// Hands an item that can't be used to the handler, in place of the caller; takes over the references. `error`
// is why, or null when it has killed its workers. Wait: go on with the next item.
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

// The error that is being raised, which is cleared with that.
PyObject* take_error() {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

// Whether the error that is being raised says nothing of the item: the call was interrupted, or this process
// lacks memory or descriptors.
bool may_be_received_later() {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return true;
    if (!PyErr_ExceptionMatches(PyExc_OSError)) return false;
    nb::object error = nb::steal(take_error());
    nb::object number = nb::getattr(error, "errno", nb::none());
    const long code = PyLong_Check(number.ptr()) ? PyLong_AsLong(number.ptr()) : 0;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    return code == EMFILE || code == ENFILE || code == ENOMEM;
}

// After an item could not be unpickled, with the error set.
Step not_received(Ring& ring, In* in, Taking taking, Taken& taken) {
    const bool ordinary = PyErr_ExceptionMatches(PyExc_Exception);
    const bool leave = (taking == Taking::Rest && ordinary) || may_be_received_later();
    const bool handled = !leave && in && in->on_poison.is_valid() && !in->on_poison.is_none();
    nb::object error = leave || handled ? nb::steal(take_error()) : nb::object();
    nb::object item = handled ? nb::steal(unreadable(taken.kind, taken.at, taken.size)) : nb::object();
    Wakes wakes;
    Locked locked(ring);
    if (leave && (!in || in->open)) ring.put_back(taken, in ? &in->state : nullptr, wakes);
    if (taken.held) ring.release(taken.held, wakes);
    locked.unlock(wakes);
    if (handled) return give_up(*in, item.release().ptr(), taken.deaths, error.release().ptr());
    if (taking == Taking::Rest && ordinary) return Step::NotNow;
    if (leave) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    return Step::Interrupted;
}

// The descriptors that came with an item, for `loads`: a list of them, and why there are no more. Null with
// an error set.
nb::object opened_parcel(Ring& ring, const Taken& taken) {
    const uint64_t id = parcel_of(taken.kind, taken.at, taken.size);
    if (!id) return nb::none();
    std::vector<int> descriptors;
    Locked<Ring> locked(ring);
    const int error = ring.open_parcel(id, descriptors);
    locked.unlock({});
    nb::list list;
    for (int fd : descriptors) list.append(fd);
    return nb::make_tuple(list, error);
}

// What lies in a ring is not freed before it is decoded: see In::copying.
Step get_decoded(Ring& ring, Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    ReaderState* reader = in ? &in->state : nullptr;
    Taken taken;
    uint32_t session = reader ? reader->session : ch.plain_session();
    bool finished = false;
    runs(in, Session::OURS);
    Step step = perform(
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
            }
            const Step tried = ring.try_take(taken, reader, session, wakes);
            if (in && tried == Step::Done) in->copying = true;
            return tried;
        },
        deadline);
    if (finished) in->call_due();
    if (step != Step::Done) {
        if (in && in->state.in_hand) runs(in, Session::USERS);
        return step;
    }
    std::shared_ptr<Block> block =
        taken.viewed ? std::make_shared<Block>(ring.shared_from_this(), taken.slot) : nullptr;
    const bool killer = in && in->max_deaths && taken.deaths >= in->max_deaths;
    if (killer && taken.kills_who_unpickles)
        return give_up(*in, unreadable(taken.kind, taken.at, taken.size), taken.deaths, nullptr);
    nb::object parcel = needs_its_slot(taken.kind) ? opened_parcel(ring, taken) : nb::object();
    runs(in, Session::UNPICKLING);
    {
        Receiving receiving;
        result = decode(taken.kind, taken.at, taken.size, block, parcel.ptr());
        if (result) receiving.received(in);
    }
    runs(in, result ? Session::USERS : Session::OURS);
    if (!result) return not_received(ring, in, taking, taken);
    if (taken.held) {
        Wakes wakes;
        Locked<Ring> locked(ring);
        ring.release(taken.held, wakes);
        if (parcel.is_valid()) ring.drop_parcels();
        locked.unlock(wakes);
    }
    if (!killer) return Step::Done;
    runs(in, Session::OURS);
    return give_up(*in, std::exchange(result, nullptr), taken.deaths, nullptr);
}

// Until there is a place for one more output, or few wait for one.
Step await_place(LocalQueue& queue, Out& out) {
    const auto waits = [&] { return out.open && queue.is_crowded(); };
    Locked lock(queue);
    const bool now = waits();
    lock.unlock({});
    if (!now) return Step::Done;
    nb::object kept = nb::find(out);  // others may close and drop it meanwhile
    return perform(
        queue, [&](bool) { return Caller{Side::Writer, &out, 0, 0, true, ANY_TURN}; },
        [&](Wakes&) { return waits() ? Step::Wait : Step::Done; }, Deadline{});
}

// In a ring each waits on a word of its own, so a crowd costs nothing.
Step await_place(Ring&, Out&) { return Step::Done; }

// A worker of an ordered stage takes no item while many outputs wait for a place (line.hpp).
Step await_places(In& in) {
    for (size_t i = 0; i < in.feeds.size(); ++i) {
        Out& out = *in.feeds[i];
        if (!out.state.ordered) continue;
        const Step step = out.ch->with([&](auto& medium) { return await_place(medium, out); });
        if (step != Step::Done) return step;
    }
    return Step::Done;
}

Step get(LocalQueue& queue, Channel&, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    ReaderState* reader = in ? &in->state : nullptr;
    if (in && !in->feeds.empty() && deadline.at == NEVER) {
        const Step step = await_places(*in);
        if (step != Step::Done) return step;
    }
    LocalQueue::Item item{};
    std::vector<LocalQueue::Item> before;
    Step step = perform(
        queue,
        [&](bool) {
            return Caller{.side = Side::Reader, .port = in, .exchangeable = reader && reader->lazy};
        },
        [&](Wakes& wakes) {
            if (in && !in->open) return queue.state == BROKEN ? Step::Broken : Step::PortClosed;
            if (reader && taking == Taking::Next) {
                queue.acknowledge(*reader, wakes);
                before.swap(in->hand);
            }
            return queue.try_take(item, reader, wakes);
        },
        deadline);
    for (LocalQueue::Item& old : before) Py_DECREF(old.object);
    result = item.object;
    if (in && result) in->hand.push_back({Py_NewRef(result), item.size});
    return step;
}

Step get(Ring& ring, Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    if (!in) return get_decoded(ring, ch, in, deadline, taking, result);
    const Step turn = in->turn.enter(deadline);
    if (turn != Step::Done) return turn;
    struct End {
        In& in;
        bool copying;
        ~End() {
            in.copying = copying;
            in.turn.leave();
        }
    } end{*in, in->copying};
    return get_decoded(ring, ch, in, deadline, taking, result);
}

Step get_step(Channel& ch, In* in, Deadline deadline, Taking taking, PyObject*& result) {
    return ch.with([&](auto& medium) { return get(medium, ch, in, deadline, taking, result); });
}

}  // namespace

Caller writing(Channel& ch, const Out* out, uint64_t size, bool waits) {
    Caller caller{Side::Writer, out, 0, size};
    if (waits) caller.session = out ? out->state.session : ch.plain_session();
    if (out && out->state.ordered && out->state.keyed) {
        caller.ordered = true;
        caller.number = out->state.number;
    }
    return caller;
}

static nb::object lend(LocalQueue&, Channel& ch, Out*, uint64_t, Deadline) {
    throw nb::type_error((ch.describe() + " has no memory of its own to lend").c_str());
}

static nb::object lend(Ring& ring, Channel& ch, Out* out, uint64_t size, Deadline deadline) {
    size += LOAN_HEAD;
    Slot* slot = nullptr;
    const uint32_t session = out ? out->state.session : ch.plain_session();
    Step step = perform(
        ring, [&](bool waits) { return writing(ch, out, size, waits); },
        [&](Wakes&) {
            return out && !out->open ? left(ring.header().state) : ring.loan(size, session, slot);
        },
        deadline);
    if (step != Step::Done) {
        raise_step(ch, step, Side::Writer, size, deadline);
        throw nb::python_error();
    }
    auto block = std::make_shared<Block>(ring.shared_from_this(), slot);
    ch.loans.push_back(block);
    nb::object view = View::over(block, block->begin + LOAN_HEAD, size - LOAN_HEAD);
    nb::inst_ptr<View>(view)->writable = true;
    return view;
}

// Memory of the channel for `size` bytes that the caller fills and then puts, waiting until there is some.
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout) {
    Deadline deadline;
    if (!ch.usable() || !parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    return ch.with([&](auto& medium) { return lend(medium, ch, out, size, deadline); });
}

PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline) {
    if (!ch.usable()) return nullptr;
    uint64_t size = 0;
    Step step = put_step(ch, out, item, deadline, size);
    if (step == Step::Done) Py_RETURN_NONE;
    return raise_step(ch, step, Side::Writer, size, deadline);
}

PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating) {
    if (!ch.usable()) return nullptr;
    PyObject* result = nullptr;
    Step step;
    do {
        if (in && !keep && !tell_followers(*in)) return nullptr;
        step = get_step(ch, in, deadline, keep ? Taking::More : Taking::Next, result);
    } while (step == Step::Wait);
    if (step == Step::Done) return result;
    if (step == Step::Drained && iterating) return nullptr;  // the end of an iteration needs no exception
    return raise_step(ch, step, Side::Reader, 0, deadline);
}

Step try_put(Channel& ch, Out* out, PyObject* item) {
    uint64_t size = 0;
    Step step = put_step(ch, out, item, Deadline{0}, size);
    if (step != Step::Done && step != Step::NotNow) raise_step(ch, step, Side::Writer, size, Deadline{0});
    return step;
}

Step try_get(Channel& ch, In* in, PyObject*& item) {
    Step step;
    do {
        if (in && !tell_followers(*in)) return Step::Interrupted;
        step = get_step(ch, in, Deadline{0}, Taking::Next, item);
    } while (step == Step::Wait);
    if (step != Step::Done && step != Step::NotNow && step != Step::Drained)
        raise_step(ch, step, Side::Reader, 0, Deadline{0});
    return step;
}

// Sets an attribute of the error that is being raised; takes over the value.
static void add_to_error(const char* name, PyObject* value) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!value || PyObject_SetAttrString(error, name, value) != 0) PyErr_Clear();
    Py_XDECREF(value);
    PyErr_Restore(type, error, trace);
}

PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline) {
    PyObject* iterator = PyObject_GetIter(items);
    if (!iterator) return nullptr;
    Py_ssize_t done = 0;
    PyObject* item;
    while ((item = PyIter_Next(iterator))) {
        PyObject* none = put_item(ch, out, item, deadline);
        Py_DECREF(item);
        if (!none) break;
        Py_DECREF(none);
        ++done;
    }
    Py_DECREF(iterator);
    if (!PyErr_Occurred()) Py_RETURN_NONE;
    // The error tells how many were put, so that the caller can go on behind them.
    add_to_error("items_put", PyLong_FromSsize_t(done));
    return nullptr;
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
        Step step = get_step(ch, in, Deadline{0}, Taking::Rest, item);
        if (step == Step::Wait) continue;
        if (step == Step::Interrupted) {
            add_to_error("items_got", list);
            return nullptr;
        }
        if (step != Step::Done) break;  // whatever it is, the next call will say it
        int failed = PyList_Append(list, item);
        Py_DECREF(item);
        if (failed) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    return list;
}

}  // namespace flowchan
