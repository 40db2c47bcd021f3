// Kernels that combine the values of several members element by element. They always proceed in the order of
// the ranks, so every member that computes the result gets the same bits.
//
// float16 and bfloat16 values are summed over all members in float32, and rounded once. Integers wrap around.
// Minimum and maximum keep a NaN. All operations keep a NaT (a date or time span without a value).
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// Element types. Raw elements can be moved, but not combined.
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

// Operations, in the order of the names that `op=` accepts.
enum class Op : uint8_t { Sum, Mean, Prod, Min, Max, And, Or, Xor };

// Combines `count` elements of each of `number` inputs into `out`, which may be one of the inputs.
using Kernel = void (*)(void* out, const void* const* in, size_t number, size_t count);

// Returns null if this operation cannot combine elements of this type.
Kernel find_kernel(Element element, Op op);
size_t size_of_element(Element element);

}  // namespace flowchan
