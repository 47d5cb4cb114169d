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
  template <class B>  // rows of B may lie in bfloat16
  static Operand load_row(const B* b) { return load(b); }
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

#if defined(__AVX2__)
// Turns 8 rows of 8 words each, in place.
inline void transpose(__m256i (&a)[8]) {
  __m256i pairs[8], quads[8];
  MILLRACE_UNROLL
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  MILLRACE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  MILLRACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
    a[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
  }
}

inline void store_words(void* to, __m256i a) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), a);
}
#endif

// c[R][kTileColumns] = (Add ? c : 0) + a[R][k] * b[k][kTileColumns]. Strides in units and floats.
template <class Unit, int R, bool Add, class B>
inline void multiply_tile(const typename Unit::Element* a, std::int64_t a_stride,
                          const B* b, std::int64_t b_stride, std::int64_t k,
                          float* c, std::int64_t c_stride) {
  Vec sums[R][kTileVecs];
  MILLRACE_UNROLL
  for (int r = 0; r < R; ++r)
    MILLRACE_UNROLL
    for (int j = 0; j < kTileVecs; ++j)
      sums[r][j] = Add ? load(c + r * c_stride + j * Vec::N) : zero();
  for (std::int64_t i = 0; i < k; ++i) {
    typename Unit::Operand row[kTileVecs];
    MILLRACE_UNROLL
    for (int j = 0; j < kTileVecs; ++j) row[j] = Unit::load_row(b + i * b_stride + j * Vec::N);
    MILLRACE_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename Unit::Operand element = Unit::broadcast(a + r * a_stride + i);
      MILLRACE_UNROLL
      for (int j = 0; j < kTileVecs; ++j)
        sums[r][j] = Unit::multiply_add(element, row[j], sums[r][j]);
    }
  }
  MILLRACE_UNROLL
  for (int r = 0; r < R; ++r)
    MILLRACE_UNROLL
    for (int j = 0; j < kTileVecs; ++j) store(c + r * c_stride + j * Vec::N, sums[r][j]);
}
