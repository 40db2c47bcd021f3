// The operations of a group.
//
// Algorithm. In the first round of an operation, all members publish their calls and reach the same verdict
// about them. Data that does not fit into that round follows in further rounds, one chunk per round. A member
// writes its next chunk to one slot while the others still read the previous chunk from its other slot.
#include "group.hpp"
#include "process.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#if defined(__SSE2__)
#    include <emmintrin.h>
#endif

namespace flowchan {

namespace {

constexpr size_t LEAST_CHUNK = 32 * 1024;
constexpr size_t WARM = 2 * 1024;  // bytes that stay in the first-level cache between two copies

// Returns a chunk size that splits the data into at least two chunks.
size_t halves_of(size_t bytes, size_t most) {
    return std::clamp((bytes / 2 + LINE - 1) / LINE * LINE, std::min(LEAST_CHUNK, most), most);
}

// Returns a chunk size that does not split data of up to `most` bytes.
size_t chunk_of(size_t bytes, size_t most) {
    return bytes <= most ? std::max<size_t>(bytes, 1) : halves_of(bytes, most);
}

// Returns how many bytes of a chunk go to each other member. `place_of_part` returns the offset of member
// `to`'s part.
size_t part_of(size_t chunk, uint32_t size) {
    const uint32_t others = std::max(size - 1, 1u);
    return std::min(std::max(chunk / others, LEAST_CHUNK / 2), BIG / others) / LINE * LINE;
}
size_t place_of_part(uint32_t from, uint32_t to, size_t part) { return (to - (to > from)) * part; }

size_t chunks(size_t bytes, size_t chunk) { return std::max<size_t>(1, (bytes + chunk - 1) / chunk); }

// Returns where part i of n begins when `bytes` bytes are divided at cache-line boundaries.
size_t cut(size_t bytes, uint32_t i, uint32_t n) { return i == n ? bytes : bytes * i / n / LINE * LINE; }

const unsigned char* at(const void* memory, size_t offset) {
    return static_cast<const unsigned char*>(memory) + offset;
}
unsigned char* at(void* memory, size_t offset) { return static_cast<unsigned char*>(memory) + offset; }

void copy(void* to, const void* from, size_t bytes) {
    if (bytes && to != from) memcpy(to, from, bytes);
}

// Copies with stores that bypass the caches. Ordinary stores of large data would evict lines that are needed
// again, and fetch each target line before overwriting it.
void copy_past(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
    const size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) % LINE);
    copy(to, from, head);
    unsigned char* target = at(to, head);
    const unsigned char* source = at(from, head);
    const size_t lines = (bytes - head) / LINE;
    for (size_t i = 0; i < lines; ++i, target += LINE, source += LINE)
        for (size_t j = 0; j < LINE; j += sizeof(__m128i))
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + j),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + j)));
    _mm_sfence();
    copy(target, source, (bytes - head) % LINE);
#else
    copy(to, from, bytes);
#endif
}

using Inputs = ByRank<const void*>;

}  // namespace

template <class Fill>
End Member::show(Call call, uint64_t bytes, size_t payload_size, Fill fill, Patience& patience,
                 uint32_t flags) {
    if (const End end = begin(call); end != End::Done) return end;
    if (payload_size > SMALL) patience.waits();
    const bool fits = payload_size <= SMALL || reserve_big();
    unsigned char* to = payload(rank, payload_size);
    const bool past = timed_.is && PLANS[timed_.plan].shows_past;
    for (size_t i = LINE; !past && payload_size <= SMALL && i < payload_size; i += LINE) prefetch(to + i);
    const int64_t began = timed_.is ? now_ns() : 0;
    if (fits) fill(to);
    if (timed_.is) filled_ = saturated(now_ns() - began);
    publish(call, flags | (fits ? 0 : NO_MEMORY), bytes);
    End end = await_all(patience);
    if (end == End::Done) end = judge(call);
    if (end == End::Done) have_come(call);
    return end;
}

End Member::next(Call call, Patience& patience) {
    publish(call, 0, 0);
    return await_all(patience);
}

End Member::show_big(Call call, bool fits, Patience& patience) {
    publish(call, fits ? 0 : NO_MEMORY, 0);
    const End end = await_all(patience);
    return end == End::Done ? judge(call) : end;
}

// Reads with two threads, or with one if the system refuses to start a second thread.
bool Member::pull(const Plan& plan, uint32_t member, uint64_t from, void* to, size_t bytes) const {
    const size_t half = plan.by_two ? bytes / 2 / LINE * LINE : 0;
    bool could = true;
    std::thread other;
    try {
        NoSignals none;
        if (half) other = std::thread([&] { could = pull_by_one(member, from, to, half); });
    } catch (const std::system_error&) {
        return pull_by_one(member, from, to, bytes);
    }
    const bool could_too = pull_by_one(member, from + half, at(to, half), bytes - half);
    if (half) other.join();
    return could && could_too;
}

// Reads the data and, in the same system call, the proof that this memory belongs to the member.
bool Member::pull_by_one(uint32_t member, uint64_t from, void* to, size_t bytes) const {
    constexpr size_t PIECE = 16 << 20;
    if (!bytes) return true;
    const MemberSlot& its = slot_of(member);
    const auto address = [](uint64_t at) { return reinterpret_cast<void*>(at); };
    for (size_t done = 0; done < bytes;) {
        const size_t length = std::min(bytes - done, PIECE);
        uint64_t proof = 0;
        const iovec local[] = {{&proof, sizeof proof}, {at(to, done), length}};
        const iovec remote[] = {{address(its.proof.load(std::memory_order_relaxed)), sizeof proof},
                                {address(from + done), length}};
        const ssize_t got = process_vm_readv(pid_t(its.owner.load()), local, 2, remote, 2, 0);
        if (got != ssize_t(sizeof proof + length) || proof != proof_of(member)) return false;
        done += length;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return its.membership.load() == PRESENT;  // otherwise, the data may have changed before the read
}

End Member::have_read(Call call, bool could, Patience& patience) {
    round_ += 1;
    publish(call, could ? 0 : COULD_NOT, 0);
    const End end = await_all(patience);
    for (uint32_t member = 0; end == End::Done && member < size; ++member)
        if (cell(member).flags & COULD_NOT) direct_ = false;
    return end;
}

End Member::barrier(Call call, Patience& patience) {
    return finish(show(call, 0, 0, [](void*) {}, patience));
}

// Runs an operation in a group of one, for example if each host has only one member.
End Member::alone(Call call, const void* in, void* out, size_t bytes) {
    const End end = begin(call);
    if (end == End::Done && in != out) copy(out, in, bytes);
    return finish(end);
}

End Member::allreduce(Call call, const Combining& what, Patience& patience) {
    const size_t bytes = what.count * size_of_element(what.element);
    if (size == 1) return alone(call, what.in, what.out, bytes);
    const Plan& plan = begin_plan(call.doing, bytes);
    return finish(plan.algorithm == Algorithm::Exchange ? exchange(plan, call, what, patience)
                                                        : slices(plan, call, what, patience));
}

// Runs a reduction in which each member reads all inputs, large ones in chunks.
End Member::exchange(const Plan& plan, Call call, const Combining& what, Patience& patience) {
    const size_t width = size_of_element(what.element), bytes = what.count * width;
    const size_t chunk = chunk_of(bytes, plan.piece);
    const size_t rounds = chunks(bytes, chunk), shown = std::min(bytes, chunk);
    const auto write = plan.shows_past ? copy_past : copy;
    const Kernel kernel = find_kernel(what.element, what.op);
    const auto length = [&](size_t t) { return std::min(chunk, bytes - t * chunk); };
    const auto stage = [&](size_t t) { write(payload(rank, shown), at(what.in, t * chunk), length(t)); };
    Inputs inputs(size);
    End end = show(call, bytes, shown, [&](void*) { stage(0); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        for (uint32_t r = 0; r < size; ++r)
            inputs[r] = r == rank ? at(what.in, t * chunk) : payload(r, shown);
        if (what.root < 0 || uint32_t(what.root) == rank)
            kernel(at(what.out, t * chunk), inputs.data(), size, length(t) / width);
        if (t + 1 == rounds) break;
        round_ += 1;
        stage(t + 1);
        end = next(call, patience);
    }
    return end;
}

// Runs a reduction in which each member combines its own part of every chunk. In round t, a member publishes
// the other members' parts of chunk t, and its result for chunk t − 1.
End Member::slices(const Plan& plan, Call call, const Combining& what, Patience& patience) {
    const size_t width = size_of_element(what.element), bytes = what.count * width,
                 chunk = halves_of(bytes, plan.piece);
    const size_t rounds = chunks(bytes, chunk);
    const bool gets = what.root < 0 || uint32_t(what.root) == rank;
    const auto write = plan.shows_past ? copy_past : copy;
    const Kernel kernel = find_kernel(what.element, what.op);
    const auto length = [&](size_t t) { return std::min(chunk, bytes - t * chunk); };
    const auto stage = [&](size_t t, void* to) {
        const size_t from = cut(length(t), rank, size), upto = cut(length(t), rank + 1, size);
        write(to, at(what.in, t * chunk), from);
        write(at(to, upto), at(what.in, t * chunk + upto), length(t) - upto);
    };
    const auto reduce = [&](size_t t) {
        const size_t from = cut(length(t), rank, size), upto = cut(length(t), rank + 1, size);
        unsigned char* to = result(rank, round_ + 1);
        alignas(LINE) unsigned char near[WARM];
        Inputs inputs(size);
        for (size_t p = from; p < upto; p += WARM, to += WARM) {
            const size_t piece = std::min(WARM, upto - p);
            for (uint32_t r = 0; r < size; ++r)
                inputs[r] = r == rank ? at(what.in, t * chunk + p) : at(big(r), p);
            unsigned char* found = plan.shows_past ? near : to;
            kernel(found, inputs.data(), size, piece / width);
            if (plan.shows_past) copy_past(to, near, piece);
            if (gets) copy(at(what.out, t * chunk + p), found, piece);
        }
    };
    const auto gather = [&](size_t t) {
        for (uint32_t i = 1; gets && i < size; ++i) {
            const uint32_t r = (rank + i) % size;
            const size_t from = cut(length(t), r, size), upto = cut(length(t), r + 1, size);
            copy(at(what.out, t * chunk + from), result(r, round_), upto - from);
        }
    };
    End end = show(call, bytes, chunk, [&](void*) { stage(0, big(rank)); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        if (t) gather(t - 1);
        if (t == rounds) break;
        reduce(t);
        round_ += 1;
        if (t + 1 < rounds) stage(t + 1, big(rank));
        end = next(call, patience);
    }
    return end;
}

// Each slot is divided into one part per other member.
End Member::reduce_scatter(Call call, const Combining& what, Patience& patience) {
    const size_t width = size_of_element(what.element), bytes = what.count * width;
    const Plan& plan = begin_plan(call.doing, bytes);
    const auto write = plan.shows_past ? copy_past : copy;
    const size_t part = std::min(part_of(plan.piece, size), (bytes + LINE - 1) / LINE * LINE);
    const size_t rounds = part ? chunks(bytes, part) : 1;
    const auto length = [&](size_t t) { return std::min(part, bytes - t * part); };
    const auto stage = [&](size_t t, void* to) {
        for (uint32_t r = 0; r < size; ++r)
            if (r != rank)
                write(at(to, place_of_part(rank, r, part)), at(what.in, r * bytes + t * part), length(t));
    };
    Inputs inputs(size);
    const size_t shown = part * std::max(size - 1, 1u);
    End end = show(call, bytes, shown, [&](void* to) { stage(0, to); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        for (uint32_t r = 0; r < size; ++r)
            inputs[r] = r == rank ? at(what.in, rank * bytes + t * part)
                                  : at(payload(r, shown), place_of_part(r, rank, part));
        find_kernel(what.element, what.op)(at(what.out, t * part), inputs.data(), size, length(t) / width);
        if (t + 1 == rounds) break;
        round_ += 1;
        stage(t + 1, payload(rank, shown));
        end = next(call, patience);
    }
    return finish(end);
}

End Member::broadcast(Call call, void* data, size_t bytes, uint32_t root, Patience& patience) {
    if (size == 1) return alone(call, data, data, bytes);
    const Plan& plan = begin_plan(call.doing, bytes);
    const bool direct = plan.algorithm == Algorithm::Direct;
    const size_t chunk = chunk_of(bytes, plan.piece), rounds = chunks(bytes, chunk);
    const auto write = plan.shows_past ? copy_past : copy, give = plan.keeps_past ? copy_past : copy;
    const auto length = [&](size_t t) { return std::min(chunk, bytes - t * chunk); };
    const auto stage = [&](size_t t) {
        if (rank == root) write(payload(rank, chunk), at(data, t * chunk), length(t));
    };
    const uint64_t from = reinterpret_cast<uint64_t>(data);
    const auto tell = [&](void* to) { direct ? copy(to, &from, sizeof from) : stage(0); };
    End end = show(call, bytes, direct ? sizeof from : chunk, tell, patience);
    if (end == End::Done && direct) {
        patience.waits();
        end = have_read(call, rank == root || pull(plan, root, shown_at(root), data, bytes), patience);
        if (end != End::Done || direct_) return finish(end);
        round_ += 1;
        const bool fits = reserve_big();
        if (fits) stage(0);
        end = show_big(call, fits, patience);
    }
    for (size_t t = 0; end == End::Done; ++t) {
        if (rank != root) give(at(data, t * chunk), payload(root, chunk), length(t));
        if (t + 1 == rounds) break;
        round_ += 1;
        stage(t + 1);
        end = next(call, patience);
    }
    return finish(end);
}

template <class Has, class Write, class Read>
End Member::follow(Call call, uint64_t rounds, Patience& patience, Has has, Write write, Read read) {
    for (uint64_t t = 0; t < rounds; ++t) {
        round_ += 1;
        const bool fits = !has(t) || reserve_big();
        if (fits && has(t)) write(t);
        if (const End end = show_big(call, fits, patience); end != End::Done) return end;
        for (uint32_t i = 1; i < size; ++i) read(t, (rank + i) % size);
    }
    return End::Done;
}

// The state of an allgather, with one entry per member.
struct Member::Gathering {
    Gathering(const Member& member, const Plan& plan, const void* in)
        : plan(plan),
          in(in),
          sizes(member.size),
          moved(member.size),
          pieces(member.size),
          in_place(member.size),
          to(member.size),
          shown(member.size) {
        for (uint32_t r = 0; r < member.size; ++r) {
            sizes[r] = member.cell(r).bytes;
            in_place[r] = member.cell(r).flags & IN_PLACE;
            pieces[r] = member.plan_of_member(r).piece;
            moved[r] = in_place[r] ? 0 : std::min(sizes[r], pieces[r]);
            if (!in_place[r] && sizes[r] <= pieces[r]) shown[r] = member.payload(r, sizes[r]);
        }
    }
    uint64_t from(uint32_t r, uint64_t t) const { return std::min(sizes[r], moved[r] + t * pieces[r]); }
    uint64_t length(uint32_t r, uint64_t t) const { return std::min(pieces[r], sizes[r] - from(r, t)); }
    uint64_t rounds() const {
        uint64_t most = 0;
        for (uint32_t r = 0; r < sizes.size(); ++r)
            if (sizes[r] > moved[r]) most = std::max<uint64_t>(most, chunks(sizes[r] - moved[r], pieces[r]));
        return most;
    }

    const Plan& plan;
    const void* const in;
    // moved: how many bytes a member publishes in the first round for the other members to read
    Sizes sizes, moved, pieces;
    ByRank<bool> in_place;
    ByRank<void*> to;
    ByRank<const void*> shown;
};

// The first round publishes small data in full. For larger data, it publishes the address or the first chunk.
End Member::allgather(Call call, const void* in, size_t bytes, Place& place, Patience& patience) {
    const Plan& plan = begin_plan(call.doing, bytes);
    const bool direct = plan.algorithm == Algorithm::Direct;
    const auto write = plan.shows_past ? copy_past : copy, give = plan.keeps_past ? copy_past : copy;
    const uint64_t from = reinterpret_cast<uint64_t>(in), first = std::min(bytes, plan.piece);
    const auto tell = [&](void* slot) { direct ? copy(slot, &from, sizeof from) : write(slot, in, first); };
    End end = show(call, bytes, direct ? sizeof from : first, tell, patience, direct ? IN_PLACE : 0);
    if (end != End::Done) return finish(end);
    Gathering all(*this, plan, in);
    if (!place(all.sizes, all.shown, all.to)) return finish(End::Interrupted);
    end = take_shown(call, all, patience);
    if (end != End::Done) return finish(end);
    const auto has = [&](uint64_t t) { return all.length(rank, t) > 0; };
    const auto stage = [&](uint64_t t) { write(big(rank), at(in, all.from(rank, t)), all.length(rank, t)); };
    const auto take = [&](uint64_t t, uint32_t r) {
        if (all.to[r]) give(at(all.to[r], all.from(r, t)), big(r), all.length(r, t));
    };
    return finish(follow(call, all.rounds(), patience, has, stage, take));
}

End Member::take_shown(Call call, Gathering& all, Patience& patience) {
    const auto give = all.plan.keeps_past ? copy_past : copy;
    if (*std::max_element(all.sizes.begin(), all.sizes.end()) > SMALL) patience.waits();
    if (all.to[rank] && all.to[rank] != all.in) give(all.to[rank], all.in, all.sizes[rank]);
    bool could = true;
    for (uint32_t i = 1; i < size; ++i) {
        const uint32_t r = (rank + i) % size;
        if (!all.to[r]) continue;
        if (all.moved[r]) give(all.to[r], payload(r, all.moved[r]), all.moved[r]);
        if (all.in_place[r]) could = could && pull(all.plan, r, shown_at(r), all.to[r], all.sizes[r]);
    }
    if (std::find(all.in_place.begin(), all.in_place.end(), true) == all.in_place.end()) return End::Done;
    const End end = have_read(call, could, patience);
    for (uint32_t r = 0; direct_ && r < size; ++r)
        if (all.in_place[r]) all.moved[r] = all.sizes[r];
    return end;
}

// The state of an alltoall, with one entry per member.
struct Member::Swapping {
    Swapping(const Member& member, const Plan& plan, const Parts& parts)
        : plan(plan), parts(parts), rests(member.size), pieces(member.size), in_place(member.size) {
        for (uint32_t r = 0; r < member.size; ++r) {
            rests[r] = member.cell(r).bytes;
            in_place[r] = member.cell(r).flags & IN_PLACE;
            pieces[r] = part_of(member.plan_of_member(r).piece, member.size);
        }
    }
    uint64_t from(uint32_t r, uint64_t t, uint64_t bytes) const { return std::min(bytes, t * pieces[r]); }
    uint64_t length(uint32_t r, uint64_t t, uint64_t bytes) const {
        return std::min(pieces[r], bytes - from(r, t, bytes));
    }
    uint64_t rounds() const {
        uint64_t most = 0;
        for (uint32_t r = 0; r < rests.size(); ++r)
            if (rests[r]) most = std::max<uint64_t>(most, chunks(rests[r], pieces[r]));
        return most;
    }

    const Plan& plan;
    const Parts& parts;
    // rests: size of the largest part that is still unpublished; pieces: bytes published per round
    Sizes rests, pieces;
    ByRank<bool> in_place;
};

// The first round publishes the sizes that each member sends and expects, so that all members detect the same
// mismatches. It also publishes small data, and the addresses of large data.
End Member::alltoall(Call call, const Parts& parts, Patience& patience) {
    const size_t row = size * sizeof(uint64_t);
    const auto& [in, in_sizes, out, out_sizes] = parts;
    const bool little = 2 * row + std::accumulate(in_sizes.begin(), in_sizes.end(), uint64_t{}) <= SMALL;
    uint64_t most = 0;  // maximum number of bytes for any other member
    for (uint32_t r = 0; r < size; ++r) most = r == rank ? most : std::max(most, in_sizes[r]);
    const Plan& plan = begin_plan(call.doing, little ? 0 : most);
    const bool direct = !little && 3 * row <= SMALL && plan.algorithm == Algorithm::Direct;
    const auto tell = [&, &in = in, &in_sizes = in_sizes, &out_sizes = out_sizes](void* slot) {
        memcpy(slot, in_sizes.data(), row);
        memcpy(at(slot, row), out_sizes.data(), row);
        unsigned char* to = at(slot, 2 * row);
        if (direct) memcpy(to, in.data(), row);
        for (uint32_t r = 0; little && r < size; to += in_sizes[r++]) copy(to, in[r], in_sizes[r]);
    };
    End end = show(call, little ? 0 : most, SMALL, tell, patience, direct ? IN_PLACE : 0);
    if (end == End::Done && !sizes_match()) end = End::Mismatch;
    if (end != End::Done) return finish(end);
    Swapping all(*this, plan, parts);
    end = take_shown(call, all, patience);
    if (end != End::Done) return finish(end);
    const auto write = plan.shows_past ? copy_past : copy, give = plan.keeps_past ? copy_past : copy;
    const auto has = [&](uint64_t) { return all.rests[rank] > 0; };
    const auto stage = [&](uint64_t t) {
        for (uint32_t r = 0; r < size; ++r) {
            const uint64_t bytes = parts.in_sizes[r];
            if (r != rank)
                write(big(rank) + place_of_part(rank, r, all.pieces[rank]),
                      at(parts.in[r], all.from(rank, t, bytes)), all.length(rank, t, bytes));
        }
    };
    const auto take = [&](uint64_t t, uint32_t r) {
        const uint64_t bytes = parts.out_sizes[r];
        if (all.rests[r])
            give(at(parts.out[r], all.from(r, t, bytes)), big(r) + place_of_part(r, rank, all.pieces[r]),
                 all.length(r, t, bytes));
    };
    return finish(follow(call, all.rounds(), patience, has, stage, take));
}

// Compares all sizes after the first round of an alltoall. Each small slot begins with the sizes that its
// owner sends and expects.
bool Member::sizes_match() const {
    const auto sizes_from = [&](uint32_t r) { return reinterpret_cast<const uint64_t*>(small(r)); };
    for (uint32_t r = 0; r < size; ++r)
        for (uint32_t q = 0; q < size; ++q)
            if (sizes_from(r)[q] != sizes_from(q)[size + r]) return false;
    return true;
}

End Member::take_shown(Call call, Swapping& all, Patience& patience) {
    const auto& [in, in_sizes, out, out_sizes] = all.parts;
    const auto give = all.plan.keeps_past ? copy_past : copy;
    if (*std::max_element(all.rests.begin(), all.rests.end())) patience.waits();
    give(out[rank], in[rank], out_sizes[rank]);
    bool could = true;
    for (uint32_t i = 1; i < size; ++i) {
        const uint32_t r = (rank + i) % size;
        const uint64_t* sends = reinterpret_cast<const uint64_t*>(small(r));
        if (all.in_place[r]) could = could && pull(all.plan, r, sends[2 * size + rank], out[r], out_sizes[r]);
        if (all.rests[r]) continue;
        const uint64_t before = std::accumulate(sends, sends + rank, uint64_t{});
        copy(out[r], at(small(r), 2 * size * sizeof(uint64_t) + before), out_sizes[r]);
    }
    if (std::find(all.in_place.begin(), all.in_place.end(), true) == all.in_place.end()) return End::Done;
    const End end = have_read(call, could, patience);
    for (uint32_t r = 0; direct_ && r < size; ++r)
        if (all.in_place[r]) all.rests[r] = 0;
    return end;
}

}  // namespace flowchan
