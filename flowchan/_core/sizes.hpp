// Sizes of items, for the byte limit of a `threads` channel.
#pragma once

#include <Python.h>

#include <cstdint>

namespace flowchan {

// Estimate how many bytes an item keeps alive; see sizes.cpp. Never raises.
uint64_t estimate_size(PyObject* item);

inline uint64_t size_of(PyObject* item) {
    PyTypeObject* type = Py_TYPE(item);
    return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || item == Py_None
               ? 32
               : estimate_size(item);
}

}  // namespace flowchan
