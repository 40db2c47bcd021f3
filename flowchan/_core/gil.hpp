// Releasing the GIL and taking it again.
//
// During interpreter shutdown, a daemon thread that asks for the GIL does not get it. CPython up to 3.13 then
// ends the thread with pthread_exit, which unwinds its C++ frames like an exception. Their destructors would
// drop references without the GIL. So, as in CPython 3.14, we block such a thread forever, and the process
// exits without it. A destructor does the blocking, because not every C++ library lets a program catch this
// unwinding.
//
// A free-threaded interpreter has no GIL, but its garbage collector sometimes stops all threads. It has to
// wait for a thread that sleeps without releasing its thread state, so all other threads would also wait.
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
