// About how many bytes an item keeps alive, told from a few of its parts.
//
// Buffers, text and `nbytes` count exactly. Of a container SAMPLES of the elements are looked at, spread over
// a list or a tuple, and stand for the others; of any other object what the garbage collector would visit. At
// most LOOKS objects are looked at for one item: so a batch of 20,000 rows costs no more than one of a
// hundred. What many items share (a class, a module, a function) counts as nothing; other shared parts count
// for each of them, because nobody can tell.
#include "sizes.hpp"

#include <algorithm>

extern "C" PyObject* _PyType_Lookup(PyTypeObject*, PyObject*);

namespace flowchan {

namespace {

constexpr Py_ssize_t SAMPLES = 8;
constexpr int LOOKS = 64, DEPTH = 8;

struct Estimate {
    int left = LOOKS;

    uint64_t of(PyObject* o, int depth) {
        PyTypeObject* type = Py_TYPE(o);
        left -= 1;
        if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || o == Py_None) return 32;
        if (PyUnicode_CheckExact(o)) return 49 + uint64_t(PyUnicode_GET_LENGTH(o)) * PyUnicode_KIND(o);
        if (PyBytes_CheckExact(o)) return 33 + uint64_t(PyBytes_GET_SIZE(o));
        if (PyType_Check(o) || PyModule_Check(o) || PyFunction_Check(o) || PyCFunction_Check(o) ||
            PyCode_Check(o))
            return 0;
        if (PyTuple_CheckExact(o)) return 40 + row(&PyTuple_GET_ITEM(o, 0), PyTuple_GET_SIZE(o), depth);
        if (PyList_CheckExact(o)) return 56 + row(((PyListObject*)o)->ob_item, PyList_GET_SIZE(o), depth);
        if (PyDict_CheckExact(o)) return 64 + entries(o, depth);
        uint64_t bytes = 0;
        if (buffer(o, bytes) || counted(o, type, bytes)) return bytes;
        return uint64_t(type->tp_basicsize) + parts(o, type, depth);
    }

  private:
    bool deeper(int depth) const { return left > 0 && depth < DEPTH; }

    // The elements of a list or a tuple, and the references to them.
    uint64_t row(PyObject** items, Py_ssize_t n, int depth) {
        if (!n || !deeper(depth)) return uint64_t(n) * 8;
        const Py_ssize_t step = n <= SAMPLES ? 1 : n / SAMPLES;
        uint64_t sum = 0, seen = 0;
        for (Py_ssize_t i = step / 2; i < n && left > 0; i += step, ++seen)
            sum += items[i] ? of(items[i], depth + 1) : 0;
        return uint64_t(n) * 8 + sum * uint64_t(n) / std::max<uint64_t>(seen, 1);
    }

    uint64_t entries(PyObject* dict, int depth) {
        const uint64_t n = uint64_t(PyDict_GET_SIZE(dict));
        if (!n || !deeper(depth)) return n * 50;
        PyObject *key, *value;
        Py_ssize_t at = 0;
        uint64_t sum = 0, seen = 0;
        while (seen < uint64_t(SAMPLES) && left > 0 && PyDict_Next(dict, &at, &key, &value)) {
            sum += of(key, depth + 1) + of(value, depth + 1);
            seen += 1;
        }
        return n * 50 + sum * n / std::max<uint64_t>(seen, 1);
    }

    static bool buffer(PyObject* o, uint64_t& bytes) {
        if (!PyObject_CheckBuffer(o)) return false;
        Py_buffer view;
        if (PyObject_GetBuffer(o, &view, PyBUF_STRIDED_RO) != 0) return PyErr_Clear(), false;
        bytes = uint64_t(view.len);
        PyBuffer_Release(&view);
        return true;
    }

    // What says so itself: tensors, and arrays that give no buffer.
    static bool counted(PyObject* o, PyTypeObject* type, uint64_t& bytes) {
        static PyObject* const name = PyUnicode_InternFromString("nbytes");
        if (!_PyType_Lookup(type, name)) return false;
        PyObject* n = PyObject_GetAttr(o, name);
        bytes = n && PyLong_Check(n) ? PyLong_AsUnsignedLongLong(n) : UINT64_MAX;
        Py_XDECREF(n);
        const bool told = !PyErr_Occurred() && bytes < uint64_t(1) << 60;
        PyErr_Clear();
        return told;
    }

    // What another object refers to, as the garbage collector is told of it.
    uint64_t parts(PyObject* o, PyTypeObject* type, int depth) {
        if (!type->tp_traverse || !deeper(depth) || !PyObject_IS_GC(o)) return 0;
        struct Visit {
            Estimate* estimate;
            PyObject* self;
            int depth;
            uint64_t sum, seen;
        } visit{this, o, depth, 0, 0};
        type->tp_traverse(
            o,
            [](PyObject* part, void* arg) {
                Visit& v = *static_cast<Visit*>(arg);
                if (part != v.self && part) v.sum += v.estimate->of(part, v.depth + 1);
                return v.estimate->left > 0 && ++v.seen < 2 * uint64_t(SAMPLES) ? 0 : 1;
            },
            &visit);
        return visit.sum;
    }
};

}  // namespace

uint64_t estimate_size(PyObject* item) { return Estimate{}.of(item, 0); }

}  // namespace flowchan
