// The default `fault_point` does nothing. Another file of a test program may define one that replaces it.
#include "faults.hpp"

[[gnu::weak]] void flowchan::fault_point() {}
