// Fault points have no effect unless another file of the test program defines them.
#include "faults.hpp"

[[gnu::weak]] void flowchan::fault_point() {}
