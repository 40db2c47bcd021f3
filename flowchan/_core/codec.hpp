// From a Python object to the payload of an item, and back.
//
// Small built-ins (None, bool, int of 64 bits, float, str, bytes, and small tuples of them) have a direct
// encoding: a tag byte, then the value. `bytes` of any size travel as they are. Everything else goes through
// flowchan.items.codec (pickle protocol 5 with out-of-band buffers). Payloads come from memory that other
// processes write, so decoding checks every length and raises instead of reading outside.
#pragma once

#include <Python.h>

#include "views.hpp"

namespace flowchan {

// A Frame that keeps alive what its pieces point to.
struct ObjectFrame : Frame {
    bool leaves = false;  // to another host; set before encoding
    PyObject* keep = nullptr;
    std::vector<Py_buffer> buffers;
    char header[PIN + 8 + 16 * 16];
    std::vector<char> long_header;
    ObjectFrame() = default;
    ObjectFrame(const ObjectFrame&) = delete;
    ~ObjectFrame();
};

// False with a Python error set if the object can't be serialised (C13).
bool encode(PyObject* object, ObjectFrame& frame);

// A new reference, or null with a Python error set. Copies everything it needs out of `at`; but of BUFFERS in
// a `block` only the pickle.
// `parcel`: what `loads` is given of the descriptors that came with the item, borrowed; null where there
// can't be any.
PyObject* decode(uint64_t kind, const char* at, uint64_t size, const std::shared_ptr<Block>& block = nullptr,
                 PyObject* parcel = nullptr);

// Plain values: the built-in ones that have a direct encoding, and tuples, lists and dictionaries of such.
// Returns where it ends; null, without an error: it does not fit or is not plain.
char* write_plain(PyObject* object, char* from, char* end);
PyObject* read_plain(const char* from, const char* end);

// The id of an item's parcel, 0 if it has none.
uint64_t parcel_of(uint64_t kind, const char* at, uint64_t size);

// Tells whoever pinned something to this PINNED frame that it is in `channel` now, and so among its `_pinned`
// ids.
void tell_put(const ObjectFrame& frame, PyObject* channel);

// A frame whose buffers lie in `loan`, filled in place: writes the rest before them, in the LOAN_HEAD bytes
// that are kept free there. False, with nothing changed, when that does not fit or some buffer lies elsewhere
// and is too large.
constexpr uint64_t LOAN_HEAD = 4096;
bool lay_into(ObjectFrame& frame, const Block& loan);

// What flowchan.items.codec gives at import.
void set_codec(PyObject* dumps, PyObject* loads);

}  // namespace flowchan
