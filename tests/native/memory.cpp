// Checks that free memory is found. A loan or a put must succeed if a slot is free and a block fits between
// or behind the used blocks. The allocation must succeed no matter how the memory was cut up before. A single
// process allocates and frees random sizes in random order. Items must keep their contents while they are on
// loan, in the channel or in view. Arguments: seed, number of steps.
#include <algorithm>
#include <deque>
#include <random>

#include "check.hpp"
#include "users.hpp"

namespace testing {

namespace {

constexpr uint64_t MAX_BYTES = 100'000, CAPACITY = 200;

class Memory {
  public:
    explicit Memory(uint64_t seed)
        : random(seed), ring(CAPACITY, MAX_BYTES), h(ring.header()), user(open(ring, Session::PLAIN)) {
        user.keeps = true;
    }
    void step() {
        const uint64_t value = ++number, size = any_size();
        switch (random() % (phase() ? 5 : 8)) {
            case 0:
            case 1:
                expect(user.loan(value, size, Deadline{0}),
                       found(class_of(std::max(size, class_size(VIEWABLE)))), "a loan", size);
                break;
            case 2: {
                const bool room = inside.size() < CAPACITY &&
                                  (inside.empty() || h.bytes_in - h.bytes_out + size <= MAX_BYTES);
                const bool finds = found(class_of(size));
                Step step = user.put(Message(value, size, BUFFERS), Deadline{0});
                if (room)
                    expect(step, finds, "a put", size);
                else
                    must(step == Step::NotNow, "a put found room that must not exist");
                if (step == Step::Done) inside.push_back(value);
                break;
            }
            case 3: {
                uint64_t got = 0;
                if (inside.empty()) break;
                must(user.get(got, Deadline{0}) == Step::Done && got == inside.front(), "get");
                inside.pop_front();
                break;
            }
            default: {
                if (user.held_views.empty()) break;
                std::swap(user.held_views.front(), user.held_views[random() % user.held_views.size()]);
                // Put some of the loans, and drop the other loans.
                const uint64_t lent = user.held_views.front().slot->loaned() && random() % 4 == 0
                                          ? user.held_views.front().value
                                          : 0;
                if (!lent)
                    user.drop_view();
                else if (user.put_loan(user, Deadline{0}) == Step::Done)
                    inside.push_back(lent);
            }
        }
        for (const HeldView& view : user.held_views) view.verify();
        const std::string problems = check(ring);
        must(problems.empty(), problems);
    }
    // Check that the largest item finds memory although blocks are viewed, once no item is in the channel or
    // on loan.
    void largest() {
        uint64_t got = 0;
        for (; !inside.empty(); inside.pop_front())
            must(user.get(got, Deadline{0}) == Step::Done && got == inside.front(), "get");
        auto lent = [](const HeldView& view) { return view.slot->loaned(); };
        for (auto it = user.held_views.begin();
             (it = std::find_if(user.held_views.begin(), user.held_views.end(), lent)) !=
             user.held_views.end();) {
            std::iter_swap(user.held_views.begin(), it);
            user.drop_view();
        }
        const size_t views = user.held_views.size();
        must(user.put(Message(++number, MAX_BYTES, BUFFERS), Deadline{0}) == Step::Done, "the largest put");
        must(user.get(got, Deadline{0}) == Step::Done && got == number, "get");
        if (user.held_views.size() == views) return;
        std::swap(user.held_views.front(), user.held_views.back());
        user.drop_view();
    }
    // Check that `capacity` items get slots, however the memory has been cut into blocks. After everything
    // is freed, the largest item must again find memory.
    void finish() {
        uint64_t got = 0;
        while (inside.size() < CAPACITY && h.bytes_in - h.bytes_out + 8 <= MAX_BYTES) {
            must(user.put(Message(++number), Deadline{0}) == Step::Done, "a small put");
            inside.push_back(number);
        }
        for (; !inside.empty(); inside.pop_front())
            must(user.get(got, Deadline{0}) == Step::Done && got == inside.front(), "get");
        while (!user.held_views.empty()) user.drop_view();
        must(h.slots_used == 0 && h.viewed_bytes == 0, "slots or views are left");
        for (uint64_t value : {1, 2})
            must(user.loan(value, MAX_BYTES, Deadline{0}) == Step::Done, "the largest loan");
        while (!user.held_views.empty()) user.drop_view();
        user.leave(true);
        printf("%lu found, %lu not, %lu slots\n", static_cast<unsigned long>(hits),
               static_cast<unsigned long>(misses),
               static_cast<unsigned long>((h.length - h.slots_at) / sizeof(Slot)));
    }

  private:
    std::mt19937_64 random;
    Ring ring;
    Header& h;
    User user;
    std::deque<uint64_t> inside;
    uint64_t number = 0, hits = 0, misses = 0;

    // Return the current phase. The memory fills up in one of the two phases and empties in the other.
    bool phase() const { return number / 100 % 2; }
    uint64_t any_size() {
        const uint64_t most = std::max<uint64_t>(MAX_BYTES >> random() % 13, 16);
        return 8 + random() % (most - 8);
    }
    // Return whether a slot is free and a block of this class fits somewhere. Class 0 needs only a slot.
    bool found(uint32_t cls) {
        const uint64_t blocks_end = (h.length - (2 * CAPACITY + SESSIONS) * sizeof(Slot)) / PAGE * PAGE;
        std::vector<std::pair<uint64_t, uint64_t>> used{{blocks_end, blocks_end}};
        bool free = h.slots_at - sizeof(Slot) >= blocks_end;
        for (uint64_t p = h.slots_at; p < h.length; p += sizeof(Slot)) {
            const Slot& s = *ring.slot_at(p);
            free |= s.place() == SlotState::Free;
            if (s.place() != SlotState::Free && s.cls)
                used.emplace_back(s.block, s.block + class_size(uint32_t(s.cls)));
        }
        if (!free || cls == 0) return free;
        std::sort(used.begin(), used.end());
        uint64_t begin = h.blocks_at;
        for (auto [block, end] : used) {
            const uint64_t start = cls >= VIEWABLE ? (begin + PAGE - 1) / PAGE * PAGE : begin;
            if (start + class_size(cls) <= block) return true;
            begin = std::max(begin, end);
        }
        return false;
    }
    void expect(Step step, bool finds, const char* what, uint64_t size) {
        must(step == Step::Done || step == Step::NotNow,
             "a put or loan ended with " + std::to_string(int(step)));
        if (finds)
            must(step == Step::Done,
                 std::string(what) + " of " + std::to_string(size) + " bytes did not find free memory");
        ++(step == Step::Done ? hits : misses);
    }
};

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 3, "arguments: seed, number of steps");
    const uint64_t steps = strtoull(argv[2], nullptr, 10);
    Memory memory(strtoull(argv[1], nullptr, 10));
    for (uint64_t i = 0; i < steps; ++i) {
        memory.step();
        if (i % 100 == 99) memory.largest();
    }
    memory.finish();
}
