// Stress test of links. Remote workers process items over a link whose connection keeps breaking, and the
// totals must be exact (R4). Arguments: the number of items, the number of workers, `ordered` or `unordered`,
// and breaks per second (0: none). This program is built with and without sanitizers.
#include <sys/socket.h>

#include <random>
#include <thread>

#include "check.hpp"
#include "link.hpp"
#include "plants.hpp"
#include "tsan.hpp"
#include "users.hpp"

namespace testing {

namespace {

// Sizes of items: some are copied by the link, some are sent without a copy, and some are received without a
// copy.
constexpr uint64_t SIZES[] = {8, 40, 300, 3000, 8, 20'000, 8, 70'000, 150'000};
uint64_t size_for(uint64_t value) { return SIZES[value * 7 % 9]; }
constexpr uint64_t MOST_OUTPUTS = 4;
uint64_t outputs_for(uint64_t item) { return item % MOST_OUTPUTS; }

constexpr uint64_t BYTES_INSIDE = 4 << 20;

// A remote worker: the worker side's rings for its ports, and the link's ports of these rings.
struct RemoteWorker {
    std::shared_ptr<Ring> into = std::make_shared<Ring>(1 << 12, BYTES_INSIDE);
    std::shared_ptr<Ring> out = std::make_shared<Ring>(64, BYTES_INSIDE);
    const uint32_t feed = open_session(*into, Session::WRITER), drain = open_session(*out, Session::READER);
    User reads = open(*into, Session::READER), writes = open(*out, Session::WRITER);

    // `shared`: the ring in which all workers plant faults.
    void work(Ring& shared) {
        uint64_t item = 0;
        while (next(item)) {
            plant(shared);
            for (uint64_t k = 0; k < outputs_for(item); ++k) {
                const uint64_t output = item * MOST_OUTPUTS + k;
                must(writes.put(Message(output, size_for(output)), {}, &reads.reader.number) == Step::Done,
                     "an output");
            }
        }
        reads.leave(true);
        writes.leave(true);
    }

  private:
    bool next(uint64_t& item) {
        if (reads.reader.leases) must(writes.done_with(reads.reader.number) == Step::Done, "done");
        return reads.get(item) == Step::Done;
    }
};

// Both sides of a link, and the connection between them.
struct Linked {
    Link owner_side{true}, worker_side{false};

    void connect() {
        int ends[2];
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
        owner_side.attach(ends[0]);
        worker_side.attach(ends[1]);
    }
};

void break_often(Linked& linked, uint64_t often, const std::atomic<bool>& over) {
    std::minstd_rand random{uint32_t(often)};
    while (!over) {
        usleep(useconds_t(random() % (2'000'000 / often)));
        linked.connect();
        while (linked.owner_side.next_event(0).kind != LinkEvent::Kind::None) {}
        while (linked.worker_side.next_event(0).kind != LinkEvent::Kind::None) {}
    }
}

struct Totals {
    uint64_t count = 0, sum = 0, xored = 0;
    void add(uint64_t value) {
        count += 1;
        sum += value;
        xored ^= value;
    }
    bool operator==(const Totals&) const = default;
};

void run(uint64_t items, uint64_t workers, bool ordered, uint64_t often) {
    auto source = std::make_shared<Ring>(100, BYTES_INSIDE),
         results = std::make_shared<Ring>(100, BYTES_INSIDE);
    Linked linked;
    std::vector<std::unique_ptr<RemoteWorker>> remote;
    User feeder = open(*source, Session::WRITER), sink = open(*results, Session::PLAIN);
    for (uint32_t number = 1; number <= workers; ++number) {
        remote.push_back(std::make_unique<RemoteWorker>());
        WriterState writer, feed;
        writer.session = open_session(*results, Session::WRITER);
        writer.ordered = ordered;
        feed.session = remote.back()->feed;
        linked.owner_side.open_stream(number, {{source, open_session(*source, Session::READER)}},
                                      {{results, writer, true, false}}, false, false);
        linked.worker_side.open_stream(number, {{remote.back()->out, remote.back()->drain}},
                                       {{remote.back()->into, feed, false, false}}, false, false);
    }
    linked.connect();

    std::atomic<bool> over = false;
    std::vector<std::thread> threads;
    for (auto& one : remote) threads.emplace_back([&] { one->work(*source); });
    threads.emplace_back([&] {
        for (uint64_t item = 0; item < items; ++item)
            must(feeder.put(Message(item, size_for(item))) == Step::Done, "an item could not be put");
        feeder.leave(true);
    });
    if (often) threads.emplace_back([&] { break_often(linked, often, over); });

    Totals right, found;
    for (uint64_t item = 0; item < items; ++item) {
        for (uint64_t k = 0; k < outputs_for(item); ++k) {
            uint64_t value = 0;
            must(sink.get(value) == Step::Done, "an output is missing");
            right.add(item * MOST_OUTPUTS + k);
            found.add(value);
            must(!ordered || value == item * MOST_OUTPUTS + k,
                 "the outputs are not in the order of the items");
        }
    }
    uint64_t more = 0;
    must(sink.get(more) == Step::Drained, "more items arrived than were put");
    must(right == found, "the totals of the outputs are wrong");
    over = true;
    for (std::thread& thread : threads) thread.join();
    const uint64_t breaks = linked.owner_side.breaks;
    linked.owner_side.close();
    linked.worker_side.close();
    sink.leave(true);
    for (Ring* ring : {source.get(), results.get()}) {
        const std::string wrong = locked(*ring, [&](Wakes&) { return check(*ring); });
        must(wrong.empty(), wrong);
    }
    printf("all totals are exact: %lu outputs over %lu breaks\n", static_cast<unsigned long>(found.count),
           static_cast<unsigned long>(breaks));
}

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 5, "arguments: items, workers, 'ordered' or 'unordered', breaks per second");
    run(strtoull(argv[1], nullptr, 10), strtoull(argv[2], nullptr, 10), std::string(argv[3]) == "ordered",
        strtoull(argv[4], nullptr, 10));
}
