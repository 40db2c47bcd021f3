// Giving the GIL away and taking it back.
//
// A daemon thread that asks for the GIL while the interpreter shuts down does not get it: CPython up to 3.13
// ends the thread by pthread_exit, which unwinds the C++ frames below as an exception would, and their
// destructors would drop references without the GIL. So such a thread is held here for ever, as CPython 3.14
// does; the process ends without it. A destructor does it, for what unwinds is no exception that every C++
// library lets one catch.
//
// A free-threaded interpreter has no GIL to give away, but stops all threads now and then, for its collector:
// a thread that sleeps without having said so would hold the others up.
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
