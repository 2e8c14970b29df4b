// The inner kernel of `linear`: a few rows of x against a few panels of the packed weight. Every output is
// one sum over k = 0, 1, 2, ... in float32, whatever the tile: rows are broadcast, outputs lie across the
// lanes, and nothing is summed horizontally.
#pragma once

#include <algorithm>

#include "rows.h"

namespace specdec::cpu::SPECDEC_ISA {

// Rows of x are copied to float32 tiles [chunk][MR][kChunkStride] of kChunk inputs each: with a stride known
// to the compiler one base register serves every row. The padding keeps rows out of each other's cache sets.
constexpr int64_t kChunk = 512;
constexpr int64_t kChunkStride = kChunk + 16;

constexpr int kHalfPanel = kPanelWidth / 2;
// A slice is the part of a panel that two vectors cover: outputs [j, j + width) and [j + 16, j + 16 + width).
constexpr int kSlices = kHalfPanel / Vec::kWidth;

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;  // 12 accumulators of 16 registers
#else
constexpr int kMaxRows = 4;
#endif

// Slices that one pass takes: with few rows several of them are needed to hide the latency of the additions.
template <int MR>
constexpr int kSlicesPerPass = MR == 1                     ? 4
                               : MR == 2                   ? 2
                               : MR == 3 && kMaxRows == 12 ? 2
                                                           : 1;

template <typename W>
inline constexpr bool kHasScales = sizeof(W) == 1;

template <typename W>
inline const W* slice_weights(const W* weight, int64_t K, int64_t slice) {
  constexpr int per_slice = Vec::kWidth * (sizeof(W) == 2 ? 2 : 1);
  const int64_t rows = K + (kHasScales<W> ? kScaleRows : 0);
  return weight + slice / kSlices * rows * kPanelWidth + slice % kSlices * per_slice;
}

inline int64_t slice_column(int64_t slice) {
  return slice / kSlices * kPanelWidth + slice % kSlices * Vec::kWidth;
}

inline void load_pair(const float* p, Vec& lo, Vec& hi) {
  lo = Vec::load(p);
  hi = Vec::load(p + kHalfPanel);
}

// Two bfloat16 in a 32-bit word: a shift and a mask give both as float32, exactly.
inline void load_pair(const bf16* p, Vec& lo, Vec& hi) {
#if defined(__AVX512F__)
  const __m512i words = _mm512_loadu_si512(p);
  lo.x = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  hi.x = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(__AVX2__)
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  lo.x = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  hi.x = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
#else
  typedef uint32_t Words __attribute__((vector_size(Vec::kWidth * 4)));
  Words words;
  std::memcpy(&words, p, sizeof(words));
  const Words low = words << 16, high = words & 0xffff0000u;
  std::memcpy(&lo.x, &low, sizeof(low));
  std::memcpy(&hi.x, &high, sizeof(high));
#endif
}

inline Vec load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#elif defined(__AVX2__)
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#else
  Vec v;
  for (int i = 0; i < Vec::kWidth; ++i) v.x[i] = p[i];
  return v;
#endif
}

inline void load_pair(const int8_t* p, Vec& lo, Vec& hi) {
  lo = load_bytes(p);
  hi = load_bytes(p + kHalfPanel);
}

// Where a tile's results go: float32 rows, `stride` apart, starting at column 0.
struct TileOutput {
  float* y;
  int64_t stride;
  int64_t N;              // columns that exist
  const float* bias;      // [N] or null
  const float* residual;  // like y, `stride` apart, or null
};

inline void store_columns(const TileOutput& out, int64_t row, int64_t column, Vec a) {
  const int64_t count = std::min<int64_t>(Vec::kWidth, out.N - column);
  if (count <= 0) return;
  const int64_t at = row * out.stride + column;
  if (out.bias != nullptr) a = a + load_some(out.bias + column, count);
  if (out.residual != nullptr) a = a + load_some(out.residual + at, count);
  store_some(out.y + at, a, count);
}

// y[0:MR, columns of slices [slice, slice + NS)] = x W^T + bias.
template <typename W, int MR, int NS>
inline void tile(const float* x, const W* weight, int64_t K, int64_t slice, const TileOutput& out) {
  const W* w[NS];
  for (int s = 0; s < NS; ++s) w[s] = slice_weights(weight, K, slice + s);
  Vec acc[MR][NS][2];
  for (int r = 0; r < MR; ++r) {
    for (int s = 0; s < NS; ++s) acc[r][s][0] = acc[r][s][1] = Vec::zero();
  }
  for (int64_t done = 0; done < K; done += kChunk, x += MR * kChunkStride) {
    const int64_t count = std::min(kChunk, K - done);
    for (int64_t k = 0; k < count; ++k) {
      Vec lo[NS], hi[NS];
      for (int s = 0; s < NS; ++s) load_pair(w[s] + k * kPanelWidth, lo[s], hi[s]);
      for (int r = 0; r < MR; ++r) {
        const Vec broadcast = Vec::set(x[r * kChunkStride + k]);
        for (int s = 0; s < NS; ++s) {
          acc[r][s][0] = fma(broadcast, lo[s], acc[r][s][0]);
          acc[r][s][1] = fma(broadcast, hi[s], acc[r][s][1]);
        }
      }
    }
    for (int s = 0; s < NS; ++s) w[s] += count * kPanelWidth;
  }
  if constexpr (kHasScales<W>) {
    for (int s = 0; s < NS; ++s) {
      const char* panel =
          reinterpret_cast<const char*>(slice_weights(weight, K, (slice + s) / kSlices * kSlices));
      const char* scales = panel + K * kPanelWidth + slice_column((slice + s) % kSlices) * sizeof(float);
      for (int half = 0; half < 2; ++half) {
        float lanes[Vec::kWidth];
        std::memcpy(lanes, scales + half * kHalfPanel * sizeof(float), sizeof(lanes));
        for (int r = 0; r < MR; ++r) acc[r][s][half] = acc[r][s][half] * Vec::load(lanes);
      }
    }
  }
  for (int r = 0; r < MR; ++r) {
    for (int s = 0; s < NS; ++s) {
      const int64_t column = slice_column(slice + s);
      store_columns(out, r, column, acc[r][s][0]);
      store_columns(out, r, column + kHalfPanel, acc[r][s][1]);
    }
  }
}

// All slices of [begin, end) for one tile of MR rows.
template <typename W, int MR>
void tile_slices(const float* x, const W* weight, int64_t K, int64_t begin, int64_t end,
                 const TileOutput& out) {
  constexpr int NS = kSlicesPerPass<MR>;
  int64_t slice = begin;
  for (; slice + NS <= end; slice += NS) tile<W, MR, NS>(x, weight, K, slice, out);
  if constexpr (NS > 1) {
    for (; slice < end; ++slice) tile<W, MR, 1>(x, weight, K, slice, out);
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
