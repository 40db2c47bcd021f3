// Conversion between Python objects and the payloads of items.
//
// Small built-ins (None, bool, 64-bit int, float, str, bytes, and small tuples of them) have a direct
// encoding: a tag byte, followed by the value. `bytes` of any size are copied unchanged. All other objects go
// through flowchan.items.codec (pickle protocol 5 with out-of-band buffers). Other processes can write to the
// memory of payloads, so decoding checks every length, and raises instead of reading out of bounds.
#pragma once

#include <Python.h>

#include "views.hpp"

namespace flowchan {

// A Frame that keeps the objects behind its pieces alive.
struct ObjectFrame : Frame {
    bool leaves = false;  // the item goes to another host; set before encoding
    PyObject* keep = nullptr;
    std::vector<Py_buffer> buffers;
    char header[PIN + 8 + 16 * 16];
    std::vector<char> long_header;
    ObjectFrame() = default;
    ObjectFrame(const ObjectFrame&) = delete;
    ~ObjectFrame();
};

// Return false with a Python error set if the object cannot be serialised (C13).
bool encode(PyObject* object, ObjectFrame& frame);

// Return a new reference, or null with a Python error set. The result contains copies of all data in `at`,
// except for the buffers of a BUFFERS item in a `block`. `bundle`: the descriptors that came with the item
// (borrowed), which are passed to `loads`; null if the item cannot have any.
PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block = nullptr,
                 PyObject* bundle = nullptr);

// Plain values are the built-in values that have a direct encoding, and tuples, lists and dictionaries of
// them. `write_plain` returns the end of the encoded value. If the value does not fit or is not plain, it
// returns null without an error.
char* write_plain(PyObject* object, char* from, char* end);
PyObject* read_plain(const char* from, const char* end);

// Return the id of an item's fd bundle, or 0 if it has none.
uint64_t bundle_of(uint64_t kind, const char* at, uint64_t size);

// Call the callback of this PINNED frame, because its item is now in `channel` and among its `_pinned` ids.
void notify_put(const ObjectFrame& frame, PyObject* channel);

// Complete a frame whose large buffers were filled in place in `loan`: write its other parts into the
// LOAN_HEAD bytes reserved there. Return false and change nothing if they do not fit, because a buffer
// outside of the loan is too large.
constexpr uint64_t LOAN_HEAD = 4096;
bool lay_into(ObjectFrame& frame, const Block& loan);

// Set the functions of flowchan.items.codec, which calls this when it is imported.
void set_codec(PyObject* dumps, PyObject* loads);

}  // namespace flowchan
