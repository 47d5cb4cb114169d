// bfloat16 linears in the matrix unit, for any number of rows. Included by linear_impl.hpp.
//
// Weights are the left operand, 16 outputs of 32 elements of k from where they lie. Rows of x are the
// right one: `prepare` has turned blocks of 16 rows into tiles, one behind the other by k. Sums run over
// k in order, 32 elements at a time.

constexpr std::int64_t kAmxTile = kAmxRows * kAmxElements;  // elements of a tile

inline std::int64_t amx_steps(std::int64_t k) { return (k + kAmxElements - 1) / kAmxElements; }

// Blocks of 16 rows of x to tiles, with zeros after k and after the last row.
void prepare_amx(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t k,
                 void* target) {
  const bf16* x = static_cast<const bf16*>(source);
  bf16* to = static_cast<bf16*>(target);
  for (std::int64_t row = 0; row < rows; row += kAmxRows)
    for (std::int64_t j = 0; j < k; j += kAmxElements, to += kAmxTile) {
      const std::int64_t left = k - j < kAmxElements ? k - j : kAmxElements;
      const __mmask32 mask = static_cast<__mmask32>((std::uint64_t{1} << left) - 1);
      __m512i words[kAmxRows];
      MILLRACE_UNROLL
      for (int i = 0; i < kAmxRows; ++i)
        words[i] = row + i < rows ? _mm512_maskz_loadu_epi16(mask, x + (row + i) * stride + j)
                                  : _mm512_setzero_si512();
      transpose16(words);
      MILLRACE_UNROLL
      for (int i = 0; i < kAmxRows; ++i) _mm512_storeu_si512(to + i * kAmxElements, words[i]);
    }
}

// Copies the weights of up to 16 outputs to tiles, with zeros after k and after the last output.
inline void amx_copy_weights(const bf16* w, std::int64_t outputs, std::int64_t k, bf16* tiles) {
  for (std::int64_t row = 0; row < kAmxRows; ++row)
    for (std::int64_t j = 0; j < k; j += kAmxElements) {
      const std::int64_t left = k - j < kAmxElements ? k - j : kAmxElements;
      const std::uint64_t mask = row < outputs ? (std::uint64_t{1} << left) - 1 : 0;
      _mm512_storeu_si512(tiles + j * kAmxRows + row * kAmxElements,
                          _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), w + row * k + j));
    }
}

// The weights of 16 outputs, as tiles find them.
struct AmxWeights {
  const bf16* at;
  std::int64_t stride;  // elements from a row of a tile to the next
  std::int64_t step;    // and from a tile to the next

  // Where they lie; or in `copy`, room for the tiles of all steps, if there are fewer outputs or no
  // whole tiles, or if tiles are read again and again whose rows share their places in the cache.
  AmxWeights(const bf16* w, std::int64_t outputs, std::int64_t k, bool again, bf16* copy)
      : at(w), stride(k), step(kAmxElements) {
    if (outputs >= kAmxRows && k % kAmxElements == 0 && !(again && k % 512 == 0)) return;
    amx_copy_weights(w, outputs, k, copy);
    at = copy;
    stride = kAmxElements;
    step = kAmxTile;
  }
};

// sums[4][16][16] of 16 outputs (times Outputs) and 16 rows (times Blocks).
template <int Outputs, int Blocks>
void amx_tiles(const AmxWeights (&w)[2], const bf16* x, std::int64_t block, std::int64_t steps,
               float* sums) {
  amx_written(x);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bf16 *first = w[0].at, *second = w[1].at;
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, first, w[0].stride * 2);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Blocks > 1) {
      _tile_loadd(7, x + block, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (Outputs > 1) {
      _tile_loadd(5, second, w[1].stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (Blocks > 1) _tile_dpbf16ps(3, 5, 7);
    }
    first += w[0].step;
    second += w[1].step;
    x += kAmxTile;
  }
  _tile_stored(0, sums, 64);
  if constexpr (Blocks > 1) _tile_stored(1, sums + 256, 64);
  if constexpr (Outputs > 1) _tile_stored(2, sums + 512, 64);
  if constexpr (Outputs > 1 && Blocks > 1) _tile_stored(3, sums + 768, 64);
}

// A tile of sums, [16 outputs][16 rows], to its rows of out.
inline void amx_finish(const LinearCall& c, const float* sums, Range rows, Range outputs) {
  const bf16* bias = c.bias ? static_cast<const bf16*>(c.bias) + outputs.first : nullptr;
  const int count = static_cast<int>(outputs.size());
  const Vec offset = !bias ? zero() : load_part(bias, count);
  __m512i words[kAmxRows];
  MILLRACE_UNROLL
  for (int i = 0; i < kAmxRows; ++i) words[i] = _mm512_loadu_si512(sums + i * kAmxRows);
  transpose16(words);
  bf16* out = static_cast<bf16*>(c.out) + rows.first * c.o + outputs.first;
  for (std::int64_t row = 0; row < rows.size(); ++row, out += c.o) {
    const Vec total = {_mm512_castsi512_ps(words[row])};
    const Vec result = bias ? add(total, offset) : total;
    if (count == kAmxRows)
      store(out, result);
    else
      store_part(out, result, count);
  }
}

std::int64_t amx_work_floats(std::int64_t k) {
  return 4 * kAmxRows * kAmxRows + 2 * amx_steps(k) * kAmxTile / 2;
}

std::int64_t prepared_stride_amx(Type type, std::int64_t k) {
  return type == Type::f32 ? arranged_stride(type, k) : amx_steps(k) * kAmxElements;
}

std::int64_t prepared_bytes_amx(Type type, std::int64_t k) {
  if (type == Type::f32) return arranged_bytes(type, k);
  return prepared_stride_amx(type, k) * static_cast<std::int64_t>(sizeof(bf16));
}

void multiply_amx(const LinearCall& c, Range rows, Range outputs, float* work) {
  const AmxTiles tiles;
  const std::int64_t steps = amx_steps(c.k), block = steps * kAmxTile;
  float* sums = work;
  bf16* copies = reinterpret_cast<bf16*>(work + 4 * kAmxRows * kAmxRows);
  const bf16* weight = static_cast<const bf16*>(c.weight);
  const bf16* x = static_cast<const bf16*>(c.x) + rows.first / kAmxRows * block;
  for (std::int64_t o = outputs.first; o < outputs.last; o += 2 * kAmxRows) {
    const std::int64_t left = outputs.last - o;
    const bool paired = left > kAmxRows;
    const bf16* at = weight + o * c.k;
    const bf16* next = paired ? at + kAmxRows * c.k : at;
    const bool again = rows.size() > 2 * kAmxRows;
    const AmxWeights w[2] = {{at, left, c.k, again, copies},
                             {next, paired ? left - kAmxRows : left, c.k, again, copies + block}};
    for (std::int64_t row = rows.first; row < rows.last; row += 2 * kAmxRows) {
      const bool wide = rows.last - row > kAmxRows;
      const bf16* own = x + (row - rows.first) / kAmxRows * block;
      if (paired)
        (wide ? amx_tiles<2, 2> : amx_tiles<2, 1>)(w, own, block, steps, sums);
      else
        (wide ? amx_tiles<1, 2> : amx_tiles<1, 1>)(w, own, block, steps, sums);
      for (int i = 0; i < 4; ++i) {
        const std::int64_t output = o + i / 2 * kAmxRows, first = row + i % 2 * kAmxRows;
        if (output >= outputs.last || first >= rows.last) continue;
        amx_finish(c, sums + i * 256,
                   {first, first + kAmxRows < rows.last ? first + kAmxRows : rows.last},
                   {output, output + kAmxRows < outputs.last ? output + kAmxRows : outputs.last});
      }
    }
  }
}
