// Conversion of Python objects to the payloads of items, and back.
//
// Small built-in values have a direct encoding: a tag byte, then the value. These values are None, bool,
// 64-bit int, float, str, bytes, and small tuples of them. `bytes` of any size are stored unchanged. All
// other objects go through flowchan.items.codec (pickle protocol 5 with out-of-band buffers).
//
// Other processes can write to the payload memory. Decoding therefore checks every length, and raises instead
// of reading out of bounds.
#pragma once

#include <Python.h>

#include "views.hpp"

namespace flowchan {

// A Frame that keeps alive the objects into which its pieces point.
struct ObjectFrame : Frame {
    bool leaves = false;  // the item is for another host; set this before encoding
    PyObject* keep = nullptr;
    std::vector<Py_buffer> buffers;
    char header[PIN + 8 + 16 * 16];
    std::vector<char> long_header;
    ObjectFrame() = default;
    ObjectFrame(const ObjectFrame&) = delete;
    ~ObjectFrame();
};

// Encode an object. Return false with a Python error set if it cannot be serialised (C13).
bool encode(PyObject* object, ObjectFrame& frame);

// Decode an item. Return a new reference, or null with a Python error set. All data is copied from `at`,
// except the buffers of a BUFFERS item, which stay in its `block`. `bundle` (borrowed) contains the
// descriptors that came with the item, and is passed to `loads`. `bundle` is null if the item cannot have
// descriptors.
PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block = nullptr,
                 PyObject* bundle = nullptr);

// Plain values are the built-in values with a direct encoding, and tuples, lists and dictionaries of plain
// values. `write_plain` returns the end of the encoded value. It returns null without an error if the value
// is not plain or does not fit.
char* write_plain(PyObject* object, char* from, char* end);
PyObject* read_plain(const char* from, const char* end);

// Return the id of an item's fd bundle, or 0 if it has none.
uint64_t bundle_of(uint64_t kind, const char* at, uint64_t size);

// Call the callback of a PINNED frame whose item was put. The item is now in `channel`, and its id is in the
// channel's `_pinned` list.
void notify_put(const ObjectFrame& frame, PyObject* channel);

// Complete a frame whose large buffers were filled in place in `loan`. The other parts go into the LOAN_HEAD
// bytes that the loan reserved for them. If a buffer outside of the loan does not fit into these bytes,
// return false and change nothing.
constexpr uint64_t LOAN_HEAD = 4096;
bool lay_into(ObjectFrame& frame, const Block& loan);

// A reference on its way from one channel to another (references.hpp). If it does not reach the second
// channel, its output is released.
struct Reference {
    explicit Reference(uint64_t id);
    Reference(const Reference&) = delete;
    ~Reference();
    uint64_t id;
    uint32_t worker;  // see Frame::route
    bool is_put = false;
};

// Set the codec functions. flowchan.items.codec calls this when it is imported.
void set_codec(PyObject* dumps, PyObject* loads);

}  // namespace flowchan
