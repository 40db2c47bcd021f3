// From a Python object to the payload of an item, and back.
//
// Small built-ins (None, bool, int of 64 bits, float, str, bytes, and small tuples of them) have a direct encoding: a
// tag byte, then the value. `bytes` of any size travel as they are. Everything else goes through flowchan.transport.codec
// (pickle protocol 5 with out-of-band buffers). Payloads come from memory that other processes write, so decoding checks
// every length and raises instead of reading outside.
#pragma once

#include <Python.h>

#include "frame.hpp"

namespace flowchan {

// A Frame that keeps alive what its pieces point to.
struct ObjectFrame : Frame {
    PyObject* keep = nullptr;
    std::vector<Py_buffer> buffers;
    char header[16 + 8 * 30];
    std::vector<char> long_header;
    ObjectFrame() = default;
    ObjectFrame(const ObjectFrame&) = delete;
    ~ObjectFrame();
};

// False with a Python error set if the object can't be serialised (C13).
bool encode(PyObject* object, ObjectFrame& frame);

// A new reference, or null with a Python error set. Copies everything it needs out of `at`.
PyObject* decode(uint64_t kind, const char* at, uint64_t size);

// The functions of flowchan.transport.codec, given at import.
void set_codec(PyObject* dumps, PyObject* loads);

}  // namespace flowchan
