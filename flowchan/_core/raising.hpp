// Errors that calls on channels raise.
#pragma once

#include <string>

#include "channel.hpp"

namespace flowchan {

// Set the exception `name` of flowchan.errors.
void raise(const char* name, const std::string& message);

// Set the exception for a call that ended in `step`, and return null. `size` is the size of the item, for
// TooLarge.
PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline);

// Set an attribute of the current error, and take ownership of the value.
void add_to_error(const char* name, PyObject* value);

// The cause of a break, in a form that other processes can read. `whole` is the pickled exception, or an
// error with its text if it cannot be pickled. `text` is a short form of a large cause, for use when memory
// is short. Both are empty for a cause without text.
struct Cause {
    std::string whole, text;
};
Cause pickle_cause(PyObject* cause);

// Raise for a put whose descriptors could not be sent because of this errno.
void raise_refused(Channel& ch, int error);

// Raise for a put into a channel across hosts, if only processes on one machine can share the object.
void raise_not_transferable(Channel& ch, PyObject* item);

}  // namespace flowchan
