// Sizes of items, counted against the byte limit of a `threads` channel.
#pragma once

#include <Python.h>

#include <cstdint>

namespace flowchan {

// Estimate how many bytes an item keeps alive. Never raises. Numbers cost a comparison of types; see
// sizes.cpp.
uint64_t estimate_size(PyObject* item);

inline uint64_t size_of(PyObject* item) {
    PyTypeObject* type = Py_TYPE(item);
    return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || item == Py_None
               ? 32
               : estimate_size(item);
}

}  // namespace flowchan
