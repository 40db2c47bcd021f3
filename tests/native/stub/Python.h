// Replaces Python.h for blocking.hpp in a program without an interpreter, and therefore without a GIL and
// signal handlers of Python.
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
