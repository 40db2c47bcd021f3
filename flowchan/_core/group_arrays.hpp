// Access to the memory of NumPy arrays and torch tensors, without importing either library.
#pragma once

#include <Python.h>

#include "kernels.hpp"

namespace flowchan {

// The memory of a contiguous array, kept alive by this object. Create and destroy it only with the GIL held.
class Array {
  public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
        if (view_.obj) PyBuffer_Release(&view_);
        Py_XDECREF(kept_);
    }
    // Returns false if the object is not a contiguous array in host memory. An error is set only if reading a
    // property has failed.
    bool read(PyObject* object);
    bool read_bytes(PyObject* object);  // reads bytes or a bytearray

    void* data = nullptr;
    size_t bytes = 0, count = 0;
    Element element = Element::Raw;
    bool writable = true;
    // Hashes that are equal in all processes. `kind` covers the element type, and `what` also the shape.
    uint64_t kind = 0, what = 0;

  private:
    bool read_tensor(PyObject* tensor);
    bool read_numpy(PyObject* array);
    bool read_buffer(PyObject* array);
    void begin(uint64_t named, size_t width);
    void add_shape(uint64_t extent);
    Py_buffer view_{};
    PyObject* kept_ = nullptr;
};

// Returns advice for the end of an error message: how to convert an array whose elements have a type that
// cannot be combined.
const char* convert_first(PyObject* array);

// Mixes `value` into a hash. Start with hash 0, because mixed(1, 2) equals mixed(2, 1).
inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 29);
}

}  // namespace flowchan
