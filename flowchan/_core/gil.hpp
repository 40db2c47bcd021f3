// Releases the GIL and takes it again.
//
// A daemon thread that asks for the GIL during interpreter shutdown never gets it. CPython up to 3.13 ends
// such a thread with pthread_exit, which unwinds the thread's C++ frames as an exception would. The
// destructors in these frames would then drop references without the GIL. This code therefore blocks the
// thread forever, as CPython 3.14 does, and the process exits without waiting for the thread. A destructor
// blocks the thread, because some C++ libraries cannot catch this kind of unwinding.
//
// A free-threaded interpreter has no GIL, but its garbage collector sometimes stops all threads. A sleeping
// thread must release its thread state, or the collector and all other threads would wait for it.
#pragma once

#include <Python.h>

#include <unistd.h>

namespace flowchan {

inline void take_gil(PyThreadState* state) {
    struct Held {
        bool got = false;
        ~Held() {
            while (!got) pause();
        }
    } held;
    PyEval_RestoreThread(state);
    held.got = true;
}

// Releases the GIL for the duration of a block.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() noexcept(false) { take_gil(state_); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace flowchan
