// Dumps of this process's Python stacks, written when a signal arrives.
#pragma once

namespace flowchan {

// Ignore signal `number` if it has its default action, or if frame_dumps() has already been called for it.
// Return whether that is the case. Once the interpreter has removed faulthandler's handler, the signal is then
// ignored and does not kill the process.
bool claim_signal(int number);

// Let faulthandler's handler for signal `number`, which writes to `fd`, write a mark before and after each dump.
void frame_dumps(int number, int fd);

// Write a dump before signal `number` kills the process. This does nothing unless frame_dumps() was called.
void dump_before_death(int number);

}  // namespace flowchan
