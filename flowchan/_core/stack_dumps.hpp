// Dumps this process's Python stacks when a signal arrives.
#pragma once

namespace flowchan {

// Claim signal `number` for dumps, and return whether that succeeded. If the signal has its default action,
// it is ignored from now on. If frame_dumps() was already called for it, nothing changes. When the
// interpreter later removes faulthandler's handler, the signal is ignored, so it does not kill the process.
bool claim_signal(int number);

// Write a mark to `fd` before and after each dump for signal `number`. Before this call, faulthandler must
// have installed its handler for the signal, with the same `fd`.
void frame_dumps(int number, int fd);

// Make signal `number` write a dump before it kills the process. This does nothing unless frame_dumps() was
// called.
void dump_before_death(int number);

}  // namespace flowchan
