// Direct encoding of built-in values, without pickle (see codec.hpp).
//
// Algorithm. A value is a tag byte followed by its content. The content of a tuple is its length, followed by
// its elements. Plain lists and dictionaries are encoded in the same way.
//
// Invariants. DirectWriter never writes past `end`; it returns false if a value does not fit. DirectReader
// checks every length and the nesting depth, because other processes can write to its input.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace flowchan {

constexpr int DEEPEST = 4, DEEPEST_PLAIN = 32;

enum DirectTag : unsigned char {
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
    STR_LONG,  // kind byte (0: ASCII; 1, 2, 4: bytes per character), then u32 number of characters
    LIST,      // LIST and DICT: only if all contents are plain values
    DICT,
};

// Writes a value to the memory range [`p`, `end`). The methods return false for a value that does not fit,
// or whose type has no direct encoding.
struct DirectWriter {
    char* p;
    char* end;
    bool is_plain = false;   // accept lists and dictionaries
    bool is_shared = false;  // the value is in a container that may be referenced more than once

    bool tag(DirectTag t, uint64_t more) {
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
    // Return whether the container has the only reference to this nested value. If there were more
    // references, the value could occur twice or contain itself.
    static bool is_unshared([[maybe_unused]] PyObject* o, [[maybe_unused]] int depth) {
#ifdef Py_GIL_DISABLED
        return false;  // without a GIL, the reference count may change at any time
#else
        return depth == 0 || Py_REFCNT(o) == 1;
#endif
    }
    bool begin(DirectTag t, Py_ssize_t n, PyObject* o, int depth) {
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

// Reads what DirectWriter wrote. If the bytes are damaged, the methods return null without a Python error.
struct DirectReader {
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
    // Read a length of type `Length`, and then that many bytes.
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
        // Another process wrote these bytes, so check them all. Python relies on an ASCII str to contain only
        // ASCII.
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
        std::vector<char> aligned(p, p + n * width);  // the payload may be unaligned
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

inline PyObject* DirectReader::object(int depth) {
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

inline PyObject* DirectReader::tuple(int depth) {
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

inline PyObject* DirectReader::list(int depth) {
    if (!has(4) || depth >= deepest) return nullptr;
    const uint32_t n = raw<uint32_t>();
    if (!has(n)) return nullptr;  // each element takes at least one byte
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

inline PyObject* DirectReader::dict(int depth) {
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

}  // namespace flowchan
