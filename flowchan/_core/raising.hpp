// How a call that did not work is told to the user.
#pragma once

#include <string>

#include "channel.hpp"

namespace flowchan {

// Sets the exception `name` of flowchan.errors.
void raise(const char* name, const std::string& message);

// Sets the exception for a call that ended in `step`; answers null. `size` is that of the item, for TooLarge.
PyObject* raise_step(Channel& ch, Step step, Side side, uint64_t size, Deadline deadline);

// Sets an attribute of the error that is being raised; takes over the value.
void add_to_error(const char* name, PyObject* value);

// The cause of a break as another process can read it: itself, or an error with its text where it can't cross;
// and, if that is large, its text, for where there is no memory for it. Empty for one without any text.
struct Cause {
    std::string whole, text;
};
Cause pickle_cause(PyObject* cause);

// A put whose descriptors could not be sent, by this errno.
void raise_refused(Channel& ch, int error);

// A put into a channel across hosts of what only processes of one machine can share.
void raise_stays_here(Channel& ch, PyObject* item);

}  // namespace flowchan
