// Fault points: places in the code at which the crash tests kill a process.
#pragma once

namespace flowchan {

// Marks a place at which a process may be killed. The crash tests build the core with FLOWCHAN_FAULTS, and
// define this function so that it kills the process at the n-th call. In the module it does nothing.
#ifdef FLOWCHAN_FAULTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace flowchan
