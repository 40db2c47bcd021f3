// Walks all operations, or those named on the command line, and prints one line for each: its name, the steps at which a
// process died in it, and those at which a second one died while it recovered. Stops at the first broken promise.
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
    if (argc == 2 && wanted[0] == "planted") Walk(planted_scenario()).run();
    for (auto scenarios : {put_scenarios(), take_scenarios(), session_scenarios(), stage_scenarios()}) {
        for (const Scenario& scenario : scenarios) {
            if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), scenario.name) == wanted.end()) continue;
            Walked walked = Walk(scenario).run();
            printf("%s: %ld %ld\n", scenario.name.c_str(), walked.points, walked.recoveries);
            fflush(stdout);
        }
    }
}
