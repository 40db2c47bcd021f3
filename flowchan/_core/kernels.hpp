// How the values of several members become one: element by element, always in the order of the ranks, so that
// everybody who computes it gets the same bits.
//
// Halves (float16 and bfloat16) are summed in float32 over all members and rounded once. Integers wrap. A NaN
// stays one in minimum and maximum, and a date or time span that is none (NaT) in everything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// What an element is. Raw: bytes that can be moved, and not combined.
enum class Element : uint8_t {
    Raw,
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    C128,
    Date,
    Span
};

// In the order of the names in `op=`.
enum class Op : uint8_t { Sum, Mean, Prod, Min, Max, And, Or, Xor };

// Writes `count` elements: the combination of all `in`. `out` may be one of them.
using Kernel = void (*)(void* out, const void* const* in, size_t number, size_t count);

Kernel find_kernel(Element element, Op op);  // null: there is no such combination
size_t size_of_element(Element element);

}  // namespace flowchan
