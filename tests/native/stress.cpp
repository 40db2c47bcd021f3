// Stress test of rings. Several threads or processes start at the same moment and use rings through the
// core's own waiting loop. The totals must be exact. Arguments: `threads` (some map the ring a second time)
// or `processes`, and the number of items per party. This program is built with and without sanitizers.
//
// The thread sanitizer can follow threads that share one Ring, because the ring's lock is a pthread mutex.
// The sanitizer cannot follow threads that use a second mapping of the memory. Such threads take part anyway,
// because the core must work wherever the memory is mapped. The sanitizers also check the copies of payloads,
// which are made without the lock.
#include <sys/mman.h>
#include <sys/wait.h>

#include <array>
#include <thread>

#include "check.hpp"
#include "plants.hpp"
#include "tsan.hpp"
#include "users.hpp"

namespace testing {

namespace {

constexpr uint64_t SIZES[] = {8, 40, 300, 2000, 5000, 20'000};
uint64_t size_for(uint64_t value) { return SIZES[value * 7 % 6]; }

struct Totals {
    std::atomic<uint64_t> count{0}, sum{0}, xored{0};  // totals of all items read
    void add(uint64_t value) {
        count += 1;
        sum += value;
        xored ^= value;
    }
};

// Runs each party in its own thread or process.
class Parties {
  public:
    explicit Parties(bool processes) : processes(processes) {}
    template <class What>
    void start(What what) {
        if (!processes) {
            threads.emplace_back(what);
            return;
        }
        fflush(nullptr);
        pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            what();
            _exit(0);
        }
        children.push_back(child);
    }
    void join() {
        for (std::thread& thread : threads) thread.join();
        for (pid_t child : children) {
            int status = 0;
            must(waitpid(child, &status, 0) == child && status == 0,
                 "a party ended with status " + std::to_string(status));
        }
    }

  private:
    bool processes;
    std::vector<std::thread> threads;
    std::vector<pid_t> children;
};

// Memory shared by all parties, including forked children.
template <class T>
struct Shared {
    T* value;
    Shared() {
        void* p = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        must(p != MAP_FAILED, "mmap");
        value = new (p) T();
    }
    ~Shared() { munmap(value, sizeof(T)); }
    T* operator->() { return value; }
};

void checked(Ring& ring, const char* name) {
    std::string problems;
    locked(ring, [&](Wakes&) { problems = check(ring, {.lost_free_slots = true}); });
    must(problems.empty(), std::string(name) + ": " + problems);
    must(ring.drained(), std::string(name) + " is not drained");
    Header& h = ring.header();
    must(h.readers == 0 && h.writers == 0 && h.slots_used == 0,
         std::string(name) + ": ports or slots are left");
}

// Writers and readers of every kind share one small channel. Each reader must get each writer's items in
// order.
void many_to_many(bool processes, uint64_t each) {
    constexpr uint64_t WRITERS = 3, READERS = 3;
    Ring one(8, 100'000);
    auto other = attach(one);
    Shared<Totals> totals;
    std::vector<std::pair<Ring*, uint32_t>> readers, writers;
    for (uint64_t i = 0; i < READERS; ++i) {
        Ring* ring = i == 2 ? other.get() : &one;
        readers.emplace_back(ring, open_session(*ring, Session::READER));
    }
    for (uint64_t i = 0; i < WRITERS; ++i) {
        Ring* ring = i == 2 ? other.get() : &one;
        writers.emplace_back(ring, open_session(*ring, Session::WRITER));
    }
    Parties parties(processes);
    for (uint64_t i = 0; i < READERS; ++i) {
        parties.start([=, &totals] {
            auto [ring, session] = readers[i];
            locked(*ring, [&](Wakes&) { ring->adopt(session); });
            User user(*ring, session, Session::READER);
            user.reader.lazy = i == 1;
            std::vector<uint64_t> last(WRITERS);
            for (uint64_t value; user.get(value) == Step::Done;) {
                must(value % each >= last[value / each], "a reader got one writer's items out of order");
                last[value / each] = value % each;
                totals->add(value);
                plant(*ring);
            }
            user.leave(true);
        });
    }
    for (uint64_t i = 0; i < WRITERS; ++i) {
        parties.start([=] {
            auto [ring, session] = writers[i];
            locked(*ring, [&](Wakes&) { ring->adopt(session); });
            User user(*ring, session, Session::WRITER);
            for (uint64_t n = 0; n < each; ++n) {
                uint64_t value = i * each + n;
                // Every fourth put has a deadline and may have to be repeated.
                while (user.put(Message(value, size_for(value)),
                                n % 4 ? Deadline{} : Deadline{now_ns() + 20'000}) != Step::Done) {}
            }
            user.leave(true);
        });
    }
    parties.join();
    const uint64_t n = WRITERS * each;
    uint64_t xored = 0;
    for (uint64_t value = 0; value < n; ++value) xored ^= value;
    must(totals->count == n && totals->sum == n * (n - 1) / 2 && totals->xored == xored,
         "the totals of the readers");
    checked(one, "the channel");
}

// Plain users repeatedly get items and put new ones into the ring. They copy items without the lock. Some
// users keep views of the items that they take, and fill items in place.
void round_and_round(bool processes, uint64_t turns) {
    constexpr uint64_t USERS = 4, ITEMS = 5;
    Ring one(8, 1 << 20);  // room for all items, so that the last put does not wait forever
    auto other = attach(one);
    User filler = open(one, Session::PLAIN);
    for (uint64_t value = 0; value < ITEMS; ++value)
        must(filler.put(Message(value, size_for(value))) == Step::Done, "filling");
    Parties parties(processes);
    for (uint64_t i = 0; i < USERS; ++i) {
        parties.start([&, i] {
            Ring& ring = i % 2 ? one : *other;
            User user = open(ring, Session::PLAIN), lender = open(ring, Session::PLAIN);
            user.keeps = i > 1;
            for (uint64_t n = 0; n < turns; ++n) {
                uint64_t value = 0;
                must(user.get(value) == Step::Done, "get");
                const uint64_t size = size_for(value + 1);
                if (i > 1 && n % 3 == 0 && size > Taken::LOCAL) {
                    must(lender.loan(value + 1, size) == Step::Done, "loan");
                    must(user.put_loan(lender) == Step::Done, "put");
                } else {
                    must(user.put(Message(value + 1, size, BUFFERS)) == Step::Done, "put");
                }
                while (user.held_views.size() > n % 4) user.drop_view();
            }
            while (!user.held_views.empty()) user.drop_view();
            lender.leave(true);
            user.leave(true);
        });
    }
    parties.join();
    locked(one, [&](Wakes& wakes) { one.close(wakes); });
    uint64_t sum = 0, value = 0;
    while (filler.get(value) == Step::Done) sum += value;
    must(sum == ITEMS * (ITEMS - 1) / 2 + USERS * turns, "the sum of the circulating items is wrong");
    filler.leave(true);
    checked(one, "the ring of rounds");
}

// An ordered stage between two channels. Item i has i % 4 outputs, which must arrive in the order of the
// items.
void ordered_stage(bool processes, uint64_t items) {
    constexpr uint64_t WORKERS = 3;
    Ring in(6, 1 << 20), out(6, 1 << 20);
    auto other_in = attach(in), other_out = attach(out);
    std::vector<std::array<uint32_t, 2>> ports;
    for (uint64_t i = 0; i < WORKERS; ++i)
        ports.push_back({open_session(in, Session::READER), open_session(out, Session::WRITER)});
    uint32_t source = open_session(in, Session::WRITER);
    Parties parties(processes);
    parties.start([&] {
        locked(in, [&](Wakes&) { in.adopt(source); });
        User user(in, source, Session::WRITER);
        for (uint64_t i = 0; i < items; ++i) must(user.put(Message(i)) == Step::Done, "source");
        user.leave(true);
    });
    for (uint64_t i = 0; i < WORKERS; ++i) {
        parties.start([&, i] {
            Ring &mine = i == 2 ? *other_in : in, &target = i == 2 ? *other_out : out;
            User reader(mine, ports[i][0], Session::READER), writer(target, ports[i][1], Session::WRITER);
            locked(mine, [&](Wakes&) { mine.adopt(reader.session); });
            locked(target, [&](Wakes&) { target.adopt(writer.session); });
            writer.writer.ordered = true;
            for (;;) {
                if (reader.reader.leases) must(writer.done_with(reader.reader.number) == Step::Done, "done");
                uint64_t value = 0;
                if (reader.get(value) != Step::Done) break;
                for (uint64_t k = 0; k < value % 4; ++k)
                    must(writer.put(Message(value * 4 + k, size_for(value + k)), {}, &reader.reader.number) ==
                             Step::Done,
                         "out");
            }
            reader.leave(true);
            writer.leave(true);
        });
    }
    User sink = open(out, Session::PLAIN);
    uint64_t value = 0, seen = 0;
    for (uint64_t i = 0; i < items; ++i)
        for (uint64_t k = 0; k < i % 4; ++k, ++seen)
            must(sink.get(value) == Step::Done && value == i * 4 + k,
                 "the outputs are not in the order of the items");
    must(sink.get(value) == Step::Drained, "more items arrived than were put");
    sink.leave(true);
    parties.join();
    checked(in, "the input");
    checked(out, "the output");
    printf("ordered outputs: %lu\n", static_cast<unsigned long>(seen));
}

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 3, "arguments: 'threads' or 'processes', and the number of items");
    const bool processes = std::string(argv[1]) == "processes";
    const uint64_t n = strtoull(argv[2], nullptr, 10);
    many_to_many(processes, n);
    round_and_round(processes, n);
    ordered_stage(processes, n);
    printf("all totals are exact\n");
}
