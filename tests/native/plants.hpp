// Faults that are planted into the stress tests, to prove that each sanitizer finds its fault. A build
// without -DPLANT_… has no planted fault.
#pragma once

#include "ring.hpp"

namespace testing {

void plant(flowchan::Ring& ring);  // every reader calls this for every item

}
