// What blocking.hpp needs of Python.h in a program without an interpreter, which has no GIL and no signal
// handlers.
#pragma once

struct PyObject;
struct PyThreadState;
using visitproc = int (*)(PyObject*, void*);

inline PyThreadState* PyEval_SaveThread() {
    static char token;
    return reinterpret_cast<PyThreadState*>(&token);
}
inline void PyEval_RestoreThread(PyThreadState*) {}
inline int PyErr_CheckSignals() { return 0; }
