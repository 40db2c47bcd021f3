// Fault points: the places where the crash tests kill a process.
#pragma once

namespace flowchan {

// A place where a process may be killed. The crash tests build the core with FLOWCHAN_FAULTS and define a
// function that kills at the n-th such place. In the module it does nothing.
#ifdef FLOWCHAN_FAULTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace flowchan
