// Since Linux 5.16, a thread can sleep on many words with futex_waitv. `sleep_by_turns` replaces the system
// call if the kernel lacks or refuses it.
#include "sleeping.hpp"

#include "system.hpp"

#include <algorithm>
#include <atomic>

namespace flowchan {

namespace {

constexpr size_t WAITV_MAX = 128;  // FUTEX_WAITV_MAX
// Set after the kernel or a seccomp filter has refused futex_waitv. It orders no other memory access.
std::atomic<bool> waitv_refused{false};

std::atomic<uint32_t>& word(const WaitedWord& w) {
    return *reinterpret_cast<std::atomic<uint32_t>*>(w.uaddr);
}
// Without futex_waitv, sleep on one word, and poll the others at growing intervals. Polling delays a wake-up
// by up to 4 ms and costs at least 250 checks a second. A single word needs no polling.
bool sleep_by_turns(const std::vector<WaitedWord>& words, int64_t at) {
    for (int64_t nap = 125'000;; nap = std::min<int64_t>(2 * nap, 4'000'000)) {
        if (std::any_of(words.begin(), words.end(), is_changed)) return false;
        const int64_t left = at - now_ns();
        if (left <= 0) return true;
        const int64_t ns = words.size() == 1 ? left : std::min(nap, left);
        const bool shared = !(words[0].flags & FUTEX_PRIVATE_FLAG);
        if (futex_wait(word(words[0]), uint32_t(words[0].val), ns, shared) == EINTR) return false;
    }
}

// Sleep with futex_waitv. Return 0 or an errno.
int wait_for_any(WaitedWord* words, size_t count, const timespec& until) {
    return syscall(SYS_futex_waitv, words, count, 0, &until, CLOCK_MONOTONIC) < 0 ? errno : 0;
}

}  // namespace

bool is_changed(const WaitedWord& w) { return word(w).load(std::memory_order_relaxed) != uint32_t(w.val); }

size_t words_at_once() { return waitv_refused.load(std::memory_order_relaxed) ? SIZE_MAX : WAITV_MAX; }

bool sleep_on_any(std::vector<WaitedWord>& words, int64_t at) {
    if (waitv_refused.load(std::memory_order_relaxed)) return sleep_by_turns(words, at);
    timespec until{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
    const int error = wait_for_any(words.data(), words.size(), until);
    if (error == 0 || error == EAGAIN || error == EINTR || error == ETIMEDOUT) return error == ETIMEDOUT;
    if (error != ENOMEM) waitv_refused.store(true, std::memory_order_relaxed);
    return sleep_by_turns(words, at);
}

}  // namespace flowchan
