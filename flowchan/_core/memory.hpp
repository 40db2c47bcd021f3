// Memory that several processes share: an unnamed file, which the kernel frees when its last user ends.
//
// It has its full length from the start. It cannot be shrunk, because shrinking it would cause a SIGBUS in
// other processes. Reserve memory before using it, so that exhausted memory causes an error in that call.
#pragma once

#include <cstdint>

namespace flowchan {

constexpr const char* MEMORY_SHOWN = "memfd:flowchan";  // name of the file in /proc

int make_memory(uint64_t length);  // returns the descriptor; throws std::system_error

// Allocate this part of the file. Return false, with errno set, if memory is exhausted.
bool reserve_memory(int fd, uint64_t from, uint64_t upto);

}  // namespace flowchan
