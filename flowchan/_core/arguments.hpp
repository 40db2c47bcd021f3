// Helpers for methods that are plain C functions. They parse arguments and turn C++ exceptions into Python
// errors.
#pragma once

#include <nanobind/nanobind.h>

namespace flowchan {

namespace nb = nanobind;

template <class F>
PyObject* guarded(F&& f) {
    try {
        return f();
    } catch (nb::python_error& e) {
        e.restore();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

// Raise TypeError for an unknown argument, and suggest the most similar argument of the function.
inline void refuse_argument(const char* function, PyObject* name, const char* const* names, size_t n) {
    guarded([&]() -> PyObject* {
        nb::list known;
        for (size_t i = 0; i < n; ++i) known.append(names[i]);
        nb::object near =
            nb::module_::import_("difflib").attr("get_close_matches")(nb::handle(name), known, 1);
        if (nb::len(near))
            PyErr_Format(PyExc_TypeError, "%s: unknown option %R; did you mean %R?", function, name,
                         nb::object(near[0]).ptr());
        else
            PyErr_Format(PyExc_TypeError, "%s: unknown option %R; the options are %U", function, name,
                         nb::str(", ").attr("join")(known).ptr());
        return nullptr;
    });
}

// Parse arguments, which may be positional or named. The first `required` arguments are mandatory.
template <size_t N>
bool parse(const char* function, const char* const (&names)[N], size_t required, PyObject* const* args,
           Py_ssize_t n, PyObject* keywords, PyObject* (&values)[N]) {
    if (n > Py_ssize_t(N)) {
        PyErr_Format(PyExc_TypeError, "%s: takes at most %zu argument%s, got %zd", function, N,
                     N == 1 ? "" : "s", n);
        return false;
    }
    for (size_t i = 0; i < N; ++i) values[i] = Py_ssize_t(i) < n ? args[i] : nullptr;
    Py_ssize_t more = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < more; ++k) {
        PyObject* name = PyTuple_GET_ITEM(keywords, k);
        size_t i = 0;
        while (i < N && PyUnicode_CompareWithASCIIString(name, names[i]) != 0) ++i;
        if (i == N) {
            refuse_argument(function, name, names, N);
            return false;
        }
        if (values[i]) {
            PyErr_Format(PyExc_TypeError, "%s: got two values for argument %R", function, name);
            return false;
        }
        values[i] = args[n + k];
    }
    for (size_t i = 0; i < required; ++i) {
        if (values[i]) continue;
        PyErr_Format(PyExc_TypeError, "%s: the argument '%s' is missing", function, names[i]);
        return false;
    }
    return true;
}

template <class F>
PyCFunction fast(F f) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(f));
}
constexpr int FASTCALL = METH_FASTCALL | METH_KEYWORDS;

}  // namespace flowchan
