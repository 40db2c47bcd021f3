// Where the crash tests kill.
#pragma once

namespace flowchan {

// A place where a process may be killed. The crash tests build the core with FLOWCHAN_FAULTS and give a
// function that kills at the n-th such place; in the module it is nothing.
#ifdef FLOWCHAN_FAULTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace flowchan
