// Unboxes sampled items and calls their recorder (see ItemTracing).
#include "channel.hpp"

namespace flowchan {

namespace {

PyObject* py_traced = nullptr;

}  // namespace

void set_traced(PyObject* traced) { Py_XSETREF(py_traced, Py_NewRef(traced)); }

bool is_traced(PyObject* item) { return reinterpret_cast<PyObject*>(Py_TYPE(item)) == py_traced; }

nb::object call_recorder(ItemTracing& tracing, const char* method, const void* port, PyObject* item) {
    nb::error_scope kept;
    const auto number = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(port));
    nb::object result =
        nb::steal(item ? PyObject_CallMethod(tracing.recorder.ptr(), method, "KO", number, item)
                       : PyObject_CallMethod(tracing.recorder.ptr(), method, "K", number));
    if (!result.is_valid()) PyErr_WriteUnraisable(tracing.recorder.ptr());
    return result;
}

PyObject* unboxed(In* in, PyObject* box) {
    if (in && in->tracing) {
        const nb::object owner = in->tracing_owner;
        if (!std::exchange(in->holds_traced, true)) in->tracing->held += 1;
        call_recorder(*in->tracing, "took", in, box);
    }
    PyObject* item = PyObject_GetAttrString(box, "item");
    Py_DECREF(box);
    return item;
}

}  // namespace flowchan
