// Giving the GIL away and taking it back.
//
// A daemon thread that asks for the GIL while the interpreter shuts down does not get it: CPython up to 3.13
// ends the thread by pthread_exit, which unwinds the C++ frames below as an exception would, and their
// destructors would drop references without the GIL. So such a thread is held here for ever, as CPython 3.14
// does; the process ends without it.
#pragma once

#include <Python.h>

#include <cxxabi.h>
#include <unistd.h>

namespace flowchan {

inline void take_gil(PyThreadState* state) {
    try {
        PyEval_RestoreThread(state);
    } catch (abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// In a block: others may run Python meanwhile.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() noexcept(false) { take_gil(state_); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace flowchan
