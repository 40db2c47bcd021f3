#include "codec.hpp"
#include "gil.hpp"
#include "raising.hpp"

#include <algorithm>
#include <utility>

namespace flowchan {

namespace {

PyObject* py_dumps = nullptr;
PyObject* py_loads = nullptr;

constexpr int DEEPEST = 4, DEEPEST_PLAIN = 32;
constexpr uint64_t WITHOUT_GIL = 1 << 16;  // copies of at least this release the GIL
constexpr uint64_t ALIGN = 64;
constexpr uint64_t COPIED = 4096;  // smaller buffers arrive as copies, which are cheaper than views

enum Tag : unsigned char {
    NONE,
    TRUE_,
    FALSE_,
    INT8,
    INT32,
    INT64,
    FLOAT,
    TUPLE,
    BYTES_SHORT,
    BYTES_LONG,
    ASCII_SHORT,
    STR_LONG,  // STR_LONG: kind byte (0 ascii, 1, 2, 4 bytes a character), u32 characters
    LIST,      // LIST and DICT: of plain values only
    DICT,
};

// Writes into Frame::small; false when the item does not fit or is not one of the direct types.
struct Writer {
    char* p;
    char* end;
    bool is_plain = false;   // also accepts lists and dictionaries
    bool is_shared = false;  // inside of a value that may have other references

    bool tag(Tag t, uint64_t more) {
        if (uint64_t(end - p) < 1 + more) return false;
        *p++ = char(t);
        return true;
    }
    template <class T>
    void raw(T value) {
        memcpy(p, &value, sizeof value);
        p += sizeof value;
    }
    void raw(const void* at, uint64_t n) {
        memcpy(p, at, n);
        p += n;
    }

    bool integer(PyObject* o) {
        int overflow = 0;
        long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (overflow) return false;
        if (v >= INT8_MIN && v <= INT8_MAX) return tag(INT8, 1) && (raw(int8_t(v)), true);
        if (v >= INT32_MIN && v <= INT32_MAX) return tag(INT32, 4) && (raw(int32_t(v)), true);
        return tag(INT64, 8) && (raw(int64_t(v)), true);
    }
    bool text(PyObject* o) {
        uint64_t n = uint64_t(PyUnicode_GET_LENGTH(o));
        if (PyUnicode_IS_ASCII(o) && n < 256) {
            if (!tag(ASCII_SHORT, 1 + n)) return false;
            raw(uint8_t(n));
            raw(PyUnicode_DATA(o), n);
            return true;
        }
        uint64_t width = uint64_t(PyUnicode_KIND(o));
        if (n > UINT32_MAX || !tag(STR_LONG, 5 + n * width)) return false;
        raw(uint8_t(PyUnicode_IS_ASCII(o) ? 0 : width));
        raw(uint32_t(n));
        raw(PyUnicode_DATA(o), n * width);
        return true;
    }
    bool bytes(PyObject* o) {
        uint64_t n = uint64_t(PyBytes_GET_SIZE(o));
        if (n < 256) {
            if (!tag(BYTES_SHORT, 1 + n)) return false;
            raw(uint8_t(n));
        } else {
            if (n > UINT32_MAX || !tag(BYTES_LONG, 4 + n)) return false;
            raw(uint32_t(n));
        }
        raw(PyBytes_AS_STRING(o), n);
        return true;
    }
    bool object(PyObject* o, int depth) {
        if (PyLong_CheckExact(o)) return integer(o);
        if (PyUnicode_CheckExact(o)) return text(o);
        if (PyFloat_CheckExact(o)) return tag(FLOAT, 8) && (raw(PyFloat_AS_DOUBLE(o)), true);
        if (o == Py_None) return tag(NONE, 0);
        if (o == Py_True) return tag(TRUE_, 0);
        if (o == Py_False) return tag(FALSE_, 0);
        if (PyBytes_CheckExact(o)) return bytes(o);
        if (is_plain && PyDict_CheckExact(o)) return dict(o, depth);
        if (is_plain && PyList_CheckExact(o)) return list(o, depth);
        return PyTuple_CheckExact(o) && tuple(o, depth);
    }
    [[gnu::always_inline]] bool tuple(PyObject* o, int depth) {
        const int deepest = is_plain ? DEEPEST_PLAIN : DEEPEST;
        if (depth == deepest || PyTuple_GET_SIZE(o) > 255 || !tag(TUPLE, 1)) return false;
        const bool before = std::exchange(is_shared, is_shared || !is_unshared(o, depth));
        Py_ssize_t n = PyTuple_GET_SIZE(o);
        raw(uint8_t(n));
        for (Py_ssize_t i = 0; i < n; ++i)
            if (!object(PyTuple_GET_ITEM(o, i), depth + 1)) return false;
        is_shared = before;
        return true;
    }
    // Return whether a nested value has no other reference. Otherwise it could occur twice, or contain
    // itself.
    static bool is_unshared([[maybe_unused]] PyObject* o, [[maybe_unused]] int depth) {
#ifdef Py_GIL_DISABLED
        return false;  // it may change during the call
#else
        return depth == 0 || Py_REFCNT(o) == 1;
#endif
    }
    bool begin(Tag t, Py_ssize_t n, PyObject* o, int depth) {
        if (depth == DEEPEST_PLAIN || n > UINT32_MAX || is_shared || !is_unshared(o, depth) || !tag(t, 4))
            return false;
        raw(uint32_t(n));
        return true;
    }
    bool list(PyObject* o, int depth) {
        const Py_ssize_t n = PyList_GET_SIZE(o);
        if (!begin(LIST, n, o, depth)) return false;
        for (Py_ssize_t i = 0; i < n; ++i)
            if (!object(PyList_GET_ITEM(o, i), depth + 1)) return false;
        return true;
    }
    bool dict(PyObject* o, int depth) {
        if (!begin(DICT, PyDict_GET_SIZE(o), o, depth)) return false;
        PyObject *key, *value;
        for (Py_ssize_t at = 0; PyDict_Next(o, &at, &key, &value);)
            if (!object(key, depth + 1) || !object(value, depth + 1)) return false;
        return true;
    }
};

struct Reader {
    const char* p;
    const char* end;
    int deepest = DEEPEST;

    bool has(uint64_t n) const { return uint64_t(end - p) >= n; }
    template <class T>
    T raw() {
        T value;
        memcpy(&value, p, sizeof value);
        p += sizeof value;
        return value;
    }
    PyObject* object(int depth);
    PyObject* tuple(int depth);
    PyObject* list(int depth);
    PyObject* dict(int depth);
    template <class Int>
    PyObject* integer() {
        static_assert(sizeof(Int) <= sizeof(long));
        return has(sizeof(Int)) ? PyLong_FromLong(raw<Int>()) : nullptr;
    }
    PyObject* real() { return has(sizeof(double)) ? PyFloat_FromDouble(raw<double>()) : nullptr; }
    // Read bytes that begin with their length, a number of this type.
    template <class Length>
    PyObject* bytes() {
        return has(sizeof(Length)) ? bytes(raw<Length>()) : nullptr;
    }
    PyObject* bytes(uint64_t n) {
        if (!has(n)) return nullptr;
        PyObject* o = PyBytes_FromStringAndSize(p, Py_ssize_t(n));
        p += n;
        return o;
    }
    PyObject* ascii(uint64_t n) {
        if (!has(n)) return nullptr;
        // Checked, because another process wrote it: an "ASCII" string with other bytes would be a broken
        // object.
        if (!std::all_of(p, p + n, [](char c) { return static_cast<unsigned char>(c) < 128; }))
            return nullptr;
        PyObject* o = PyUnicode_New(Py_ssize_t(n), 127);
        if (o) memcpy(PyUnicode_DATA(o), p, n);
        p += n;
        return o;
    }
    PyObject* text() {
        if (!has(5)) return nullptr;
        uint64_t width = raw<uint8_t>(), n = raw<uint32_t>();
        if (width == 0) return ascii(n);
        if ((width != 1 && width != 2 && width != 4) || !has(n * width)) return nullptr;
        std::vector<char> aligned(p, p + n * width);  // the payload may have any address
        p += n * width;
        if (width == 4)
            for (uint64_t i = 0; i < n; ++i) {
                uint32_t c;
                memcpy(&c, aligned.data() + 4 * i, 4);
                if (c > 0x10ffff) return nullptr;
            }
        return PyUnicode_FromKindAndData(int(width), aligned.data(), Py_ssize_t(n));
    }
};

PyObject* Reader::object(int depth) {
    if (!has(1)) return nullptr;
    switch (raw<uint8_t>()) {
        case NONE:
            Py_RETURN_NONE;
        case TRUE_:
            Py_RETURN_TRUE;
        case FALSE_:
            Py_RETURN_FALSE;
        case INT8:
            return integer<int8_t>();
        case INT32:
            return integer<int32_t>();
        case INT64:
            return integer<int64_t>();
        case FLOAT:
            return real();
        case BYTES_SHORT:
            return bytes<uint8_t>();
        case BYTES_LONG:
            return bytes<uint32_t>();
        case ASCII_SHORT:
            return has(1) ? ascii(raw<uint8_t>()) : nullptr;
        case STR_LONG:
            return text();
        case TUPLE:
            return tuple(depth);
        case LIST:
            return list(depth);
        case DICT:
            return dict(depth);
        default:
            return nullptr;
    }
}

PyObject* Reader::tuple(int depth) {
    if (!has(1) || depth == deepest) return nullptr;
    const uint8_t n = raw<uint8_t>();
    PyObject* made = PyTuple_New(n);
    for (uint8_t i = 0; made && i < n; ++i) {
        PyObject* o = object(depth + 1);
        if (!o)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, o);
    }
    return made;
}

PyObject* Reader::list(int depth) {
    if (!has(4) || depth >= deepest) return nullptr;
    const uint32_t n = raw<uint32_t>();
    if (!has(n)) return nullptr;  // each takes a byte at least
    PyObject* made = PyList_New(n);
    for (uint32_t i = 0; made && i < n; ++i) {
        PyObject* o = object(depth + 1);
        if (!o)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, o);
    }
    return made;
}

PyObject* Reader::dict(int depth) {
    if (!has(4) || depth >= deepest) return nullptr;
    const uint32_t n = raw<uint32_t>();
    PyObject* made = PyDict_New();
    for (uint32_t i = 0; made && i < n; ++i) {
        PyObject* key = object(depth + 1);
        PyObject* value = key ? object(depth + 1) : nullptr;
        if (!value || PyDict_SetItem(made, key, value) != 0) Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return made;
}

void copy(char* to, const char* from, uint64_t n) {
    if (n < WITHOUT_GIL) {
        memcpy(to, from, n);
        return;
    }
    WithoutGil without;
    memcpy(to, from, n);
}

// Pickle an item. `dumps` gets True if the item leaves this host. Its result is one of these:
// - the pickle
// - a list of the pickle and its out-of-band buffers
// - a tuple: id, such a list, callback or None, id of the fd bundle or 0, descriptors in the bundle
// The callback gets the channel once the item has been put (see `notify_put`).
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
    memcpy(header, &id, 8);  // without an id, n takes its place
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

// Return a buffer of an item: in place, if the block stays valid, else a copy. It is read-only in either
// case.
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

// Call `loads` with the pickle and its buffers. For PINNED and BUNDLE a tuple contains them, a view that
// keeps the item alive (None where this reader may not), and the fd bundle. The buffers of such an item are
// copied, so that a kept buffer does not keep the item.
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
    Writer writer{frame.small, frame.small + Frame::SMALL};
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
    return encode_pickle(object, frame);
}

PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block,
                 PyObject* bundle) {
    if (kind == DIRECT) {
        Reader reader{at, at + size};
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
    return kind == BUFFERS || needs_its_slot(kind) ? decode_with_buffers(kind, at, size, block, bundle)
                                                   : damaged();
}

char* write_plain(PyObject* object, char* from, char* end) {
    Writer writer{from, end, true};
    return writer.object(object, 0) ? writer.p : nullptr;
}

PyObject* read_plain(const char* from, const char* end) {
    Reader reader{from, end, DEEPEST_PLAIN};
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
    if (!none)
        PyErr_WriteUnraisable(put);  // the item is in the channel: it is too late for an error of the put
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
        memcpy(table.data() + 8 + 16 * (i - 1), &piece.offset,
               8);  // after the count, an offset and a size for each
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
