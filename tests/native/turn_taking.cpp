// Simulates turn-taking between two processes that compete for a ring. Each process works for a given time
// between two operations, and starts the next one as soon as it can take the ring. Prints how many runs
// (consecutive operations of one process) there were, and how many rests the processes took. Arguments: the
// first process's working time in ns, the second's, and the number of operations.
#include <cstdio>
#include <cstdlib>

#include "turn_taking.hpp"

namespace {

using flowchan::TurnTaking;

struct Side {
    TurnTaking turn_taking;
    int64_t elsewhere;            // time between two operations
    int64_t free_at = 1'000'000;  // time at which the process next wants the ring
    bool rested = false;
    int64_t rests = 0;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    constexpr int64_t NS = 3, AT_HOME = 50 * NS,
                      // time of an operation: with its cache lines in this core's cache, or in the other's
        NOT_WAITING = 600 * NS;
    const uint64_t operations = std::strtoull(argv[3], nullptr, 10);
    Side sides[2];
    sides[0].elsewhere = std::atoll(argv[1]) * NS;
    sides[1].elsewhere = std::atoll(argv[2]) * NS;
    Side* last = nullptr;
    int64_t now = 0, runs = 0;
    for (uint64_t total = 0; total < operations;) {
        Side& side = sides[sides[1].free_at < sides[0].free_at];
        const bool had = last == &side;
        const int64_t wanted = side.free_at;
        if (!had && !side.rested && side.turn_taking.should_rest(wanted)) {
            side.free_at += TurnTaking::REST;
            side.rested = true;
            side.rests += 1;
            continue;
        }
        if (!had)
            side.turn_taking.took_over(side.rested ? wanted - TurnTaking::REST : wanted, total), runs += 1;
        side.rested = false;
        side.turn_taking.count();
        total += 1;
        now = std::max(now, wanted) + (had ? AT_HOME : NOT_WAITING);
        side.free_at = now + side.elsewhere;
        last = &side;
    }
    printf("%ld runs, %ld rests\n", runs, sides[0].rests + sides[1].rests);
}
