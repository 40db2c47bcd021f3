// Faults planted into the stress tests, to prove that each sanitizer detects one. Builds without -DPLANT_…
// contain no such fault.
#pragma once

#include "ring.hpp"

namespace testing {

void plant(flowchan::Ring& ring);  // every reader calls this for every item

}
