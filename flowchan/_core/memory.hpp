// Memory that several processes share: a file without a name, which the kernel frees with its last user.
//
// It has its full length from the start. It cannot be shrunk, because a shrunk file would cause a SIGBUS in
// its other users. Reserve memory before touching it, so that a full memory is an error at that call.
#pragma once

#include <cstdint>

namespace flowchan {

constexpr const char* MEMORY_SHOWN = "memfd:flowchan";  // its name in /proc

int make_memory(uint64_t length);  // returns its descriptor; throws std::system_error

// Allocate this part of the file. Return false, with errno, when memory is exhausted.
bool reserve_memory(int fd, uint64_t from, uint64_t upto);

}  // namespace flowchan
