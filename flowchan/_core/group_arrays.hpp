// NumPy arrays and torch tensors as memory, without importing either.
#pragma once

#include <Python.h>

#include "kernels.hpp"

namespace flowchan {

// Memory of an array that lies in one piece, which is kept as long as this is. Make and destroy it with the
// GIL.
class Array {
  public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
        if (view_.obj) PyBuffer_Release(&view_);
        Py_XDECREF(kept_);
    }
    // False, without an error: it is no array, or not one that lies in one piece in this machine's memory.
    // False with one: reading what it is has failed.
    bool read(PyObject* object);
    bool read_bytes(PyObject* object);  // bytes or a bytearray

    void* data = nullptr;
    size_t bytes = 0, count = 0;
    Element element = Element::Raw;
    bool writable = true;
    // The same in every process: of the type of its elements, and of that and its shape.
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

// What to do with an array whose elements can only be moved, so that they can be combined: the end of a
// message.
const char* convert_first(PyObject* array);

// Numbers go in one after the other, the first of them into 0: mixed(1, 2) is mixed(2, 1).
inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 29);
}

}  // namespace flowchan
