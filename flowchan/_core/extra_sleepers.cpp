#include "extra_sleepers.hpp"

#include <algorithm>
#include <system_error>

#include "waiting.hpp"

namespace flowchan {

namespace {

constexpr int64_t LONG = 3600'000'000'000;  // an hour in ns

bool same(const WaitedWord& one, const WaitedWord& other) {
    return one.uaddr == other.uaddr && one.val == other.val;
}

}  // namespace

void Watched::add(const WaitedWord& word, std::shared_ptr<void> keeps) {
    words.push_back(word);
    kept.push_back(std::move(keeps));
}

ExtraSleeper::ExtraSleeper(std::function<void()> ring)
    : ring_(std::move(ring)), thread_(new std::thread([this] { run(); })) {}

ExtraSleeper::~ExtraSleeper() {
    if (!thread_) return;
    {
        std::lock_guard lock(mutex_);
        over_ = true;
        notify();
    }
    thread_->join();
    delete thread_;
}

void ExtraSleeper::notify() {
    // Relaxed, because the mutex guards the data that has changed.
    changes_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(changes_, 1, false);
}

void ExtraSleeper::watch(Watched watched) {
    std::lock_guard lock(mutex_);
    if (!has_signalled_ && std::ranges::equal(watched.words, watched_.words, same)) return;
    watched_ = std::move(watched);
    has_signalled_ = false;
    notify();
}

void ExtraSleeper::run() {
    for (;;) {
        Watched own;
        uint32_t changes = 0;
        {
            std::lock_guard lock(mutex_);
            if (over_) return;
            changes = changes_.load(std::memory_order_relaxed);
            own.add({changes, reinterpret_cast<uint64_t>(&changes_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0},
                    {});
            // After calling `ring_`, sleep only on `changes_` until new words arrive. The old words have
            // changed, so a sleep on them would end at once.
            for (size_t i = 0; !has_signalled_ && i < watched_.words.size(); ++i)
                own.add(watched_.words[i], watched_.kept[i]);
        }
        sleep_on_any(own.words, now_ns() + LONG);
        if (std::none_of(own.words.begin() + 1, own.words.end(), is_changed)) continue;
        {
            std::lock_guard lock(mutex_);
            if (changes != changes_.load(std::memory_order_relaxed)) continue;  // new words have arrived
            has_signalled_ = true;
        }
        ring_();
    }
}

bool ExtraSleepers::watch(std::vector<Watched> parts) {
    try {
        while (all_.size() < parts.size()) all_.emplace_back(ring_);
    } catch (const std::system_error&) {}
    const bool enough = all_.size() >= parts.size();
    parts.resize(all_.size());
    for (size_t n = 0; n < all_.size(); ++n) all_[n].watch(std::move(parts[n]));
    return enough;
}

}  // namespace flowchan
