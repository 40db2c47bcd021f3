// Counts the cache lines of shared memory that a small put and a small get write, by comparing the memory
// before and after. If the put and the get write the same line, the line moves between the cores of writer
// and reader for every item.
#include <set>

#include "users.hpp"

namespace {

using namespace testing;

constexpr uint64_t LINE = 64;
using Lines = std::set<uint64_t>;  // offsets in the file

struct Picture {
    std::string header, slots;

    explicit Picture(Ring& ring) {
        const Header& h = ring.header();
        header.assign(reinterpret_cast<const char*>(&h), h.blocks_at);
        slots.assign(reinterpret_cast<const char*>(ring.slot_at(h.slots_at)), h.length - h.slots_at);
    }
};

template <class Op>
Lines written(Ring& ring, Op&& op) {
    const uint64_t slots_at = ring.header().slots_at;
    const Picture before(ring);
    op();
    const Picture after(ring);
    Lines lines;
    for (uint64_t i = 0; i < before.header.size(); ++i)
        if (before.header[i] != after.header[i]) lines.insert(i / LINE * LINE);
    for (uint64_t i = 0; i < before.slots.size(); ++i)
        if (before.slots[i] != after.slots[i]) lines.insert((slots_at + i) / LINE * LINE);
    return lines;
}

uint64_t in_both(const Lines& some, const Lines& others) {
    return uint64_t(std::ranges::count_if(some, [&](uint64_t line) { return others.contains(line); }));
}

}  // namespace

int main() {
    Ring ring(64, 1 << 20);
    User writer = open(ring, Session::PLAIN), reader = open(ring, Session::PLAIN);
    uint64_t value = 0;
    const auto put = [&] { must(writer.put(Message(value, 16)) == Step::Done, "put"); };
    const auto get = [&] { must(reader.get(value) == Step::Done, "get"); };
    for (int i = 0; i < 8; ++i) put();
    for (int i = 0; i < 40; ++i) put(), value += 1, get();
    // The put and the get also write the line of the lock. The comparison misses this line, because unlocking
    // restores its content, so add 1 to each count.
    const Lines of_put = written(ring, put), of_get = written(ring, get);
    const Lines of_next = written(ring, put);
    printf("a put writes %zu lines, a get %zu, both %ld; the get and the next put %ld\n", of_put.size() + 1,
           of_get.size() + 1, in_both(of_put, of_get) + 1, in_both(of_get, of_next) + 1);
}
