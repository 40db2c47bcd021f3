// Release of the GIL, and taking it again.
//
// A daemon thread that asks for the GIL while the interpreter shuts down does not get it. CPython up to 3.13
// ends the thread by pthread_exit, which unwinds the C++ frames below as an exception would. Their
// destructors would drop references without the GIL. So such a thread is stopped here for good, as CPython
// 3.14 does; the process ends without it. A destructor stops it, because this unwinding is not an exception
// that every C++ library lets a program catch.
//
// A free-threaded interpreter has no GIL to release, but its collector sometimes stops all threads. A thread
// that sleeps without having released its state would hold the others up.
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

// Releases the GIL in a block, so that other threads may run Python.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() noexcept(false) { take_gil(state_); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace flowchan
