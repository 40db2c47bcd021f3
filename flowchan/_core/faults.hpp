// Fault points: where the crash tests kill the process.
#pragma once

namespace flowchan {

// Marks a point where a process may be killed. The crash tests build the core with FLOWCHAN_FAULTS and define
// this function, so that its n-th call kills the process. In the extension module, it does nothing.
#ifdef FLOWCHAN_FAULTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace flowchan
