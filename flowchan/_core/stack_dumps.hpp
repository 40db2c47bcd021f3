// Dumps the Python stacks of this process when a signal arrives.
#pragma once

namespace flowchan {

// Claim signal `number` for dumps, and return whether this worked. If the signal has its default action, the
// process ignores it from now on. If frame_dumps() was already called for the signal, this changes nothing.
// When the interpreter later removes faulthandler's handler, the signal does not kill the process but is
// ignored.
bool claim_signal(int number);

// Write marks to `fd` before and after each dump for signal `number`. faulthandler's handler for the signal
// must already be installed, with the same `fd`.
void frame_dumps(int number, int fd);

// Make signal `number` write a dump before it kills the process. Does nothing unless frame_dumps() was called
// before.
void dump_before_death(int number);

}  // namespace flowchan
