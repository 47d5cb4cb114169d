// One vector of floats, as wide as the instruction set that this file is compiled for.
//
// Included inside an anonymous namespace by kernels_impl.hpp, so that no function compiled for one
// instruction set can be linked into another's build. For the same reason no standard library
// template is used from here on.

inline float to_float(float a) { return a; }
inline float to_float(bf16 a) {
  const std::uint32_t u = static_cast<std::uint32_t>(a.bits) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline void assign(float* p, float a) { *p = a; }
inline void assign(bf16* p, float a) {
  std::uint32_t u;
  __builtin_memcpy(&u, &a, 4);
  p->bits = static_cast<std::uint16_t>(a != a ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct Vec {
  static constexpr int N = 16;
  __m512 v;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float a) { return {_mm512_set1_ps(a)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_part(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Vec widen(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Vec load(const bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_part(const bf16* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline __m512i rounded_bits(Vec a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}
// Of 2 * N neighbours the even ones, and the odd ones.
inline Vec load_even(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline Vec load_odd(const bf16* p) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)))};
}
inline __m256i narrow(Vec a) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(a), 16));
}
inline Vec round_to_bf16(Vec a) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded_bits(a), high))};
}
inline void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a));
}
inline void store_part(bf16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a));
}
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec round_nearest(Vec a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// 2^n for a whole n in [-127, 127]; -127 gives 0.
inline Vec power_of_two(Vec n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
// Bit i says whether a[i] >= b[i].
inline std::uint64_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// The sums of four vectors. The order of additions within one vector doesn't depend on its place.
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
inline float sum(Vec a) {
  float out[4];
  sum4(a, a, a, a, out);
  return out[0];
}

#elif defined(__AVX2__) && defined(__FMA__)

struct Vec {
  static constexpr int N = 8;
  __m256 v;
};

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float a) { return {_mm256_set1_ps(a)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_part(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
inline void store_part(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
inline Vec widen(__m128i h) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline Vec load(const bf16* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_part(const bf16* p, int n) {
  bf16 part[8] = {};
  __builtin_memcpy(part, p, static_cast<unsigned>(n) * sizeof(bf16));
  return load(part);
}
inline __m256i rounded_bits(Vec a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
inline Vec round_to_bf16(Vec a) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(rounded_bits(a), high))};
}
// Of 2 * N neighbours the even ones, and the odd ones.
inline Vec load_even(const bf16* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
}
inline Vec load_odd(const bf16* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)))};
}
inline __m128i narrow(Vec a) {
  const __m256i high = _mm256_srli_epi32(rounded_bits(a), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store(bf16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a));
}
inline void store_part(bf16* p, Vec a, int n) {
  bf16 part[8];
  store(part, a);
  __builtin_memcpy(p, part, static_cast<unsigned>(n) * sizeof(bf16));
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec round_nearest(Vec a) { return {_mm256_round_ps(a.v, 8)}; }
inline Vec power_of_two(Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
inline float sum(Vec a) {
  float out[4];
  sum4(a, a, a, a, out);
  return out[0];
}
inline std::uint64_t at_least(Vec a, Vec b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
inline float largest(Vec a) {
  float lanes[8];
  store(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < 8; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

#else

// Plain loops: the compiler makes SSE2 or NEON of them.
struct Vec {
  static constexpr int N = 8;
  float v[8];
};

#define MILLRACE_EACH(expression)                        \
  Vec r;                                                 \
  for (int i = 0; i < Vec::N; ++i) r.v[i] = (expression); \
  return r

inline Vec set1(float a) { MILLRACE_EACH(a); }
inline Vec zero() { return set1(0.0f); }
template <class T>
inline Vec load(const T* p) { MILLRACE_EACH(to_float(p[i])); }
inline Vec load_even(const bf16* p) { MILLRACE_EACH(to_float(p[2 * i])); }
inline Vec load_odd(const bf16* p) { MILLRACE_EACH(to_float(p[2 * i + 1])); }
template <class T>
inline Vec load_part(const T* p, int n) { MILLRACE_EACH(i < n ? to_float(p[i]) : 0.0f); }
template <class T>
inline void store(T* p, Vec a) {
  for (int i = 0; i < Vec::N; ++i) assign(p + i, a.v[i]);
}
template <class T>
inline void store_part(T* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) assign(p + i, a.v[i]);
}
inline float round_to_bf16(float a) {
  bf16 rounded;
  assign(&rounded, a);
  return to_float(rounded);
}
inline Vec round_to_bf16(Vec a) { MILLRACE_EACH(round_to_bf16(a.v[i])); }
inline Vec add(Vec a, Vec b) { MILLRACE_EACH(a.v[i] + b.v[i]); }
inline Vec sub(Vec a, Vec b) { MILLRACE_EACH(a.v[i] - b.v[i]); }
inline Vec mul(Vec a, Vec b) { MILLRACE_EACH(a.v[i] * b.v[i]); }
inline Vec div(Vec a, Vec b) { MILLRACE_EACH(a.v[i] / b.v[i]); }
inline Vec max(Vec a, Vec b) { MILLRACE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vec min(Vec a, Vec b) { MILLRACE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
#if defined(__FP_FAST_FMAF)
inline Vec fma(Vec a, Vec b, Vec c) { MILLRACE_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
#else
inline Vec fma(Vec a, Vec b, Vec c) { MILLRACE_EACH(a.v[i] * b.v[i] + c.v[i]); }
#endif
inline Vec round_nearest(Vec a) { MILLRACE_EACH(__builtin_rintf(a.v[i])); }
inline Vec power_of_two(Vec n) {
  Vec r;
  for (int i = 0; i < Vec::N; ++i) {
    const std::uint32_t u = static_cast<std::uint32_t>(static_cast<int>(n.v[i]) + 127) << 23;
    __builtin_memcpy(&r.v[i], &u, 4);
  }
  return r;
}
inline float sum(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[1] + a.v[5])) + ((a.v[2] + a.v[6]) + (a.v[3] + a.v[7]));
}
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
}
inline std::uint64_t at_least(Vec a, Vec b) {
  std::uint64_t bits = 0;
  for (int i = 0; i < Vec::N; ++i) bits |= static_cast<std::uint64_t>(a.v[i] >= b.v[i]) << i;
  return bits;
}
inline float largest(Vec a) {
  float best = a.v[0];
  for (int i = 1; i < Vec::N; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}

#undef MILLRACE_EACH
#endif

// e^x = 2^n (1 + r + tail r) for x = n ln 2 + r (minimax coefficients from the Cephes library's expf).
struct Exponent {
  Vec n, r, tail;
};
inline Exponent exponent_of(Vec x) {
  const Vec n = round_nearest(mul(x, set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return {n, r, mul(p, r)};
}

// e^x, about 1 ulp for x in [-87, 88]; smaller x gives 0.
inline Vec exp(Vec x) {
  // The constants come first: min and max then hand on a NaN in x.
  const Exponent e = exponent_of(max(set1(-88.03f), min(set1(88.0f), x)));
  return mul(fma(e.tail, e.r, add(e.r, set1(1.0f))), power_of_two(e.n));
}
