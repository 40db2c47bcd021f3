#include "codec.hpp"
#include "direct_values.hpp"
#include "gil.hpp"
#include "raising.hpp"
#include "references.hpp"

namespace flowchan {

namespace {

PyObject* py_dumps = nullptr;
PyObject* py_loads = nullptr;

constexpr uint64_t WITHOUT_GIL = 1 << 16;  // copies of at least this size release the GIL
constexpr uint64_t ALIGN = 64;
constexpr uint64_t COPIED = 4096;  // smaller buffers are copied, because a copy costs less than a view

void copy(char* to, const char* from, uint64_t n) {
    if (n < WITHOUT_GIL) {
        memcpy(to, from, n);
        return;
    }
    WithoutGil without;
    memcpy(to, from, n);
}

// Pickle an item. The second argument of `dumps` is True if the item goes to another host. `dumps` returns
// one of these:
// - the pickle
// - a list of the pickle and its out-of-band buffers
// - a tuple of an id, a list as above, a callback or None, the id of the fd bundle or 0, and its descriptors.
// The callback is called with the channel after the put (see `notify_put`).
bool encode_pickle(PyObject* object, ObjectFrame& frame) {
    frame.keep = frame.leaves ? PyObject_CallFunctionObjArgs(py_dumps, object, Py_True, nullptr)
                              : PyObject_CallOneArg(py_dumps, object);
    if (!frame.keep) return false;
    if (PyBytes_CheckExact(frame.keep)) {
        frame.kind = PICKLE;
        frame.size = uint64_t(PyBytes_GET_SIZE(frame.keep));
        frame.one = {PyBytes_AS_STRING(frame.keep), frame.size, 0};
        return true;
    }
    uint64_t id = 0, pin = 0;
    PyObject* list = frame.keep;
    if (PyTuple_CheckExact(frame.keep)) {
        id = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame.keep, 0));
        list = PyTuple_GET_ITEM(frame.keep, 1);
        frame.bundle = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame.keep, 3));
        PyObject* descriptors = PyTuple_GET_ITEM(frame.keep, 4);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(descriptors); ++i)
            frame.descriptors.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(descriptors, i))));
        pin = PIN;
    }
    frame.kind = !pin ? BUFFERS : PyTuple_GET_ITEM(frame.keep, 2) == Py_None ? BUNDLE : PINNED;
    uint64_t n = uint64_t(PyList_GET_SIZE(list)), head = pin + 8 + 16 * n;
    char* header = frame.header;
    if (head > sizeof frame.header) {
        frame.long_header.resize(head);
        header = frame.long_header.data();
    }
    frame.buffers.reserve(n);
    memcpy(header, &id, 8);  // without an id, the frame begins with n
    memcpy(header + 8, &frame.bundle, 8);
    frame.pieces.push_back({header, head, 0});
    header += pin;
    memcpy(header, &n, 8);
    uint64_t at = head - pin;
    for (uint64_t i = 0; i < n; ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyList_GET_ITEM(list, Py_ssize_t(i)), &view, PyBUF_SIMPLE) != 0) return false;
        frame.buffers.push_back(view);
        const uint64_t size = uint64_t(view.len);
        at = (at + ALIGN - 1) / ALIGN * ALIGN;
        memcpy(header + 8 + 16 * i, &at, 8);
        memcpy(header + 16 + 16 * i, &size, 8);
        frame.pieces.push_back({view.buf, size, pin + at});
        at += size;
    }
    frame.size = pin + at;
    return true;
}

PyObject* damaged() {
    if (!PyErr_Occurred()) raise("Broken", "an item in shared memory is damaged: its lengths are impossible");
    return nullptr;
}

// Return one read-only buffer of an item. It is a view if `block` keeps its memory valid, and otherwise a
// copy.
PyObject* buffer_at(const char* at, uint64_t size, const std::shared_ptr<Block>& block) {
    if (size < COPIED) return PyBytes_FromStringAndSize(at, Py_ssize_t(size));
    return (block ? View::over(block, at, size) : View::copy_of(at, size)).release().ptr();
}

// Return a list of the pickle and its buffers.
PyObject* decode_buffers(const char* at, uint64_t size, const std::shared_ptr<Block>& block) {
    uint64_t n;
    if (size < 8) return damaged();
    memcpy(&n, at, 8);
    if (n == 0 || n > (size - 8) / 16) return damaged();
    PyObject* args = PyList_New(0);
    for (uint64_t i = 0; args && i < n; ++i) {
        uint64_t from, length;
        memcpy(&from, at + 8 + 16 * i, 8);
        memcpy(&length, at + 16 + 16 * i, 8);
        if (from > size || length > size - from) {
            Py_DECREF(args);
            return damaged();
        }
        PyObject* o = i == 0 ? PyBytes_FromStringAndSize(at + from, Py_ssize_t(length))
                             : buffer_at(at + from, length, block);
        if (!o || PyList_Append(args, o) != 0) Py_CLEAR(args);
        Py_XDECREF(o);
    }
    return args;
}

// Call `loads` with the pickle and its buffers. For PINNED and BUNDLE, pass a tuple of a view, the list, and
// the fd bundle. The view keeps the item alive. For a reader that must not keep the item alive, the tuple has
// None instead of the view. The buffers of PINNED and BUNDLE items are copied, because a user who keeps one
// buffer would otherwise keep the whole item alive.
PyObject* decode_with_buffers(uint64_t kind, const char* at, uint64_t size,
                              const std::shared_ptr<Block>& block, PyObject* bundle) {
    const uint64_t pin = needs_its_slot(kind) ? PIN : 0;
    if (size < pin) return damaged();
    PyObject* args = decode_buffers(at + pin, size - pin, pin ? nullptr : block);
    if (args && pin) {
        nb::object keep = block ? View::over(block, at, pin) : nb::none();
        PyObject* all = PyTuple_Pack(3, keep.ptr(), args, bundle ? bundle : Py_None);
        Py_SETREF(args, all);
    }
    PyObject* result = args ? PyObject_CallOneArg(py_loads, args) : nullptr;
    Py_XDECREF(args);
    return result;
}

}  // namespace

ObjectFrame::~ObjectFrame() {
    for (Py_buffer& view : buffers) PyBuffer_Release(&view);
    Py_XDECREF(keep);
}

bool encode(PyObject* object, ObjectFrame& frame) {
    DirectWriter writer{frame.small, frame.small + Frame::SMALL};
    if (writer.object(object, 0)) {
        frame.size = frame.small_size = uint64_t(writer.p - frame.small);
        return true;
    }
    if (PyBytes_CheckExact(object)) {
        frame.kind = BYTES;
        frame.size = uint64_t(PyBytes_GET_SIZE(object));
        frame.one = {PyBytes_AS_STRING(object), frame.size, 0};
        frame.keep = Py_NewRef(object);
        return true;
    }
    static PyObject* const reference_type = nb::type<Reference>().ptr();
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == reference_type) {
        const Reference* reference = nb::inst_ptr<Reference>(object);
        frame.kind = REFERENCE;
        frame.size = sizeof reference->id;
        frame.one = {&reference->id, frame.size, 0};
        frame.keep = Py_NewRef(object);
        return true;
    }
    return encode_pickle(object, frame);
}

Reference::Reference(uint64_t id) : id(id), worker(references().move(id, nullptr) - 1) {}

Reference::~Reference() {
    if (!is_put) references().release(id);
}

PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block,
                 PyObject* bundle) {
    if (kind == DIRECT) {
        DirectReader reader{at, at + size};
        PyObject* o = reader.object(0);
        return o ? o : damaged();
    }
    if (kind == BYTES) {
        PyObject* o = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size));
        if (o) copy(PyBytes_AS_STRING(o), at, size);
        return o;
    }
    if (kind == PICKLE) {
        PyObject* bytes = PyBytes_FromStringAndSize(at, Py_ssize_t(size));
        PyObject* o = bytes ? PyObject_CallOneArg(py_loads, bytes) : nullptr;
        Py_XDECREF(bytes);
        return o;
    }
    if (kind == REFERENCE && size == sizeof(uint64_t)) {
        uint64_t id;
        memcpy(&id, at, sizeof id);
        return nb::cast(new Reference(id), nb::rv_policy::take_ownership).release().ptr();
    }
    return kind == BUFFERS || needs_its_slot(kind) ? decode_with_buffers(kind, at, size, block, bundle)
                                                   : damaged();
}

char* write_plain(PyObject* object, char* from, char* end) {
    DirectWriter writer{from, end, true};
    return writer.object(object, 0) ? writer.p : nullptr;
}

PyObject* read_plain(const char* from, const char* end) {
    DirectReader reader{from, end, DEEPEST_PLAIN};
    PyObject* o = reader.object(0);
    return o ? o : damaged();
}

uint64_t bundle_of(uint64_t kind, const char* at, uint64_t size) {
    uint64_t id = 0;
    if (needs_its_slot(kind) && size >= PIN) memcpy(&id, at + 8, 8);
    return id;
}

void notify_put(const ObjectFrame& frame, PyObject* channel) {
    PyObject* put = PyTuple_GET_ITEM(frame.keep, 2);
    PyObject* none = PyObject_CallOneArg(put, channel);
    // the item is already in the channel, so the put cannot fail any more
    if (!none) PyErr_WriteUnraisable(put);
    Py_XDECREF(none);
}

bool lay_into(ObjectFrame& frame, const Block& loan) {
    std::vector<Frame::Piece> rest(frame.pieces.begin(), frame.pieces.begin() + 1);
    char* header = static_cast<char*>(const_cast<void*>(frame.pieces[0].at));
    std::vector<char> table(header, header + frame.pieces[0].size);
    uint64_t at = table.size();
    for (size_t i = 1; i < frame.pieces.size(); ++i) {
        Frame::Piece piece = frame.pieces[i];
        const char* from = static_cast<const char*>(piece.at);
        if (from >= loan.begin && from < loan.begin + loan.size) {
            piece.offset = uint64_t(from - loan.begin);
        } else {
            piece.offset = (at + ALIGN - 1) / ALIGN * ALIGN;
            at = piece.offset + piece.size;
            rest.push_back(piece);
        }
        memcpy(table.data() + 8 + 16 * (i - 1), &piece.offset, 8);
    }
    if (at > LOAN_HEAD) return false;
    memcpy(header, table.data(), table.size());
    for (const Frame::Piece& piece : rest)
        memcpy(const_cast<char*>(loan.begin) + piece.offset, piece.at, piece.size);
    frame.size = loan.size;
    return true;
}

void set_codec(PyObject* dumps, PyObject* loads) {
    Py_XSETREF(py_dumps, Py_NewRef(dumps));
    Py_XSETREF(py_loads, Py_NewRef(loads));
}

}  // namespace flowchan
