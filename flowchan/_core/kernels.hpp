// Kernels that combine the members' values element by element. They always combine the values in rank order,
// so every member computes the same bits.
//
// The sum of float16 or bfloat16 values is computed in float32 and rounded once. Integers wrap around.
// Minimum and maximum propagate NaN; all operations propagate NaT (a missing date or time span).
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// Element types. Raw elements can only be moved, not combined.
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

// Operations, in the order of the names for `op=`.
enum class Op : uint8_t { Sum, Mean, Prod, Min, Max, And, Or, Xor };

// Combines `count` elements from each of `number` inputs into `out`, which may be an input.
using Kernel = void (*)(void* out, const void* const* in, size_t number, size_t count);

// Returns null if the operation is undefined for this element type.
Kernel find_kernel(Element element, Op op);
size_t size_of_element(Element element);

}  // namespace flowchan
