// Memory that several processes share: an unnamed file, freed by the kernel when its last user ends.
//
// The file has its full length from the start and never shrinks, because shrinking it could raise SIGBUS in
// other processes. Reserve memory before using it. When memory runs short, the reservation then fails, and no
// later access can raise SIGBUS.
#pragma once

#include <cstdint>

namespace flowchan {

constexpr const char* MEMORY_SHOWN = "memfd:flowchan";  // name of the file in /proc

int make_memory(uint64_t length);  // returns the descriptor; throws std::system_error

// Allocate this part of the file. If memory is exhausted, return false with errno set.
bool reserve_memory(int fd, uint64_t from, uint64_t upto);

}  // namespace flowchan
