// Errors that channel calls raise.
#pragma once

#include <string>

#include "channel.hpp"

namespace flowchan {

// Raise the exception `name` of flowchan.errors.
void raise(const char* name, const std::string& message);

// Raise the exception for a call that ended with `step`, and return null. TooLarge reports `size`, the size
// of the item.
PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline);

// Set an attribute of the current error. This takes over the reference to the value.
void add_to_error(const char* name, PyObject* value);

// The cause of a break, in a form that other processes can read. `whole` is the pickled exception, or an
// error with the same text if the exception cannot be pickled. `text` is a short form of a large cause, for
// when memory runs out. Both are empty if the cause has no text.
struct Cause {
    std::string whole, text;
};
Cause pickle_cause(PyObject* cause);

// Raise the error of a put that failed to send its descriptors because of this errno.
void raise_refused(Channel& ch, int error);

// Raise the error of a put into a channel across hosts whose object only processes of one machine can share.
void raise_not_transferable(Channel& ch, PyObject* item);

}  // namespace flowchan
