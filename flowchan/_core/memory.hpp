// Memory that several processes share: an unnamed file, which the kernel frees when its last user ends.
//
// The file has its full length from the start, and never shrinks: shrinking it would raise SIGBUS in other
// processes. Reserve memory before you use it. If memory runs short, the reservation then fails, instead of a
// later access that raises SIGBUS.
#pragma once

#include <cstdint>

namespace flowchan {

constexpr const char* MEMORY_SHOWN = "memfd:flowchan";  // name of the file in /proc

int make_memory(uint64_t length);  // returns the descriptor; throws std::system_error

// Allocate this part of the file. If memory is exhausted, return false with errno set.
bool reserve_memory(int fd, uint64_t from, uint64_t upto);

}  // namespace flowchan
