// The inner product tile that prefill attention and wide linears are made of.
//
// Included by kernels_impl.hpp after simd.hpp. A tile of sums lives in registers while one row of B,
// kTileColumns wide, streams past for every step of k; elements of A are broadcast. Sums run over k
// in order, so a result depends on its own row and column alone, never on the tile around it.
//
// A "unit" is what one step multiplies: a float, or a pair of neighbouring bfloat16 where the machine
// multiplies pairs (then k counts pairs, and B holds [k][columns] pairs).

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kTileVecs = 2;
constexpr int kTileColumns = kTileVecs * Vec::N;

struct FloatUnit {
  using Element = float;
  using Operand = Vec;
  static Operand load_row(const float* b) { return load(b); }
  static Operand broadcast(const float* a) { return set1(*a); }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return fma(a, b, c); }
};

#if defined(__AVX512BF16__)
struct bf16_pair {
  bf16 first, second;
};
struct PairUnit {
  using Element = bf16_pair;
  using Operand = __m512bh;
  static Operand load_row(const bf16_pair* b) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
  }
  static Operand broadcast(const bf16_pair* a) {
    int bits;
    __builtin_memcpy(&bits, a, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
  }
  static Vec multiply_add(Operand a, Operand b, Vec c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#endif

// c[R][columns] = (Add ? c : 0) + a[R][k] * b[k][columns], columns = Vecs * Vec::N, kTileColumns unless
// few rows leave registers for more. Strides in units and floats.
template <class Unit, int R, bool Add, int Vecs = kTileVecs>
inline void multiply_tile(const typename Unit::Element* a, std::int64_t a_stride,
                          const typename Unit::Element* b, std::int64_t b_stride, std::int64_t k,
                          float* c, std::int64_t c_stride) {
  Vec sums[R][Vecs];
  MILLRACE_UNROLL
  for (int r = 0; r < R; ++r)
    MILLRACE_UNROLL
    for (int j = 0; j < Vecs; ++j)
      sums[r][j] = Add ? load(c + r * c_stride + j * Vec::N) : zero();
  for (std::int64_t i = 0; i < k; ++i) {
    typename Unit::Operand row[Vecs];
    MILLRACE_UNROLL
    for (int j = 0; j < Vecs; ++j) row[j] = Unit::load_row(b + i * b_stride + j * Vec::N);
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename Unit::Operand element = Unit::broadcast(a + r * a_stride + i);
      MILLRACE_UNROLL
      for (int j = 0; j < Vecs; ++j)
        sums[r][j] = Unit::multiply_add(element, row[j], sums[r][j]);
    }
  }
  MILLRACE_UNROLL
  for (int r = 0; r < R; ++r)
    MILLRACE_UNROLL
    for (int j = 0; j < Vecs; ++j) store(c + r * c_stride + j * Vec::N, sums[r][j]);
}
