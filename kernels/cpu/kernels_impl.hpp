// The CPU kernels, written once over Vec (simd.hpp). Each kernels_<isa>.cpp includes this file
// compiled for its instruction set and names its table with MILLRACE_ISA and MILLRACE_TABLE.
//
// Everything accumulates in float32, and the number of threads changes no order of sums. Each kernel
// adds a row in an order that depends on the row's own length alone. Which kernel runs may depend on the
// number of rows, but for `alike_linear` and attention in tiles.

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// In front of every loop over registers: left as a loop, it would put them in memory.
#if defined(__clang__)
#define MILLRACE_UNROLL _Pragma("unroll")
#else
#define MILLRACE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace millrace {
namespace {

#include "simd.hpp"
#include "tile.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

inline Vec rounded_as(Vec a, const float*) { return a; }
inline Vec rounded_as(Vec a, const bf16*) { return round_to_bf16(a); }

inline std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

#include "attention_impl.hpp"
#include "attention_few_impl.hpp"
#include "attention_pack_impl.hpp"
#include "attention_tiles_impl.hpp"
#include "linear_impl.hpp"
#include "rows_impl.hpp"
#include "sampling_impl.hpp"

}  // namespace

const Kernels& MILLRACE_TABLE() {
  #if defined(__AMX_BF16__)
  constexpr bool has_matrix_unit = true;
#else
  constexpr bool has_matrix_unit = false;
#endif
  static constexpr Kernels table = {MILLRACE_ISA,    kAttention, kAlikeLinear, kFastLinear,
                                    has_matrix_unit, kRows,      kSampling};
  return table;
}

}  // namespace millrace
