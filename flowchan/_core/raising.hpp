// Errors that channel calls raise.
#pragma once

#include <string>

#include "channel.hpp"

namespace flowchan {

// Raise the exception `name` of flowchan.errors.
void raise(const char* name, const std::string& message);

// Raise the exception for a call that ended with `step`, and return null. TooLarge reports `size`, the item's
// size.
PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline);

// Return the current error with its traceback, and clear it. Return an invalid object if there is none.
nb::object take_error();
// Make an error that `take_error` returned the current error again.
void raise_again(const nb::object& error);

// Set an attribute of the current error, and take ownership of the value's reference.
void add_to_error(const char* name, PyObject* value);

// Why a channel broke, in a form that other processes can read. `whole` is the pickled exception. If the
// exception cannot be pickled, `whole` is an error with the same text. `text` is a short version of a large
// cause, used when memory runs out. Both are empty if the cause has no text.
struct Cause {
    std::string whole, text;
};
Cause pickle_cause(PyObject* cause);

// Raise the error for a put that failed because sending its descriptors failed with this errno.
void raise_refused(Channel& ch, int error);

// Raise the error for a put into a channel across hosts if only processes on one machine can share the item.
void raise_not_transferable(Channel& ch, PyObject* item);

}  // namespace flowchan
