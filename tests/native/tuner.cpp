// Simulate the tuner over several plans with given times. Arguments: the number of operations in each half, the number
// of plans, and the ns of each plan in the first half and in the second half. Prints how many operations in each half
// used each plan. The time of an operation is known when the next operation has finished.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tuner.hpp"

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const int half = std::atoi(argv[1]), ways = std::atoi(argv[2]);
    if (argc != 3 + 2 * ways) return 2;
    flowchan::Trial trial((1u << ways) - 1, 0);
    uint32_t way = 0, before = 0;
    for (int part = 0; part < 2; ++part) {
        std::vector<int> done(ways);
        const auto time = [&](uint32_t of) { return std::atoll(argv[3 + part * ways + int(of)]); };
        for (int i = 0; i < half; ++i) {
            const uint32_t next = trial.next();
            if (i || part) trial.took(before, time(before));
            done[way] += 1;
            before = way;
            way = next;
        }
        for (const int count : done) printf("%d ", count);
    }
}
