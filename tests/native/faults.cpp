// The default `fault_point` does nothing. A definition in another file of a test program replaces it.
#include "faults.hpp"

[[gnu::weak]] void flowchan::fault_point() {}
