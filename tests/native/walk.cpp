// `walk EVERY [NAME …]` walks the named operations, or all of them. For each operation, it prints a line with
// the name and two numbers. The first number counts the kills in the operation, and the second the kills of a
// second process in the recovery. The walk kills a process at each fault point of the operation, and a second
// process at every EVERY-th fault point of the recovery. The walk stops at the first violation. `list` only
// prints the names. `planted` walks an operation that must fail.
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
