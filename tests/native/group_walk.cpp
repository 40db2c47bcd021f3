// The fault walk over groups. A member dies at the n-th fault point of two operations, for n = 1, 2, 3, …
// until it survives. All survivors must complete the same number of operations with the right results, and
// must end in the same way. In "closes" mode, another thread closes the member at the fault point instead.
// The other members must then behave as after a death. Arguments: the operation's number, the number of
// members, the dying member's index, the distance between tested fault points, and "dies" or "closes". If
// the index of the dying member equals the number of members, both the first and the last member die.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "faults.hpp"
#include "group.hpp"

namespace {

using namespace flowchan;

constexpr size_t LARGE = 150'000;  // elements; their data needs several chunks
constexpr int TIMES = 2;

uint32_t remaining_points = 0;
Member* closes = nullptr;  // in "closes" mode, the member to close
std::thread closing;
constexpr int CLOSED = 42;  // exit code of a closed member

struct Outcome {
    std::atomic<pid_t> pid = 0;
    std::atomic<int> begun = 0;  // how many operations the member has started
    int done = 0;
    int end = -1;
    bool right = true;
};

struct Shared {
    Outcome of[8];
    uint32_t survived_points;
};

[[noreturn]] void stop(const char* what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

void must(bool holds, const char* what) {
    if (!holds) stop(what);
}

// Return a thread's state from /proc: 'S' if it sleeps, 'Z' or 'X' if it has ended.
char state_of(pid_t process, pid_t thread) {
    std::ifstream file("/proc/" + std::to_string(process) + "/task/" + std::to_string(thread) + "/stat");
    std::string stat;
    std::getline(file, stat);
    const size_t name_ends = stat.rfind(") ");
    return name_ends == std::string::npos ? 'X' : stat[name_ends + 2];
}

// Wait until a member has ended, or sleeps in operation number `operation`.
void await_member(const Outcome& member, int operation) {
    for (;; std::this_thread::yield()) {
        if (!member.pid) continue;
        const bool has_begun = member.begun >= operation;
        const char state = state_of(member.pid, member.pid);
        if (state == 'Z' || state == 'X' || (has_begun && state == 'S')) return;
    }
}

// Runs one operation with the member's input and checks its result.
struct Walk {
    Member& member;
    Patience patience{Deadline{}};
    float value() const { return float(member.rank + 1); }
    float sum() const { return float(member.size * (member.size + 1)) / 2; }

    struct Into : Member::Place {
        std::vector<std::vector<float>> parts;
        bool operator()(const Sizes& sizes, const ByRank<const void*>&, ByRank<void*>& to) override {
            parts.resize(sizes.size());
            for (size_t r = 0; r < sizes.size(); ++r) {
                parts[r].resize(sizes[r] / 4);
                to[r] = parts[r].data();
            }
            return true;
        }
    };

    static bool all(const std::vector<float>& x, float value) {
        for (float one : x)
            if (one != value) return false;
        return true;
    }

    End reduce(size_t count, bool& right) {
        std::vector<float> x(count, value());
        const End end =
            member.allreduce({4, 1}, {x.data(), x.data(), count, Element::F32, Op::Sum}, patience);
        right = all(x, sum());
        return end;
    }
    End scatter(bool& right) {
        std::vector<float> x(LARGE * member.size, value()), part(LARGE);
        const End end =
            member.reduce_scatter({5, 1}, {x.data(), part.data(), LARGE, Element::F32, Op::Sum}, patience);
        right = all(part, sum());
        return end;
    }
    End broadcast(bool& right) {
        std::vector<float> x(LARGE, value());
        const End end = member.broadcast({2, 1}, x.data(), LARGE * 4, 0, patience);
        right = all(x, 1);
        return end;
    }
    End allgather(bool& right) {
        std::vector<float> x(LARGE * member.rank, value());
        Into into;
        const End end = member.allgather({6, 1}, x.data(), x.size() * 4, into, patience);
        for (size_t r = 0; r < into.parts.size(); ++r)
            right = right && into.parts[r].size() == LARGE * r && all(into.parts[r], float(r + 1));
        return end;
    }
    End alltoall(bool& right) {
        std::vector<float> x(LARGE, value());
        std::vector<std::vector<float>> got(member.size, std::vector<float>(LARGE));
        const Sizes sizes(member.size, LARGE * 4);
        const ByRank<const void*> in(member.size, x.data());
        ByRank<void*> out(member.size);
        for (size_t r = 0; r < got.size(); ++r) out[r] = got[r].data();
        const End end = member.alltoall({9, 1}, {in, sizes, out, sizes}, patience);
        for (size_t r = 0; r < got.size(); ++r) right = right && all(got[r], float(r + 1));
        return end;
    }
    End run(int operation, bool& right) {
        switch (operation) {
            case 0:
                return member.barrier({1, 1}, patience);
            case 1:
                return reduce(3, right);
            case 2:
                return reduce(5000, right);
            case 3:
                return reduce(LARGE, right);
            case 4:
                return scatter(right);
            case 5:
                member.choose(2, Algorithm::Direct);
                return broadcast(right);
            case 6:
                member.choose(6, Algorithm::Direct);
                return allgather(right);
            case 7:
                member.choose(9, Algorithm::Direct);
                return alltoall(right);
            case 8:
                member.choose(2, Algorithm::Chunks);
                return broadcast(right);
            case 9:
                member.choose(6, Algorithm::Chunks);
                return allgather(right);
            case 10:
                member.choose(9, Algorithm::Chunks);
                return alltoall(right);
            default:
                stop("no such operation");
        }
    }
};

void live(int fd, uint32_t rank, uint32_t slow, int operation, bool closes_instead, Shared& shared) {
    Member member(dup(fd), rank);
    must(member.join() == End::Done, "join");
    if (closes_instead) closes = &member;
    Walk walk{member};
    Outcome& own = shared.of[rank];
    for (int i = 0; i < TIMES; ++i) {
        if (i && rank == slow)  // the other members wait for this member, perhaps after a death
            for (uint32_t other = 0; other < member.size; ++other)
                if (other != rank) await_member(shared.of[other], i + 1);
        bool right = true;
        member.in_use().lock();
        own.begun = i + 1;
        const End end = walk.run(operation, right);
        member.in_use().unlock();
        own.end = int(end);
        if (end != End::Done) break;
        own.right = own.right && right;
        own.done += 1;
    }
    if (closing.joinable()) closing.join(), _exit(CLOSED);
}

// Run a group in which the members in `dying` each end at their n-th fault point. Return whether none of them
// reached its n-th fault point.
bool group_survives(int operation, uint32_t size, std::vector<uint32_t> dying, uint32_t n, bool close_them,
                    Shared& shared) {
    new (&shared) Shared{};
    const int fd = Member::make(size);
    std::vector<pid_t> children;
    for (uint32_t rank = 0; rank < size; ++rank) {
        const pid_t child = fork();
        if (child == 0) {
            for (uint32_t i = 0; i < dying.size(); ++i)
                if (dying[i] == rank) remaining_points = n + 3 * i;
            live(fd, rank, (dying[0] + 1) % size, operation, close_them && remaining_points, shared);
            _exit(0);
        }
        shared.of[rank].pid = child;
        children.push_back(child);
    }
    close(fd);
    const Outcome* first = nullptr;
    bool member_died = false;
    for (uint32_t rank = 0; rank < size; ++rank) {
        int status = 0;
        waitpid(children[rank], &status, 0);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (killed || (WIFEXITED(status) && WEXITSTATUS(status) == CLOSED)) {
            member_died = true;
            continue;
        }
        must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a survivor has crashed");
        const Outcome& one = shared.of[rank];
        must(one.right, "a result is wrong");
        must(one.end == int(End::Done) || one.end == int(End::MemberLost),
             "a survivor's operation ended in an unexpected way");
        if (!first) first = &one;
        must(one.done == first->done && one.end == first->end, "the survivors do not agree");
    }
    if (!member_died) must(first && first->done == TIMES, "no member died, but not all operations were done");
    return !member_died;
}

}  // namespace

// Kill the member at the chosen fault point, or close it in another thread. After starting that thread,
// continue once the thread no longer runs, because it then waits for the operation to end.
void flowchan::fault_point() {
    if (!remaining_points || --remaining_points) return;
    if (!closes) raise(SIGKILL);
    std::atomic<pid_t> thread = 0;
    closing = std::thread([&] {
        thread = gettid();
        closes->leave();
    });
    while (!thread || state_of(getpid(), thread) == 'R') std::this_thread::yield();
}

int main(int argc, char** argv) {
    must(argc == 6,
         "arguments: operation, members, dying member, distance between fault points, 'dies' or 'closes'");
    const bool close_them = strcmp(argv[5], "closes") == 0;
    const int operation = atoi(argv[1]);
    const uint32_t size = uint32_t(atoi(argv[2])), who = uint32_t(atoi(argv[3])),
                   every = uint32_t(atoi(argv[4]));
    auto* shared = static_cast<Shared*>(
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const std::vector<uint32_t> dying =
        who == size ? std::vector<uint32_t>{0, size - 1} : std::vector<uint32_t>{who};
    uint32_t n = 1, deaths = 0;
    for (; !group_survives(operation, size, dying, n, close_them, *shared); n += every) deaths += 1;
    must(deaths > 0, "no member died");
    printf("%u deaths\n", deaths);
}
