// Walks all operations, or those named on the command line, and prints one line for each: its name, the
// number of steps at which a process died in it, and of those at which a second one died while it recovered.
// Stops at the first broken promise. `list` prints the names only; `planted` walks an operation that must
// fail.
#include "walk.hpp"

#include <algorithm>

void flowchan::fault_point() {
    if (testing::fault_left && --testing::fault_left == 0) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

int main(int argc, char** argv) {
    using namespace testing;
    std::vector<std::string> wanted(argv + 1, argv + argc);
    if (wanted == std::vector<std::string>{"planted"}) Walk(planted_scenario()).run();
    const bool list = wanted == std::vector<std::string>{"list"};
    for (auto scenarios : {put_scenarios(), take_scenarios(), session_scenarios(), stage_scenarios(),
                           view_scenarios(), memory_scenarios(), parcel_scenarios()}) {
        for (const Scenario& scenario : scenarios) {
            if (list) puts(scenario.name.c_str());
            if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), scenario.name) == wanted.end())
                continue;
            Walked walked = Walk(scenario).run();
            printf("%s: %ld %ld\n", scenario.name.c_str(), walked.points, walked.recoveries);
            fflush(stdout);
        }
    }
}
