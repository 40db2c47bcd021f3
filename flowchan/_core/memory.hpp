// Memory that several processes share: a file without a name, which the kernel frees with its last user.
//
// It has its full length from the start, and nobody can shrink it under the others, which would be a SIGBUS.
// What is touched must be reserved before, so that a full memory is an error where it happens.
#pragma once

#include <cstdint>

namespace flowchan {

constexpr const char* MEMORY_SHOWN = "memfd:flowchan";  // as which /proc shows it

int make_memory(uint64_t length);  // its descriptor; throws std::system_error

// Allocates this part of it. False, with errno, when there is none.
bool reserve_memory(int fd, uint64_t from, uint64_t upto);

}  // namespace flowchan
