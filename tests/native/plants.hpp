// A fault planted into the stress, to see that each sanitizer finds one. Without a -DPLANT_… there is none.
#pragma once

#include "ring.hpp"

namespace testing {

void plant(flowchan::Ring& ring);  // called by every reader after every item

}
