// Estimates from samples how many bytes an item keeps alive.
//
// Buffers, strings and objects with an attribute `nbytes` count with their exact sizes. For a container,
// SAMPLES elements stand for all elements; in a list or a tuple, the samples are evenly spaced. Any other
// object consists of the parts that the garbage collector would visit. At most TRIALS objects are visited per
// item, so a batch of 20,000 rows costs no more than a batch of a hundred rows. A part that many items
// usually share (a class, a module, a function) counts as zero. Other shared parts count for each item,
// because such sharing cannot be detected.
//
// In a free-threaded interpreter, other threads may change the item at any time. All samples of an object are
// therefore taken together, in its critical section, as new references. They are visited afterwards.
#include "sizes.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>

extern "C" PyObject* _PyType_Lookup(PyTypeObject*, PyObject*);

namespace flowchan {

namespace nb = nanobind;

namespace {

constexpr Py_ssize_t SAMPLES = 8;
constexpr int TRIALS = 64, DEPTH = 8;

// Some parts of an object. A reference keeps each part alive.
struct Samples {
    static constexpr size_t MOST = 2 * SAMPLES;
    PyObject* part[MOST];
    size_t count = 0;
    Py_ssize_t among = 0;  // number of parts that the samples stand for

    Samples() = default;
    Samples(const Samples&) = delete;
    ~Samples() {
        for (size_t i = 0; i < count; ++i) Py_DECREF(part[i]);
    }
    bool add(PyObject* one) {
        if (one && count < MOST) part[count++] = Py_NewRef(one);
        return count < MOST;
    }
    // Take evenly spaced samples of a list or a tuple.
    template <class At>
    void row(Py_ssize_t n, At at) {
        among = n;
        const Py_ssize_t step = n <= SAMPLES ? 1 : n / SAMPLES;
        for (Py_ssize_t i = step / 2; i < n; i += step) add(at(i));
    }
};

struct Estimate {
    int left = TRIALS;

    uint64_t of(PyObject* o, int depth) {
        PyTypeObject* type = Py_TYPE(o);
        left -= 1;
        if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || o == Py_None) return 32;
        if (PyUnicode_CheckExact(o)) return 49 + uint64_t(PyUnicode_GET_LENGTH(o)) * PyUnicode_KIND(o);
        if (PyBytes_CheckExact(o)) return 33 + uint64_t(PyBytes_GET_SIZE(o));
        if (PyType_Check(o) || PyModule_Check(o) || PyFunction_Check(o) || PyCFunction_Check(o) ||
            PyCode_Check(o))
            return 0;
        if (PyTuple_CheckExact(o)) return 40 + row(o, depth);
        if (PyList_CheckExact(o)) return 56 + row(o, depth);
        if (PyDict_CheckExact(o)) return 64 + entries(o, depth);
        uint64_t bytes = 0;
        if (buffer(o, bytes) || counted(o, type, bytes)) return bytes;
        return uint64_t(type->tp_basicsize) + parts(o, type, depth);
    }

  private:
    bool deeper(int depth) const { return left > 0 && depth < DEPTH; }

    // Return the total size of the samples. Set `seen` to the number of samples visited.
    uint64_t sum(const Samples& samples, int depth, uint64_t& seen) {
        uint64_t bytes = 0;
        for (seen = 0; seen < samples.count && left > 0; ++seen) bytes += of(samples.part[seen], depth + 1);
        return bytes;
    }

    // Return the size of a list's or tuple's elements, including the references to them.
    uint64_t row(PyObject* o, int depth) {
        if (!deeper(depth)) return uint64_t(Py_SIZE(o)) * 8;
        Samples samples;
        if (PyTuple_CheckExact(o)) {
            samples.row(PyTuple_GET_SIZE(o), [&](Py_ssize_t i) { return PyTuple_GET_ITEM(o, i); });
        } else {
            nb::ft_object_guard guard(o);
            samples.row(PyList_GET_SIZE(o), [&](Py_ssize_t i) { return PyList_GET_ITEM(o, i); });
        }
        const uint64_t n = uint64_t(samples.among);
        if (!n) return 0;
        uint64_t seen;
        const uint64_t bytes = sum(samples, depth, seen);
        return n * 8 + bytes * n / std::max<uint64_t>(seen, 1);
    }

    uint64_t entries(PyObject* dict, int depth) {
        if (!deeper(depth)) return uint64_t(PyDict_GET_SIZE(dict)) * 50;
        Samples samples;
        {
            nb::ft_object_guard guard(dict);
            PyObject *key, *value;
            samples.among = PyDict_GET_SIZE(dict);
            for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);)
                if (samples.add(key), !samples.add(value)) break;
        }
        const uint64_t n = uint64_t(samples.among);
        if (!n) return 0;
        uint64_t seen;
        const uint64_t bytes = sum(samples, depth, seen);
        return n * 50 + bytes * n / std::max<uint64_t>((seen + 1) / 2, 1);
    }

    static bool buffer(PyObject* o, uint64_t& bytes) {
        if (!PyObject_CheckBuffer(o)) return false;
        Py_buffer view;
        if (PyObject_GetBuffer(o, &view, PyBUF_STRIDED_RO) != 0) return PyErr_Clear(), false;
        bytes = uint64_t(view.len);
        PyBuffer_Release(&view);
        return true;
    }

    // Read the attribute `nbytes`, which tensors have, and also arrays that export no buffer.
    static bool counted(PyObject* o, PyTypeObject* type, uint64_t& bytes) {
        static PyObject* const name = PyUnicode_InternFromString("nbytes");
        if (!_PyType_Lookup(type, name)) return false;
        PyObject* n = PyObject_GetAttr(o, name);
        bytes = n && PyLong_Check(n) ? PyLong_AsUnsignedLongLong(n) : UINT64_MAX;
        Py_XDECREF(n);
        const bool ok = !PyErr_Occurred() && bytes < uint64_t(1) << 60;
        PyErr_Clear();
        return ok;
    }

    // Return the size of all objects that this object refers to, as the garbage collector finds them.
    uint64_t parts(PyObject* o, PyTypeObject* type, int depth) {
        if (!type->tp_traverse || !deeper(depth) || !PyObject_IS_GC(o)) return 0;
        Samples samples;
        {
            nb::ft_object_guard guard(o);
            type->tp_traverse(
                o, [](PyObject* part, void* into) { return static_cast<Samples*>(into)->add(part) ? 0 : 1; },
                &samples);
        }
        uint64_t bytes = 0;
        for (size_t i = 0; i < samples.count && left > 0; ++i)
            if (samples.part[i] != o) bytes += of(samples.part[i], depth + 1);
        return bytes;
    }
};

}  // namespace

uint64_t estimate_size(PyObject* item) { return Estimate{}.of(item, 0); }

}  // namespace flowchan
