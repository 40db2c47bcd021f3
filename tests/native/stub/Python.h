// The parts of Python that blocking.hpp needs, for programs without an interpreter: there is no GIL and no
// signal handler.
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
