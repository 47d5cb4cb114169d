// Tiles of the matrix unit (AMX): 16 rows of 64 bytes each. Included by kernels_impl.hpp after tile.hpp,
// where the compiler may use them.
//
// c[m][n] += a[m][k] * b[k][n] for 32 elements of k: the unit sums even and odd elements of k apart,
// in order, then adds both to c. So a result depends on its own row and column alone, and operands
// that are zero change nothing.

constexpr int kAmxRows = 16;     // rows of a tile; and columns of sums
constexpr int kAmxElements = 32;  // bfloat16 in a row of a tile

// GCC's intrinsics don't say that they read memory: what was written at p must be there before.
inline void amx_written(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Sets up all eight tiles of this thread, until the end of the block.
class AmxTiles {
 public:
  AmxTiles() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    amx_written(&config);
    _tile_loadconfig(&config);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// Turns 16 rows of 16 words each, in place.
inline void transpose16(__m512i (&a)[16]) {
  __m512i b[16];
  MILLRACE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  MILLRACE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  MILLRACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  MILLRACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

// c[rows][32] = (Add ? c : 0) + a[rows][k] * b[k][32], for Tiles times 16 rows; k in pairs of
// elements, a multiple of 16. Strides of a and b in bytes, of c in floats.
template <int Tiles, bool Add>
inline void amx_multiply(const void* a, std::int64_t a_stride, const void* b, std::int64_t b_stride,
                         std::int64_t k, float* c, std::int64_t c_stride) {
  amx_written(a);
  const std::int64_t c_bytes = c_stride * 4;
  float* below = c + kAmxRows * c_stride;
  if constexpr (Add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    if constexpr (Tiles > 1) {
      _tile_loadd(2, below, c_bytes);
      _tile_loadd(3, below + 16, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* left = static_cast<const char*>(a);
  const char* right = static_cast<const char*>(b);
  for (std::int64_t i = 0; i < k; i += kAmxElements / 2, left += 64, right += 16 * b_stride) {
    _tile_loadd(4, left, a_stride);
    _tile_loadd(6, right, b_stride);
    _tile_loadd(7, right + 64, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Tiles > 1) {
      _tile_loadd(5, left + kAmxRows * a_stride, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  if constexpr (Tiles > 1) {
    _tile_stored(2, below, c_bytes);
    _tile_stored(3, below + 16, c_bytes);
  }
}
