// The errors of channel calls, and the stored cause of a broken channel.
#include "raising.hpp"
#include "wire.hpp"

#include <sys/mman.h>
#include <cstring>

namespace flowchan {

namespace {

PyObject* error_class(const char* name) {
    static PyObject* module = PyImport_ImportModule("flowchan.errors");
    return module ? PyObject_GetAttrString(module, name) : nullptr;
}

PyObject* kept_class(const char* name) {
    nb::error_scope kept;
    return error_class(name);
}

// Raise Broken with the cause from abort(), which may be null.
void raise_broken(const std::string& message, PyObject* cause) {
    PyObject* cls = error_class("Broken");
    PyObject* error = cls ? PyObject_CallFunction(cls, "s", message.c_str()) : nullptr;
    Py_XDECREF(cls);
    if (!error) return;
    if (cause) PyException_SetCause(error, Py_NewRef(cause));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
}

std::string amount(uint64_t bytes) {
    char text[32];
    const bool large = bytes >= 1'000'000;
    snprintf(text, sizeof text, large ? "%.1f MB" : "%.1f KB", double(bytes) / (large ? 1e6 : 1e3));
    return text;
}

// Return a WorkerDied error, the cause of Broken for a channel whose counted writer has died. Return null
// with a Python error set if that fails.
PyObject* writer_died(const std::string& description, uint64_t pid) {
    const std::string text =
        "process " + std::to_string(pid) + " ended without closing its counted writer of " + description;
    nb::object cls = nb::steal(error_class("WorkerDied"));
    if (!cls.is_valid()) return nullptr;
    nb::object arguments = nb::make_tuple(text.c_str()), keywords = nb::dict();
    keywords["pid"] = pid;
    return PyObject_Call(cls.ptr(), arguments.ptr(), keywords.ptr());
}

// Describe how full a channel is, and which processes keep its memory in use.
std::string fill(Channel& ch) {
    std::vector<Held> held;
    const Counts counts = locked(ch, [&](auto& transport, Wakes&) {
        held = transport.held();
        return transport.counts();
    });
    std::string text = std::to_string(counts.inside) + " of " + std::to_string(ch.capacity) + " items inside";
    if (ch.max_bytes == UINT64_MAX) return text;
    const uint64_t bytes = counts.bytes_inside;
    if (bytes >= 1000) text += ", " + amount(bytes) + " of max_bytes=" + amount(ch.max_bytes);
    for (const Held& one : held)
        text += "; process " + std::to_string(one.pid) + " holds " + std::to_string(one.blocks) +
                (one.blocks == 1 ? " block, " : " blocks, ") + amount(one.bytes) +
                " in arrays and tensors that it received or has on loan";
    if (!held.empty()) text += "; keep copies instead (array.copy()), or use a larger max_bytes";
    return text;
}

// If this process lacks address space for an item, return a note for the error. Otherwise return "".
std::string address_space_note(Channel& ch, uint64_t size) {
    const bool copies = ch.with(Each{[](LocalQueue&) { return false; }, [](Ring&) { return true; }});
    if (!copies || size < (1 << 20)) return "";
    // A ring maps all of its blocks again when it grows, so the probe must have room for them as well.
    const uint64_t all =
        size + locked(ch, [](auto& transport, Wakes&) { return transport.counts().bytes_inside; });
    void* probe = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (probe != MAP_FAILED) return munmap(probe, all), "";
    return "; this process has no address space left for an item of " + amount(size) +
           "; raise its limit (ulimit -v)";
}

std::string seconds(Deadline deadline) { return deadline.now_only() ? "now" : "within the timeout"; }

// Return the cause for Broken. A `threads` channel stores the exception itself, and a `processes` channel
// stores it pickled.
PyObject* stored_cause(LocalQueue& queue) { return Py_XNewRef(queue.cause); }

PyObject* stored_cause(Ring& ring) {
    Wakes wakes;
    Locked locked(ring);
    std::string pickled = ring.cause();
    locked.unlock(wakes);
    if (pickled.empty()) return nullptr;
    PyObject* cause = decode(uint64_t(pickled[0]), pickled.data() + 1, pickled.size() - 1);
    if (!cause) PyErr_Clear();
    return cause;
}

// Problems that do not show in the channel's state. A `threads` channel has no such problems.
struct Fault {
    uint64_t cut_off = 0;  // process whose death ended the channel
    bool damaged = false;
    bool map_incomplete = false;  // part of the channel could not be mapped into this process
};

Fault fault(Channel& ch) {
    return ch.with(Each{[](LocalQueue&) { return Fault{}; },
                        [](Ring& ring) {
                            const Header& h = ring.header();
                            return Fault{h.state == CLOSED ? h.cut_off : 0, h.damaged != 0,
                                         ring.is_map_incomplete()};
                        }});
}

}  // namespace

void raise(const char* name, const std::string& message) {
    PyObject* cls = error_class(name);
    if (!cls) return;
    PyErr_SetString(cls, message.c_str());
    Py_DECREF(cls);
}

void raise_refused(Channel& ch, int error) {
    const std::string description = ch.describe();
    std::string why = std::string("they could not be sent (") + strerror(error) + ")";
    if (error == EBADF)
        why =
            "this process has no socket for the channel; pass the channel to this process by fork, as an "
            "argument or through a channel, and allow AF_UNIX sockets";
    if (error == E2BIG) why = "an item can carry at most 126 of them; spread them over several items";
    if (error == EAGAIN || error == ENOBUFS) why = "too many are in transit; receive some items first";
    if (error == ETOOMANYREFS)
        why =
            "this user has too many descriptors in transit; receive some items first, or raise the limit "
            "(ulimit -n)";
    raise("ChannelError", description + " cannot carry the channels and shared tensors in this item: " + why);
}

void raise_not_transferable(Channel& ch, PyObject* item) {
    PyErr_Format(PyExc_TypeError,
                 "%s cannot carry this %s: the item contains a channel, a port or a shared tensor that only "
                 "processes on one machine can share; create that channel with across='hosts', or put "
                 "tensor.clone()",
                 ch.describe().c_str(), Py_TYPE(item)->tp_name);
}

namespace {

// Return the kind and the payload, or "" for an exception that cannot be sent.
std::string pickled(PyObject* exception) {
    ObjectFrame frame;
    frame.leaves = true;  // a cause has no slot that could keep device memory alive
    const bool is_encoded = exception && encode(exception, frame);
    PyErr_Clear();
    if (!is_encoded || frame.bundle || frame.size >= MOST_CAUSE)
        return "";  // only an item can have descriptors
    std::string all(1 + frame.size, char(frame.kind));
    frame.write(all.data() + 1);
    return all;
}

}  // namespace

Cause pickle_cause(PyObject* cause) {
    const std::string whole = pickled(cause);
    if (!whole.empty() && whole.size() <= Taken::LOCAL) return {whole, ""};
    nb::object words = nb::steal(PyUnicode_FromFormat("%s: %.8000S", Py_TYPE(cause)->tp_name, cause));
    PyErr_Clear();
    nb::object replacement =
        words ? nb::steal(PyObject_CallOneArg(PyExc_RuntimeError, words.ptr())) : nb::object();
    const std::string text = pickled(replacement.ptr());
    return whole.empty() ? Cause{text, ""} : Cause{whole, text};
}

bool is_out_of_time() {
    static PyObject *const empty = kept_class("Empty"), *const full = kept_class("Full");
    PyObject* type = PyErr_Occurred();
    return type && (type == empty || type == full);
}

PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline) {
    const std::string description = ch.describe();
    switch (step) {
        case Step::NotNow:
            if (side == Side::Writer)
                raise("Full", description + " is full; no item could be put " + seconds(deadline) + ": " +
                                  fill(ch) + address_space_note(ch, size));
            else
                raise("Empty", description + " is empty; no item could be taken " + seconds(deadline) +
                                   "; the channel is " +
                                   (ch.with([](auto& transport) { return transport.seen_state(); }) == OPEN
                                        ? "not closed"
                                        : "closed, but a reader may give back its leased items"));
            break;
        case Step::Closed:
            raise("Closed", description + " is closed; no more items can be put");
            break;
        case Step::Drained:
            raise("Drained", description + " is drained: it is closed, and all its items have been read");
            break;
        case Step::Broken: {
            const auto [cut_off, damaged, _] = fault(ch);
            PyObject* cause = cut_off ? writer_died(description, cut_off)
                                      : ch.with([](auto& transport) { return stored_cause(transport); });
            raise_broken(
                description + (damaged   ? " is broken: its shared memory is damaged"
                               : cut_off ? " is broken: a writer died, and all its items have been read"
                                         : " is broken"),
                cause);
            Py_XDECREF(cause);
            break;
        }
        case Step::TooLarge:
            PyErr_SetString(PyExc_ValueError, (description + ": item must have at most max_bytes=" +
                                               std::to_string(ch.max_bytes) + " bytes, got " +
                                               std::to_string(size) + "; use a larger max_bytes")
                                                  .c_str());
            break;
        case Step::NoMemory:
            if (fault(ch).map_incomplete) {
                PyErr_SetString(
                    PyExc_MemoryError,
                    (description + " has grown, but this process has no address space left to map "
                                   "it; raise the limit (ulimit -v)")
                        .c_str());
                break;
            }
            PyErr_SetString(PyExc_MemoryError,
                            (description + ": no shared memory for an item of " + std::to_string(size) +
                             " bytes: " + fill(ch) + address_space_note(ch, size))
                                .c_str());
            break;
        case Step::PortClosed:
            PyErr_SetString(PyExc_ValueError,
                            ("this port of " + description + " was closed; open another one").c_str());
            break;
        default:
            break;  // Interrupted: the error is already set
    }
    return nullptr;
}

nb::object take_error() {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return nb::steal(error);
}

void raise_again(const nb::object& error) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void add_to_error(const char* name, PyObject* value) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!value || PyObject_SetAttrString(error, name, value) != 0) PyErr_Clear();
    Py_XDECREF(value);
    PyErr_Restore(type, error, trace);
}

}  // namespace flowchan
