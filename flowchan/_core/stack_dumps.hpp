// Dumps of this process's Python stacks, written when a signal arrives.
#pragma once

namespace flowchan {

// Claim signal `number` for dumps, and return whether that was possible. A signal with its default action is
// set to be ignored. A signal for which frame_dumps() was already called stays as it is. When the interpreter
// later removes faulthandler's handler, the signal is ignored, so that it does not kill the process.
bool claim_signal(int number);

// Write a mark to `fd` before and after each dump for signal `number`. faulthandler's handler must already be
// installed for the signal. That handler must write to the same `fd`.
void frame_dumps(int number, int fd);

// Write a dump before signal `number` kills the process. This does nothing unless frame_dumps() has been
// called.
void dump_before_death(int number);

}  // namespace flowchan
