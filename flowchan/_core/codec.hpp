// Conversion between Python objects and the payloads of items.
//
// Small built-in values have a direct encoding, which is a tag byte and the value. They are None, bool,
// 64-bit int, float, str, bytes, and small tuples of these. `bytes` of any size are stored unchanged. All
// other objects go through flowchan.items.codec (pickle protocol 5 with out-of-band buffers). Other processes
// can write to the payload memory. So decoding checks every length, and raises instead of reading out of
// bounds.
#pragma once

#include <Python.h>

#include "views.hpp"

namespace flowchan {

// A Frame that keeps alive the objects to which its pieces point.
struct ObjectFrame : Frame {
    bool leaves = false;  // the item goes to another host; set this before encoding
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

// Decode an item. Return a new reference, or null with a Python error set. The result copies all data from
// `at`, except the buffers of a BUFFERS item in a `block`. `bundle` (borrowed) is passed to `loads`: the
// descriptors that came with the item, or null if it cannot have any.
PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block = nullptr,
                 PyObject* bundle = nullptr);

// Plain values are the built-in values with a direct encoding, and tuples, lists and dictionaries of plain
// values. `write_plain` returns the end of the encoded value. If the value does not fit or is not plain, it
// returns null and sets no error.
char* write_plain(PyObject* object, char* from, char* end);
PyObject* read_plain(const char* from, const char* end);

// Return the id of the fd bundle of an item, or 0 if there is none.
uint64_t bundle_of(uint64_t kind, const char* at, uint64_t size);

// Call the callback of a PINNED frame after its item was put: it is in `channel` and in its list of `_pinned`
// ids.
void notify_put(const ObjectFrame& frame, PyObject* channel);

// Complete a frame whose large buffers were filled in place in `loan`: write the remaining parts into the
// LOAN_HEAD bytes reserved there. If a buffer outside of the loan is too large for that, return false and
// change nothing.
constexpr uint64_t LOAN_HEAD = 4096;
bool lay_into(ObjectFrame& frame, const Block& loan);

// Set the functions of flowchan.items.codec, which registers them when it is imported.
void set_codec(PyObject* dumps, PyObject* loads);

}  // namespace flowchan
