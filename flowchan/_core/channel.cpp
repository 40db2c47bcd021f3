// What a call on a channel or port does, from the Python object to the medium and back.
#include "channel.hpp"

#include <cmath>
#include <pthread.h>

namespace flowchan {

uint64_t fork_count = 0;

namespace {

[[maybe_unused]] const int fork_hook = pthread_atfork(nullptr, nullptr, [] { fork_count += 1; });

PyObject* error_class(const char* name) {
    static PyObject* module = PyImport_ImportModule("flowchan.errors");
    return module ? PyObject_GetAttrString(module, name) : nullptr;
}

void raise(const char* name, const std::string& message) {
    PyObject* cls = error_class(name);
    if (!cls) return;
    PyErr_SetString(cls, message.c_str());
    Py_DECREF(cls);
}

// Raises Broken with the cause given to abort(), which may be null.
void raise_broken(const std::string& message, PyObject* cause) {
    PyObject* cls = error_class("Broken");
    PyObject* error = cls ? PyObject_CallFunction(cls, "s", message.c_str()) : nullptr;
    Py_XDECREF(cls);
    if (!error) return;
    if (cause) PyException_SetCause(error, Py_NewRef(cause));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
}

std::string seconds(Deadline deadline) { return deadline.now_only() ? "now" : "within the timeout"; }

// The bytes that an item counts against max_bytes of a `threads` channel: its buffer, else what Python says of it.
bool size_of(PyObject* item, uint64_t& size) {
    if (PyObject_CheckBuffer(item)) {
        Py_buffer view;
        if (PyObject_GetBuffer(item, &view, PyBUF_STRIDED_RO) == 0) {
            size = uint64_t(view.len);
            PyBuffer_Release(&view);
            return true;
        }
        PyErr_Clear();
    }
    PyObject* n = PyObject_CallMethod(item, "__sizeof__", nullptr);
    if (!n) return false;
    size = PyLong_AsUnsignedLongLong(n);
    Py_DECREF(n);
    return !PyErr_Occurred();
}

// Before the first output for an item: which item it is, and how many of its outputs are there already.
template <class M> void begin(M& m, Out& out) {
    if (out.state.keyed) return;
    In* in = out.follows();
    if (!out.replays && (!in || !in->state.in_hand)) return;
    m.begin_item(out.state, out.replays ? 0 : in->state.number);
    out.state.keyed = true;
}

// The put of one output when a predecessor that died has put it already: counted, not put.
bool skip(WriterState& writer) {
    if (!writer.keyed || writer.count >= writer.skip) return false;
    writer.count += 1;
    return true;
}

Step put_local(Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    if (ch.max_bytes != UINT64_MAX && !size_of(item, size)) return Step::Interrupted;
    LocalQueue::Item entry{Py_NewRef(item), size};
    Step step = perform(
        *ch.queue, Side::Writer, [] { return 0u; },
        [&](Wakes& wakes) {
            if (out) begin(*ch.queue, *out);
            return ch.queue->try_put(entry, out ? &out->state : nullptr, wakes);
        },
        deadline);
    if (step != Step::Done) Py_DECREF(item);
    return step;
}

// A large item is copied outside the lock, in two steps, so that nobody waits for the copy.
Step put_large(Channel& ch, Out* out, const ObjectFrame& frame, Deadline deadline) {
    Ring& ring = *ch.ring;
    WriterState* writer = out ? &out->state : nullptr;
    uint32_t session = out ? out->state.session : ch.plain_session();
    Slot* slot = nullptr;
    Step step = perform(
        ring, Side::Writer, [&] { return session; },
        [&](Wakes&) {
            if (out) begin(ring, *out);
            if (writer && skip(*writer)) return Step::Done;
            return ring.claim(frame, writer, session, slot);
        },
        deadline);
    if (step != Step::Done || !slot) return step;
    Py_BEGIN_ALLOW_THREADS
    ring.write(frame, slot);
    Py_END_ALLOW_THREADS
    Wakes wakes;
    Locked<Ring> locked(ring);
    step = ring.publish(slot, writer, wakes);
    locked.unlock(wakes);
    return step;
}

Step put_ring(Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    ObjectFrame frame;
    if (!encode(item, frame)) return Step::Interrupted;
    size = frame.size;
    if (size > Taken::LOCAL && size <= ch.max_bytes) return put_large(ch, out, frame, deadline);
    Ring& ring = *ch.ring;
    WriterState* writer = out ? &out->state : nullptr;
    return perform(
        ring, Side::Writer, [&] { return out ? out->state.session : ch.plain_session(); },
        [&](Wakes& wakes) {
            if (out) begin(ring, *out);
            if (writer && skip(*writer)) return Step::Done;
            return ring.try_put(frame, writer, wakes);
        },
        deadline);
}

Step put_step(Channel& ch, Out* out, PyObject* item, Deadline deadline, uint64_t& size) {
    return ch.queue ? put_local(ch, out, item, deadline, size) : put_ring(ch, out, item, deadline, size);
}

// Hands an item that has killed its workers to the handler, in place of the caller. Wait: go on with the next item.
Step poisoned(In& in, PyObject*& item, uint64_t deaths) {
    PyObject* done = PyObject_CallFunction(in.on_poison.ptr(), "OK", item, static_cast<unsigned long long>(deaths));
    Py_CLEAR(item);
    if (!done) return Step::Interrupted;
    Py_DECREF(done);
    return Step::Wait;
}

// `keep`: the items in hand stay in hand (a batch being gathered); else they are acknowledged with the same lock.
Step get_step(Channel& ch, In* in, Deadline deadline, bool keep, PyObject*& result) {
    ReaderState* reader = in ? &in->state : nullptr;
    if (ch.queue) {
        LocalQueue& queue = *ch.queue;
        LocalQueue::Item item{};
        std::vector<LocalQueue::Item> before;
        Step step = perform(
            queue, Side::Reader, [] { return 0u; },
            [&](Wakes& wakes) {
                if (reader && !keep) {
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
    Ring& ring = *ch.ring;
    Taken taken;
    uint32_t session = reader ? reader->session : ch.plain ? ch.plain : ch.plain_session();
    Step step = perform(
        ring, Side::Reader, [&] { return session; },
        [&](Wakes& wakes) {
            if (reader && !keep) ring.acknowledge(*reader, wakes);
            return ring.try_take(taken, reader, session, wakes);
        },
        deadline);
    if (step != Step::Done) return step;
    result = decode(taken.kind, taken.at, taken.size);
    if (taken.held) {
        Wakes wakes;
        Locked<Ring> locked(ring);
        ring.release(taken.held, wakes);
        locked.unlock(wakes);
    }
    if (result && in && in->max_deaths && taken.deaths >= in->max_deaths) return poisoned(*in, result, taken.deaths);
    return result ? Step::Done : Step::Interrupted;
}

// Says that item `number` has no more outputs. As for a put, an item too far ahead of its turn waits. False with a Python
// error set when a signal's handler raised meanwhile.
template <class M> bool done_with(M& m, Out& out, uint64_t number) {
    if (!out.state.ordered) {
        out.state.keyed = false;
        return true;
    }
    // `single` has passed its turn with its output; an item without any output must still pass it.
    if (!out.state.keyed && out.state.count > 0 && out.state.number == number) return true;
    Step step = perform(
        m, Side::Writer, [&] { return out.state.session; },
        [&](Wakes& wakes) {
            if (!out.state.keyed) m.begin_item(out.state, number);
            out.state.keyed = true;
            return m.item_done(out.state, wakes);
        },
        Deadline{});
    return step != Step::Interrupted;
}

bool tell_followers(In& in) {
    if (!in.state.in_hand) return true;
    for (Out* out : in.feeds) {
        bool told = out->ch->queue ? done_with(*out->ch->queue, *out, in.state.number)
                                   : done_with(*out->ch->ring, *out, in.state.number);
        if (!told) return false;
        out->state.count = 0;
    }
    return true;
}

}  // namespace

// --- Channel ---

Channel::Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name)
    : name(std::move(name)), capacity(capacity), max_bytes(max_bytes) {
    if (processes) ring = std::make_unique<Ring>(capacity, max_bytes);
    else queue = std::make_unique<LocalQueue>(capacity, max_bytes);
}

Channel::Channel(int fd, std::string name) : name(std::move(name)) {
    ring = std::make_unique<Ring>(fd);
    capacity = ring->header().capacity;
    max_bytes = ring->header().max_bytes;
}

Channel::~Channel() {
    if (!ring || !plain || forks != fork_count) return;
    Wakes wakes;
    Locked<Ring> locked(*ring);
    ring->end_session(plain, false, wakes);
    locked.unlock(wakes);
}

std::string Channel::describe() const {
    if (!name.empty()) return "channel '" + name + "'";
    return "Channel(" + std::to_string(capacity) + ", across='" + (queue ? "threads" : "processes") + "')";
}

bool Channel::usable() {
    if (forks == fork_count) return true;
    if (ring) {  // the child is another user of the same ring
        plain = 0;
        forks = fork_count;
        return true;
    }
    raise("ChannelError", describe() + " was made in another process (pid of this one: " + std::to_string(getpid()) +
                              ") and across='threads' does not reach a forked child; make it with across='processes'");
    return false;
}

uint32_t Channel::plain_session() {
    if (plain) return plain;
    Wakes wakes;
    std::string failure;
    {
        Locked<Ring> locked(*ring);
        if (!plain) try {  // another thread may have been quicker
            plain = ring->open_session(Session::PLAIN, wakes);
        } catch (const std::exception& e) {
            failure = e.what();
        }
        locked.unlock(wakes);
    }
    if (!failure.empty()) {
        raise("ChannelError", describe() + ": " + failure);
        throw nb::python_error();
    }
    return plain;
}

// --- In and Out ---

namespace {

// Opens a session for a port, or adopts one that another process opened for it.
template <class State>
uint64_t open_port(Channel& ch, int session, bool writer, State& state) {
    if (!ch.usable()) throw nb::python_error();
    if (ch.queue) {
        Wakes wakes;
        Locked<LocalQueue> locked(*ch.queue);
        (writer ? ch.queue->writers : ch.queue->readers) += 1;
        locked.unlock(wakes);
        return 0;
    }
    Wakes wakes;
    std::string failure;
    Locked<Ring> locked(*ch.ring);
    try {
        if (session) ch.ring->adopt(uint32_t(session));
        state.session = session ? uint32_t(session)
                                : ch.ring->open_session(writer ? Session::WRITER : Session::READER, wakes);
    } catch (const std::exception& e) {
        failure = e.what();
    }
    uint64_t generation = ch.ring->session(state.session).generation;
    locked.unlock(wakes);
    if (failure.empty()) return generation;
    raise("ChannelError", ch.describe() + ": " + failure);
    throw nb::python_error();
}

// Whether the port's session is still this port's and, unless `anyway`, still this process's (it may have moved on).
bool owns(Ring& ring, uint32_t session, uint64_t generation) {
    Session& s = ring.session(session);
    return s.generation == generation && s.role != Session::NONE;
}

}  // namespace

In::In(nb::object channel_, int session) : channel(std::move(channel_)), ch(nb::inst_ptr<Channel>(channel)) {
    generation = open_port(*ch, session, false, state);
}

Out::Out(nb::object channel_, int session) : channel(std::move(channel_)), ch(nb::inst_ptr<Channel>(channel)) {
    generation = open_port(*ch, session, true, state);
}

In::~In() {
    for (Out* out : feeds) out->reader.reset();
    bool mine = open && forks == fork_count;
    if (mine && ch->ring) mine = ch->ring->session(state.session).pid == uint64_t(getpid());
    if (mine) close(false);
}

Out::~Out() {
    if (In* in = follows()) std::erase(in->feeds, this);
    bool mine = open && forks == fork_count;
    if (mine && ch->ring) mine = ch->ring->session(state.session).pid == uint64_t(getpid());
    if (mine) close();
}

void In::close(bool finished) {
    if (!open) return;
    open = false;
    if (finished && !tell_followers(*this)) PyErr_Clear();  // interrupted; leaving goes on all the same
    Wakes wakes;
    if (ch->queue) {
        Locked<LocalQueue> locked(*ch->queue);
        if (finished || ch->queue->state == BROKEN) {
            ch->queue->acknowledge(state, wakes);
        } else {
            ch->queue->give_back(hand, state, wakes);
            hand.clear();
        }
        ch->queue->end_port(false, wakes);
        locked.unlock(wakes);
        for (LocalQueue::Item& item : hand) Py_DECREF(item.object);
        hand.clear();
        return;
    }
    Locked<Ring> locked(*ch->ring);
    if (owns(*ch->ring, state.session, generation)) ch->ring->end_session(state.session, finished, wakes);
    locked.unlock(wakes);
    state.in_hand = 0;
}

void Out::close() {
    if (!open) return;
    open = false;
    Wakes wakes;
    if (ch->queue) {
        Locked<LocalQueue> locked(*ch->queue);
        ch->queue->end_port(true, wakes);
        locked.unlock(wakes);
        return;
    }
    Locked<Ring> locked(*ch->ring);
    if (owns(*ch->ring, state.session, generation)) ch->ring->end_session(state.session, true, wakes);
    locked.unlock(wakes);
}

// --- calls ---

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
        step = get_step(ch, in, deadline, keep, result);
    } while (step == Step::Wait);
    if (step == Step::Done) return result;
    if (step == Step::Drained && iterating) return nullptr;  // the end of an iteration needs no exception
    return raise_step(ch, step, Side::Reader, 0, deadline);
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
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (PyObject* n = PyLong_FromSsize_t(done)) {
        if (PyObject_SetAttrString(error, "items_put", n) != 0) PyErr_Clear();
        Py_DECREF(n);
    }
    PyErr_Restore(type, error, trace);
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
        Step step = get_step(ch, in, Deadline{0}, true, item);
        if (step == Step::Interrupted) {
            Py_DECREF(list);
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

// The cause of Broken: for `threads` the exception itself, for `processes` what codec.dumps made of it.
namespace {
PyObject* stored_cause(Channel& ch) {
    if (ch.queue) return Py_XNewRef(ch.queue->cause);
    Wakes wakes;
    Locked<Ring> locked(*ch.ring);
    std::string pickled = ch.ring->cause();
    locked.unlock(wakes);
    if (pickled.empty()) return nullptr;
    PyObject* cause = decode(uint64_t(pickled[0]), pickled.data() + 1, pickled.size() - 1);
    if (!cause) PyErr_Clear();
    return cause;
}
}  // namespace

namespace {
// The kind, then the payload. Of a cause that can't cross, its text; the break itself must always work.
std::string pickle_cause(PyObject* cause) {
    ObjectFrame frame, text;
    const ObjectFrame* used = &frame;
    if (!encode(cause, frame)) {
        PyErr_Clear();
        nb::object words = nb::steal(PyUnicode_FromFormat("%s: %S", Py_TYPE(cause)->tp_name, cause));
        nb::object stand_in = words ? nb::steal(PyObject_CallOneArg(PyExc_RuntimeError, words.ptr())) : nb::object();
        used = stand_in && encode(stand_in.ptr(), text) ? &text : nullptr;
        PyErr_Clear();
    }
    if (!used) return "";
    std::string all(1 + used->size, char(used->kind));
    used->write(all.data() + 1);
    return all;
}
}  // namespace

void abort_channel(Channel& ch, PyObject* cause) {
    if (!ch.usable()) throw nb::python_error();
    Wakes wakes;
    if (ch.queue) {
        std::vector<PyObject*> dropped;
        Locked<LocalQueue> locked(*ch.queue);
        if (ch.queue->state != BROKEN && cause != Py_None) ch.queue->cause = Py_NewRef(cause);
        ch.queue->break_(dropped, wakes);
        locked.unlock(wakes);
        for (PyObject* o : dropped) Py_DECREF(o);
        return;
    }
    std::string pickled;
    if (cause != Py_None) {
        pickled = pickle_cause(cause);
    }
    Locked<Ring> locked(*ch.ring);
    ch.ring->break_(pickled, wakes);
    locked.unlock(wakes);
}

PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline) {
    const std::string who = ch.describe();
    switch (step) {
        case Step::NotNow:
            if (side == Side::Writer)
                raise("Full", who + " is full, nothing could be put " + seconds(deadline) + ": " +
                                  std::to_string(ch.capacity) + " of " + std::to_string(ch.capacity) + " items inside");
            else
                raise("Empty", who + " is empty, nothing could be got " + seconds(deadline) + "; it is not closed");
            break;
        case Step::Closed: raise("Closed", who + " is closed: nothing can be put into it any more"); break;
        case Step::Drained: raise("Drained", who + " is drained: it is closed and everything in it has been read"); break;
        case Step::Broken: {
            PyObject* cause = stored_cause(ch);
            raise_broken(who + " is broken", cause);
            Py_XDECREF(cause);
            break;
        }
        case Step::TooLarge:
            PyErr_SetString(PyExc_ValueError, (who + " takes items of at most max_bytes=" + std::to_string(ch.max_bytes) +
                                               " bytes, this one has " + std::to_string(size)).c_str());
            break;
        case Step::NoMemory:
            PyErr_SetString(PyExc_MemoryError, (who + ": no shared memory for an item of " + std::to_string(size) +
                                                " bytes").c_str());
            break;
        default: break;  // Interrupted: the error is set already
    }
    return nullptr;
}

bool parse_deadline(PyObject* timeout, Deadline& deadline) {
    if (!timeout || timeout == Py_None) return true;
    double s = (PyFloat_Check(timeout) || PyLong_Check(timeout)) && !PyBool_Check(timeout) ? PyFloat_AsDouble(timeout) : NAN;
    if (PyErr_Occurred()) PyErr_Clear();
    if (!(s >= 0)) {
        PyErr_Format(PyExc_ValueError, "timeout must be None (wait for ever) or a number of seconds >= 0, not %R", timeout);
        return false;
    }
    deadline.at = s == 0 ? 0 : s > 1e9 ? NEVER : now_ns() + int64_t(s * 1e9);
    return true;
}

nb::tuple channel_stats(Channel& ch) {
    if (!ch.usable()) throw nb::python_error();
    auto gate = [](Gate& g) { return double(g.total_wait_ns()) / 1e9; };
    if (ch.queue) {
        LocalQueue& q = *ch.queue;
        Locked<LocalQueue> locked(q);
        auto values = std::make_tuple(q.puts + q.parked, q.takes, q.bytes_in, q.state == BROKEN ? 0 : q.inside(), q.leased,
                                      q.reader_gate.waiting, q.writer_gate.waiting, q.readers, q.writers,
                                      gate(q.reader_gate), gate(q.writer_gate));
        locked.unlock({});
        return std::apply([](auto... v) { return nb::make_tuple(v...); }, values);
    }
    Header& h = ch.ring->header();
    Locked<Ring> locked(*ch.ring);
    auto values = std::make_tuple(h.puts + h.parked, h.takes, h.bytes_in, h.state == BROKEN ? 0 : uint64_t(h.inside()),
                                  h.leased, h.reader_gate.waiting, h.writer_gate.waiting, h.readers, h.writers,
                                  gate(h.reader_gate), gate(h.writer_gate));
    locked.unlock({});
    return std::apply([](auto... v) { return nb::make_tuple(v...); }, values);
}

}  // namespace flowchan
