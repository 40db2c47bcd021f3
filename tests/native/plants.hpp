// Faults planted in the stress tests to prove that each sanitizer catches its kind of fault. A build without
// -DPLANT_… has no planted fault.
#pragma once

#include "ring.hpp"

namespace testing {

void plant(flowchan::Ring& ring);  // every reader calls this for every item

}
