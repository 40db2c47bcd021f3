#include "plants.hpp"

#include <vector>

namespace testing {

#if defined(PLANT_ASAN)
// Read one byte behind the end of a heap payload.
void plant(flowchan::Ring& ring) {
    std::vector<char> payload(ring.header().capacity);
    volatile size_t size = payload.size();
    volatile char seen = payload.data()[size];
    (void)seen;
}
#elif defined(PLANT_UBSAN)
// Ask for the size of a block class that does not exist, so that class_size() shifts a word by at least its
// width.
void plant(flowchan::Ring&) {
    volatile uint32_t cls = flowchan::CLASSES + 4 * 64;
    volatile uint64_t size = flowchan::class_size(cls);
    (void)size;
}
#elif defined(PLANT_TSAN)
// Increment a number in shared memory without taking the lock.
void plant(flowchan::Ring& ring) { ring.header().cause_size += 1; }
#else
void plant(flowchan::Ring&) {}
#endif

}  // namespace testing
