// Keeps more bytes in a link's send buffer than one system call can send. Checks that the bytes arrive
// unchanged, and that no allocation grows large. Arguments: the number of rounds, and the number of bytes to
// copy per round.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "link.hpp"
#include "users.hpp"

static std::atomic<size_t> largest{0};

void* operator new(size_t size) {
    size_t before = largest;
    while (size > before && !largest.compare_exchange_weak(before, size)) {}
    if (void* at = malloc(size)) return at;
    throw std::bad_alloc();
}
void operator delete(void* at) noexcept { free(at); }
void operator delete(void* at, size_t) noexcept { free(at); }

namespace testing {

namespace {

constexpr uint64_t IN_PLACE = 100'000, AT_A_TIME = 64 << 10, LEFT = 1000;

char byte_at(uint64_t place) { return char(place * 11400714819323198485u >> 56); }

// Check that bytes arrive in the order in which they were added.
void run(uint64_t rounds, uint64_t copied) {
    const auto ring = std::make_shared<Ring>(16, 1 << 20);
    const uint64_t round = copied + IN_PLACE, all = rounds * round;
    // The bytes sent in place are the same in all rounds; the copied bytes identify the round.
    std::string lies(IN_PLACE, '\0'), begins(copied, '\0');
    for (uint64_t i = 0; i < IN_PLACE; ++i) lies[i] = byte_at(i);
    int ends[2];
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
    std::thread receiver([&] {
        std::string came(AT_A_TIME, '\0');
        for (uint64_t have = 0; have < all;) {
            const ssize_t n = read(ends[1], came.data(), came.size());
            must(n > 0, "the connection ended too early");
            for (uint64_t i = 0; i < uint64_t(n); ++i, ++have) {
                const uint64_t place = have % round;
                const char right = place < copied ? byte_at(have / round + place) : lies[place - copied];
                // Do not use `must`, which would make a string for each byte and take 100 times as long as
                // the comparison.
                if (came[i] != right) die("byte " + std::to_string(have) + " is wrong");
            }
        }
    });
    Outgoing out;
    for (uint64_t n = 0; n < rounds; ++n) {
        for (uint64_t i = 0; i < copied; ++i) begins[i] = byte_at(n + i);
        out.add(begins.data(), 1, begins.data() + 1, copied - 1);
        out.add_in_place(ring, lies.data(), lies.size());
        while (out.size() > LEFT)
            must(out.send(ends[0], std::min(AT_A_TIME, out.size() - LEFT)) == "", "send");
    }
    must(out.send(ends[0], out.size()) == "", "send");
    receiver.join();
    must(largest < (1 << 20), std::to_string(largest) + " bytes are allocated in one piece");
    printf("received all %lu bytes\n", static_cast<unsigned long>(all));
}

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 3, "arguments: rounds, copied bytes per round");
    run(strtoull(argv[1], nullptr, 10), strtoull(argv[2], nullptr, 10));
}
