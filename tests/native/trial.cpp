// A trial of two ways. Arguments: the ns that each takes in the first half, those in the second half, and how many
// operations a half has. Prints how many of each half were done in the second way.
#include <cstdio>
#include <cstdlib>

#include "trial.hpp"

int main(int argc, char** argv) {
    if (argc != 6) return 2;
    const int half = std::atoi(argv[5]);
    flowchan::Trial trial;
    bool way = false;
    for (int part = 0; part < 2; ++part) {
        int second = 0;
        for (int i = 0; i < half; ++i) {
            const bool next = trial.next();
            second += way;
            trial.took(way, std::atoll(argv[1 + 2 * part + way]));
            way = next;
        }
        printf("%d ", second);
    }
}
