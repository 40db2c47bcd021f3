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
    uint64_t what = 0;  // of its type and shape, the same in every process

  private:
    bool read_tensor(PyObject* tensor);
    bool read_numpy(PyObject* array);
    bool read_buffer(PyObject* array);
    void add_shape(uint64_t extent);
    Py_buffer view_{};
    PyObject* kept_ = nullptr;
};

inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 29);
}

}  // namespace flowchan
