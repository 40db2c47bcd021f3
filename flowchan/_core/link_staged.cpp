// Staged items of a link: items that have arrived but still wait for room in their ring. The sending thread
// puts them. On the owner side, it also settles the items that the worker has finished.
#include "link.hpp"

namespace flowchan {

// Put staged items while there is room. Return whether anything moved.
bool Link::move_staged(LinkStream& stream) {
    bool moved = owner_side_ && settle(stream);
    for (Sink& sink : stream.sinks) {
        if (sink.over) continue;
        if (sink.waits_for_room() && sink.has_room(prefetched(stream))) sink.dirty = moved = true;
        while (!sink.staged.empty()) {
            Sink::Staged& first = sink.staged.front();
            if (sink.queue_place.changed()) {
                RingLock holding(*sink.ring);
                sink.queue_place.leave();
            }
            const std::optional<Received> item = to_put(stream, sink, first);
            if (!item) break;
            RingLock holding(*sink.ring);
            const Step step = put(stream, sink, *item, first.output, holding.wakes);
            if (step != Step::Done) break;  // `check_ended` notices rings that have ended
            sink.queue_place.leave();
            sink.unstage();
            sink.dirty = moved = true;
        }
        if (sink.check_ended()) moved = true;
        if (!sink.over && sink.pending_end != Ending::Open && sink.staged.empty()) {
            const Source* numbers = numbering(stream, sink);
            if (numbers && sink.settled < numbers->done && sink.pending_end == Ending::Drained) continue;
            sink.end(sink.pending_end, sink.pending_cause);
            moved = true;
        }
    }
    moved = (owner_side_ && settle(stream)) || moved;
    report_if_finished(stream);
    return moved;
}

// Owner side: report that the worker will send nothing more, and that all of its outputs have been put. While a
// large item arrives, the report waits, because drop_stream() would wait for the item. If the worker is frozen,
// that would block the caller, which must still be able to give up the connection.
void Link::report_if_finished(LinkStream& stream) {
    const auto has_left = [](const Source& source) { return source.left; };
    const auto is_over = [](const Sink& sink) { return sink.over; };
    if (!owner_side_ || stream.finished || stream.filling || !std::ranges::all_of(stream.sources, has_left) ||
        !std::ranges::all_of(stream.sinks, is_over))
        return;
    stream.finished = true;
    report({.kind = LinkEvent::Kind::Finished, .stream = stream.number});
}

// Owner side: settle the items that the worker has finished. If the outputs of a port take turns, first
// record that these items will have no more outputs. Then end the leases. Return whether anything moved.
bool Link::settle(LinkStream& stream) {
    bool moved = false;
    stream.settling = false;
    for (Source& source : stream.sources) {
        uint64_t upto = source.done;
        for (Sink& sink : stream.sinks) {
            if (numbering(stream, sink) != &source) {
                // The outputs of a worker with several inputs do not tell which item they are for.
                if (stream.sources.size() > 1 && !sink.staged.empty()) upto = source.base;
                continue;
            }
            uint64_t most = source.done;
            for (const Sink::Staged& staged : sink.staged)
                if (staged.key != Slot::KEYLESS) {
                    most = std::min(most, staged.key);
                    break;
                }
            if (sink.over) {
                sink.settled = std::max(sink.settled, most);
            } else if (sink.settled < most) {
                RingLock holding(*sink.ring);
                if (sink.queue_place.changed()) sink.queue_place.leave();
                if (!settle_sink(stream, sink, most, holding.wakes)) stream.settling = true;
            }
            upto = std::min(upto, sink.settled);
        }
        for (uint64_t n = std::max(source.settled, source.base); n < upto; ++n)
            report_if_not_remade(stream, source.entries[n - source.base]);
        source.settle(upto);
        moved = source.free_settled() || moved;
        if (source.leaving && !source.left && source.base >= source.done) {
            source.leave();
            moved = true;
        }
    }
    return moved;
}

// Call this under the lock of the sink's ring.
bool Link::settle_sink(LinkStream& stream, Sink& sink, uint64_t upto, Wakes& wakes) {
    Source& source = stream.sources[0];
    while (sink.settled < upto) {
        if (sink.settled >= source.base) {
            const uint64_t number = source.entries[sink.settled - source.base].number;
            if (sink.done_with(number, wakes) != Step::Done) return false;
        }
        sink.settled += 1;
    }
    return true;
}

}  // namespace flowchan
