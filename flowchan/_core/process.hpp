// Whether a process lives, whoever started it, and which of all that ever had its number it is.
#pragma once

#include <cstdint>

namespace flowchan {

// When it started, in the kernel's ticks since boot: with its number it names one process for ever. 0: none.
uint64_t process_start(uint64_t pid);

// Whether the process with this number and start time still runs (a zombie does not). started = 0: any start
// time.
bool process_alive(uint64_t pid, uint64_t started);

// This process's number, without a system call; a forked child has its own.
extern uint32_t own_number;
inline uint32_t process_number() { return own_number; }

}  // namespace flowchan
