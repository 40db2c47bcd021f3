// Releasing the GIL, and acquiring it again.
//
// A daemon thread that requests the GIL while the interpreter is shutting down does not get it. CPython up to
// 3.13 ends the thread with pthread_exit, which unwinds the C++ frames below like an exception. Their
// destructors would then drop references without the GIL. Such a thread is therefore blocked here forever, as
// in CPython 3.14; the process exits without it. A destructor blocks it, because not every C++ library lets a
// program catch this unwinding.
//
// A free-threaded interpreter lacks the GIL, but its garbage collector sometimes stops all threads. If a
// thread slept without releasing its thread state, the others would have to wait for it.
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

// Releases the GIL within a block, so that other threads can run Python code.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() noexcept(false) { take_gil(state_); }
    WithoutGil(const WithoutGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace flowchan
