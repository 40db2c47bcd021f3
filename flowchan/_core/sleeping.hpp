// Sleeps on several futex words at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flowchan {

constexpr uint32_t FUTEX_WORD_32 = 2;  // FUTEX_32

// The kernel's struct futex_waitv: a 32-bit word, and the value that it must have for the sleep to begin.
struct WaitedWord {
    uint64_t val;
    uint64_t uaddr;
    uint32_t flags;
    uint32_t reserved;
};

bool is_changed(const WaitedWord& word);

// Return how many words one thread can watch.
size_t words_at_once();

// Sleep until one of the words changes, or until the monotonic clock reaches `at` ns. Return true if that
// time has passed.
bool sleep_on_any(std::vector<WaitedWord>& words, int64_t at);

}  // namespace flowchan
