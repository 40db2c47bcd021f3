// Simulates the tuner with plans whose running times are given. As in a group, the tuner learns an
// operation's time only after the next operation. Prints how often each half of the operations used each
// plan. Arguments: the number of operations per half, the number of plans, and the plans' times in ns,
// starting with those for the first half.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tuner.hpp"

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const int half = std::atoi(argv[1]), plans = std::atoi(argv[2]);
    if (argc != 3 + 2 * plans) return 2;
    flowchan::Tuner tuner((1u << plans) - 1, 0);
    uint32_t plan = 0, before = 0;
    for (int part = 0; part < 2; ++part) {
        std::vector<int> done(plans);
        const auto time = [&](uint32_t of) { return std::atoll(argv[3 + part * plans + int(of)]); };
        for (int i = 0; i < half; ++i) {
            const uint32_t next = tuner.next();
            if (i || part) tuner.took(before, time(before));
            done[plan] += 1;
            before = plan;
            plan = next;
        }
        for (const int count : done) printf("%d ", count);
    }
}
