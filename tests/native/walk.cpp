// `walk EVERY [NAME …]` walks the named operations, or all of them. It prints a line per operation: its name,
// and two counts. The first is how many of its steps were tried as the point of death. The second is how many
// steps of the recovery were tried as the point of death of a second process. This covers one of every EVERY
// fault points. The walk stops at the first violation. `list` only prints the names. `planted` walks an
// operation that must fail.
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
    must(argc > 1, "walk EVERY [NAME …] | list | planted");
    const std::string first = argv[1];
    std::vector<std::string> wanted(argv + 2, argv + argc);
    const bool list = first == "list";
    if (first == "planted") Walk(planted_scenario(), 1).run();
    const long every = list ? 1 : std::stol(first);
    for (auto scenarios : {put_scenarios(), take_scenarios(), session_scenarios(), stage_scenarios(),
                           view_scenarios(), memory_scenarios(), bundle_scenarios()}) {
        for (const Scenario& scenario : scenarios) {
            if (list) {
                puts(scenario.name.c_str());
                continue;
            }
            if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), scenario.name) == wanted.end())
                continue;
            Walked walked = Walk(scenario, every).run();
            printf("%s: %ld %ld\n", scenario.name.c_str(), walked.points, walked.recoveries);
            fflush(stdout);
        }
    }
}
