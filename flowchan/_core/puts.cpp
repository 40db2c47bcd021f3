// Puts, from the Python object down to the transport.
#include "arguments.hpp"
#include "channel.hpp"
#include "direct_values.hpp"
#include "raising.hpp"
#include "references.hpp"
#include "sizes.hpp"
#include "wire.hpp"

#include <optional>
#include <utility>

namespace flowchan {

using namespace nb::literals;

namespace {

// Return the result of a put whose port was closed while the put waited.
Step left(uint64_t state) {
    return state == OPEN ? Step::PortClosed : state == BROKEN ? Step::Broken : Step::Closed;
}

// Record the input item, and how many of its outputs were already put. Call this before putting the item's
// first output.
template <class M>
void begin(M& m, Out& out) {
    if (out.state.keyed) return;
    In* in = out.follows();
    if (!out.replays && (!in || !in->state.leases)) return;
    m.begin_item(out.state, out.replays ? 0 : in->state.number);
    out.state.keyed = true;
}

// This function is inlined so that the compiler drops the fields of Caller that only a wait needs.
[[gnu::always_inline]] inline Caller writing_inlined(Channel& ch, const Out* out, uint64_t size, bool waits) {
    Caller caller{Side::Writer, out, 0, size};
    caller.clock = out ? &out->state.clock : nullptr;
    if (waits) caller.session = out ? out->state.session : ch.plain_session();
    if (out && out->state.ordered && out->state.keyed) {
        caller.ordered = true;
        caller.number = out->state.number;
    }
    return caller;
}

Step put(LocalQueue& queue, Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    if (queue.counts_bytes()) size = size_of(item);
    LocalQueue::Item entry{Py_NewRef(item), size};
    Step step = perform(
        queue, [&](bool waits) { return writing_inlined(ch, out, size, waits); },
        [&](Wakes& wakes) {
            if (out && !out->open) return left(queue.state);
            if (out) begin(queue, *out);
            return queue.try_put(entry, out ? &out->state : nullptr, wakes);
        },
        deadline);
    if (step != Step::Done) Py_DECREF(item);
    return step;
}

// Prepare a put into a ring, under the lock. Return the result of the put if it is already known, and Wait
// otherwise.
Step before_put(Ring& ring, Out* out) {
    if (!out) return Step::Wait;
    if (!out->open) return left(ring.header().state);
    begin(ring, *out);
    return out->state.skips() ? Step::Done : Step::Wait;
}

// Wait for recycled memory. Otherwise, a writer that outpaces its readers would touch more and more new
// memory, up to the channel's limit. The put waits only while readers free memory, and at most about as long
// as touching new memory would take. Each MB of new memory costs 0.7 to 1 ms of CPU time, and each MB of
// recycled memory 0.03 to 0.07 ms. For each new MB, the kernel spends 0.25 ms finding and clearing pages, 0.4
// ms on page faults, and 0.2 ms freeing the pages.
Step await_warm_memory(Ring& ring, Channel& ch, Out* out, uint64_t size, Deadline deadline) {
    constexpr uint64_t WORTH_IT = 64 << 10, BYTES_A_NS = 1;
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

// Put a large item in two steps. In between, copy it without the lock, so that no other caller waits for the
// copy.
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

// Return the loan of this channel that contains one of the frame's buffers. Set `at` to that buffer.
std::shared_ptr<Block> loan_of(Channel& ch, const ObjectFrame& frame, const void*& at) {
    nb::object self = nb::find(ch);
    nb::ft_object_guard guard(self);  // this guards `loans`
    std::shared_ptr<Block> loan;
    for (size_t i = 2; !loan && i < frame.pieces.size(); ++i)  // piece 0 is the table, and piece 1 the pickle
        loan = loan_with(ch.loans, at = frame.pieces[i].at);
    return loan;
}

// Put an item whose large buffer was filled in place. Return Wait if the item must be copied like an item
// without a loan. For example, a forked child must copy, because inherited loans still belong to the parent.
// A buffer at the address of an earlier loan must also be copied if it is part of a received item.
// `loan->put` is set before the put, so that two threads cannot put the same memory.
Step put_loaned(Ring& ring, Channel& ch, Out* out, ObjectFrame& frame, Deadline deadline) {
    const void* at = nullptr;
    std::shared_ptr<Block> loan = loan_of(ch, frame, at);
    if (!loan || loan->forks != fork_count || (out && (out->follows() || out->replays))) return Step::Wait;
    if (loan->put.exchange(true)) {
        if (is_in_view(ring, at)) return Step::Wait;
        raise("ChannelError", "this array was on loan from " + ch.describe() +
                                  " and has already been put; call loan again for each put");
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
    if (ch.lends && frame.kind == BUFFERS) {
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

// Move a reference into the ring before the put, because a reader may take it right afterwards.
Step put_reference(Ring& ring, Channel& ch, Out* out, ObjectFrame& frame, Deadline deadline) {
    Reference& reference = *nb::inst_ptr<Reference>(frame.keep);
    references().move(reference.id, &ring);
    const Step step = put_frame(ring, ch, out, frame, deadline);
    reference.is_put = step == Step::Done;
    if (!reference.is_put) references().move(reference.id, nullptr);
    return step;
}

PyObject* py_not_put = nullptr;

// Report that an encoded item was not put, so that it stops keeping the channels inside it alive.
void report_not_put(PyObject* packed) {
    nb::error_scope kept;
    PyObject* none = PyObject_CallOneArg(py_not_put, packed);
    if (!none) PyErr_WriteUnraisable(py_not_put);
    Py_XDECREF(none);
}

// Let the port choose the worker that this output is for. Return false with a Python error set.
bool set_route(Out& out, PyObject* item, Frame& frame) {
    PyObject* worker = PyObject_CallOneArg(out.route.ptr(), item);
    if (!worker) return false;
    frame.route = worker == Py_None ? Frame::ROUTE_UNKNOWN : uint32_t(PyLong_AsUnsignedLong(worker)) + 1;
    Py_DECREF(worker);
    return !PyErr_Occurred();
}

Step put(Ring& ring, Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    ObjectFrame frame;
    frame.leaves = ch.hosts || ring.header().leaves;
    if (!encode(item, frame)) return Step::Interrupted;
    size = frame.size;
    if (ch.hosts && needs_its_slot(frame.kind)) {
        raise_not_transferable(ch, item);
        report_not_put(frame.keep);
        return Step::Interrupted;
    }
    In* in = out ? out->follows() : nullptr;
    if (in && !in->state.once) runs(in, Session::OURS);
    if (out && out->route.is_valid() && frame.size >= LARGE && !set_route(*out, item, frame))
        return Step::Interrupted;
    const Step step = frame.kind == REFERENCE ? put_reference(ring, ch, out, frame, deadline)
                                              : put_frame(ring, ch, out, frame, deadline);
    runs(in, Session::USERS);
    if (step != Step::Done && ch.hosts && frame.keep) report_not_put(frame.keep);
    if (step == Step::Refused) return raise_refused(ch, frame.refused), Step::Interrupted;
    if (frame.kind == PINNED && step == Step::Done) notify_put(frame, nb::find(ch).ptr());
    return step;
}

// This function is inlined, because passing these arguments by reference would take a quarter of the time of
// a put between threads.
[[gnu::always_inline]] inline Step put_bare(Channel& ch, Out* out, PyObject* item, Deadline deadline,
                                            uint64_t& size) {
    return ch.with([&](auto& transport) __attribute__((always_inline)) {
        return put(transport, ch, out, item, deadline, size);
    });
}

// Box an item and put the box. The box gets the marks of the sampled items that the worker is processing, or
// the mark of a new sample. If the box cannot be put, put the bare item, because an error should describe the
// user's item and not the box.
[[gnu::cold]] Step put_boxed(Channel& ch, Out& out, PyObject* item, Deadline deadline, uint64_t& size) {
    constexpr uint64_t RARELY = 1 << 16;
    const nb::object owner = out.tracing_owner;
    ItemTracing& tracing = *out.tracing;
    const nb::object box = call_recorder(tracing, "boxed", &out, item);
    if (!box.is_valid() || !is_traced(box.ptr())) return put_bare(ch, &out, item, deadline, size);
    const Step step = put_bare(ch, &out, box.ptr(), deadline, size);
    if (step == Step::Interrupted && PyErr_Occurred() && !is_interrupt()) {
        PyErr_Clear();
        if (tracing.countdown) tracing.countdown = RARELY;  // the next box would probably also fail
        return put_bare(ch, &out, item, deadline, size);
    }
    if (step != Step::Done) return step;
    const nb::object next = call_recorder(tracing, "sent", &out);
    if (tracing.countdown && next.is_valid()) tracing.countdown = nb::cast<uint64_t>(next);
    return step;
}

[[gnu::always_inline]] inline Step put_step(Channel& ch, Out* out, PyObject* item, Deadline deadline,
                                            uint64_t& size) {
    if (out && out->tracing && out->tracing->boxes_next_put())
        return put_boxed(ch, *out, item, deadline, size);
    return put_bare(ch, out, item, deadline, size);
}
}  // namespace

void set_not_put(PyObject* not_put) { Py_XSETREF(py_not_put, Py_NewRef(not_put)); }

bool has_its_output(In& in) {
    bool found = false;
    for (Out* out : in.feeds)
        locked_ring(*out->ch, [&](Ring& ring, Wakes&) {
            begin(ring, *out);
            found = found || (out->state.single && out->state.skip > 0);
        });
    return found;
}

Caller writing(Channel& ch, const Out* out, uint64_t size, bool waits) {
    return writing_inlined(ch, out, size, waits);
}

static nb::object lend(LocalQueue&, Channel& ch, Out*, uint64_t, Deadline) {
    throw nb::type_error(
        (ch.describe() + " has no shared memory for a loan; create it with across='processes'").c_str());
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
    {
        nb::object self = nb::find(ch);
        nb::ft_object_guard guard(self);
        ch.loans.push_back(block);
    }
    ch.lends = true;
    nb::object view = View::over(block, block->begin + LOAN_HEAD, size - LOAN_HEAD);
    nb::inst_ptr<View>(view)->writable = true;
    return view;
}

// Lend `size` bytes of the channel's memory as soon as they are free. The caller fills this memory and then
// puts it.
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout) {
    Deadline deadline;
    if (!ch.usable() || !parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    return ch.with([&](auto& transport) { return lend(transport, ch, out, size, deadline); });
}

PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline) {
    if (!ch.usable()) return nullptr;
    uint64_t size = 0;
    Step step = put_step(ch, out, item, deadline, size);
    if (step == Step::Done) Py_RETURN_NONE;
    return raise_step(ch, step, Side::Writer, size, deadline);
}

Step try_put(Channel& ch, Out* out, PyObject* item) {
    uint64_t size = 0;
    Step step = put_step(ch, out, item, Deadline{0}, size);
    if (step != Step::Done && step != Step::NotNow) raise_step(ch, step, Side::Writer, size, Deadline{0});
    return step;
}

namespace {

// Return whether the iterator will certainly not wait: its next items already exist, and no other code takes
// items from it.
bool is_ahead(PyObject* items, PyObject* iterator) {
    static PyObject* repeat = [] {
        nb::object type = nb::module_::import_("itertools").attr("repeat");
        return type.release().ptr();
    }();
    PyTypeObject* type = Py_TYPE(iterator);
    if (type == reinterpret_cast<PyTypeObject*>(repeat)) return true;
    const bool ready = type == &PyListIter_Type || type == &PyTupleIter_Type || type == &PyRangeIter_Type;
    return ready && iterator != items;
}

// Consecutive small items to put. As many of them as the channel has room for are put together.
struct PutRun {
    static constexpr uint64_t MOST = 16;
    nb::object items[MOST];
    Ring::Small small[MOST];
    char bytes[MOST][Slot::INLINE];
    uint64_t n = 0;

    // Take at most `most` items from the iterator, up to the first one without a small direct encoding.
    // Return that item, or null if there is none.
    PyObject* fill(PyObject* iterator, uint64_t most) {
        for (n = 0; n < most; ++n) {
            PyObject* item = PyIter_Next(iterator);
            DirectWriter writer{bytes[n], bytes[n] + sizeof bytes[n]};
            if (!item || !writer.object(item, 0)) return item;
            items[n] = nb::steal(item);
            small[n] = {DIRECT, 0, uint64_t(writer.p - bytes[n]), bytes[n]};
        }
        return nullptr;
    }
    // Put the items, starting with number `from`, and return how many were put.
    uint64_t put(Ring& ring, Channel& ch, Out* out, uint64_t from) {
        Wakes wakes;
        Locked<Ring> locked(ring);
        ring.sweep(wakes);
        const bool may = (!out || out->open) && !ring.is_limited() &&
                         Traits<Ring>::may_pass(ring, writing(ch, out, Slot::INLINE, false), nullptr);
        const uint64_t done = may ? ring.put_run(small + from, n - from, wakes) : 0;
        locked.unlock(wakes);
        return done;
    }
};

PyObject* put_one(Channel& ch, Out* out, PyObject* item, Deadline deadline) {
    return guarded([&] {
        return in_time(ch, Side::Writer, deadline,
                       [&](Channel& to, Deadline until) { return put_item(to, out, item, until); });
    });
}

// Put one item and count it in `done`. If the put fails, return false with a Python error set.
bool put_counted(Channel& ch, Out* out, PyObject* item, Deadline deadline, Py_ssize_t& done) {
    PyObject* none = put_one(ch, out, item, deadline);
    Py_XDECREF(none);
    done += none != nullptr;
    return none != nullptr;
}

// Put the items of an iterator that never waits, several at a time.
void put_runs(Ring& ring, Channel& ch, Out* out, PyObject* iterator, Deadline deadline, Py_ssize_t& done) {
    PutRun run;
    for (bool right = true; right;) {
        const uint64_t most = std::max<uint64_t>(
            out && out->tracing ? out->tracing->puts_without_box(PutRun::MOST) : PutRun::MOST, 1);
        nb::object other = nb::steal(run.fill(iterator, most));
        std::optional<nb::python_error> error;
        if (PyErr_Occurred()) error.emplace();
        for (uint64_t i = 0; right && i < run.n;) {
            const uint64_t together = run.n - i > 1 ? run.put(ring, ch, out, i) : 0;
            if (together && out && out->tracing) out->tracing->pass(together);
            done += Py_ssize_t(together);
            i += together;
            if (!together) right = put_counted(ch, out, run.items[i++].ptr(), deadline, done);
        }
        if (right && other.is_valid()) right = put_counted(ch, out, other.ptr(), deadline, done);
        if (right && error) error->restore();
        right = right && (run.n == most || other.is_valid());
    }
}

}  // namespace

PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline) {
    PyObject* iterator = PyObject_GetIter(items);
    if (!iterator) return nullptr;
    Py_ssize_t done = 0;
    const bool numbered = out && (out->follows() || out->replays);
    const bool in_runs = !ch.elsewhere && !numbered && is_ahead(items, iterator);
    if (in_runs)
        ch.with(
            Each{[](LocalQueue&) {}, [&](Ring& ring) { put_runs(ring, ch, out, iterator, deadline, done); }});
    PyObject* item;
    while (!PyErr_Occurred() && (item = PyIter_Next(iterator))) {
        put_counted(ch, out, item, deadline, done);
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    if (!PyErr_Occurred()) Py_RETURN_NONE;
    // `items_put` of the error tells the caller how many items were put.
    add_to_error("items_put", PyLong_FromSsize_t(done));
    return nullptr;
}

}  // namespace flowchan
