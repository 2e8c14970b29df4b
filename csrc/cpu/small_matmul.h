// Float32 products of small matrices out of register blocks: rows of A broadcast, columns of B in vectors.
// B is cut into panels of kPanel columns, each contiguous, so that a panel of a state (256 x 32) fits the
// first cache. Every element of the result is one chain of fused multiply-adds over ascending k: its bits do
// not depend on the blocking, the number of columns or the split over threads.
#pragma once

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

constexpr int kPanelVecs = 2;
constexpr int64_t kPanel = kPanelVecs * Vec::kWidth;

// Rows of a register block: with kPanelVecs vectors each, 16 accumulators of 32 registers, or 8 of 16.
#if defined(__AVX512F__)
constexpr int kBlock = 8;
#else
constexpr int kBlock = 4;
#endif

// Element (m, k) of A lies at a[m * lda + k] or at a[k * lda + m].
enum class Layout { kRows, kColumns };

// C = A B, C += A B, C = diag(scale) C + A B.
enum class Into { kSet, kAdd, kScaleAdd };

struct RowScale {
  const float* data = nullptr;
  int64_t stride = 0;  // 0: one number for all rows
};

// Memory that will be needed next, fetched into the second cache while a product is formed: `bytes` of it for
// each k of a block of kBlock rows.
struct Upcoming {
  const char* data = nullptr;
  int64_t bytes = 0;
};

// C [kM, kV vectors] from A [kM, K] and B [K, kV vectors].
template <int kM, int kV, Layout kA, Into kInto, bool kFetch = false>
inline void multiply_block(int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                           int64_t ldc, RowScale scale = {}, Upcoming upcoming = {}) {
  Vec sum[kM][kV];
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      if constexpr (kInto == Into::kSet) {
        sum[m][v] = Vec::zero();
      } else {
        sum[m][v] = Vec::load(c + m * ldc + v * Vec::kWidth);
        if constexpr (kInto == Into::kScaleAdd)
          sum[m][v] = Vec::set(scale.data[m * scale.stride]) * sum[m][v];
      }
    }
  }
  for (int64_t k = 0; k < K; ++k) {
    if constexpr (kFetch) __builtin_prefetch(upcoming.data + k * upcoming.bytes, 0, 2);
    Vec row[kV];
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) row[v] = Vec::load(b + k * ldb + v * Vec::kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const Vec factor = Vec::set(kA == Layout::kRows ? a[m * lda + k] : a[k * lda + m]);
#pragma GCC unroll 2
      for (int v = 0; v < kV; ++v) sum[m][v] = fma(factor, row[v], sum[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) sum[m][v].store(c + m * ldc + v * Vec::kWidth);
  }
}

// C [M, kV vectors], any M.
template <int kV, Layout kA, Into kInto>
inline void multiply(int64_t M, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                     int64_t ldc, RowScale scale = {}) {
  constexpr int kM = kBlock * kPanelVecs / kV;
  const int64_t step = kA == Layout::kRows ? lda : 1;
  const auto scale_at = [&](int64_t m) { return RowScale{scale.data + m * scale.stride, scale.stride}; };
  int64_t m = 0;
  for (; m + kM <= M; m += kM) {
    multiply_block<kM, kV, kA, kInto>(K, a + m * step, lda, b, ldb, c + m * ldc, ldc, scale_at(m));
  }
  for (; kM > kBlock && m + kBlock <= M; m += kBlock) {
    multiply_block<kBlock, kV, kA, kInto>(K, a + m * step, lda, b, ldb, c + m * ldc, ldc, scale_at(m));
  }
  for (; m < M; ++m) {
    multiply_block<1, kV, kA, kInto>(K, a + m * step, lda, b, ldb, c + m * ldc, ldc, scale_at(m));
  }
}

// --- transposition ---

// A square of kWidth x kWidth.
inline void transpose_square(const float* source, int64_t lds, float* target, int64_t ldt) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(source + i * lds);
  // Pairs of elements, then pairs of pairs, then 128-bit lanes, then halves.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[i], r[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[i], r[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[i + 2], r[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[i + 2], r[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // t[4 i + j]: columns j, j + 4, j + 8, j + 12 of rows 4 i to 4 i + 3
    const __m512 a = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xdd);
    _mm512_storeu_ps(target + j * ldt, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(target + (j + 4) * ldt, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(target + (j + 8) * ldt, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(target + (j + 12) * ldt, _mm512_shuffle_f32x4(c, d, 0xdd));
  }
#elif defined(__AVX2__)
  __m256 t[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 r0 = _mm256_loadu_ps(source + i * lds), r1 = _mm256_loadu_ps(source + (i + 1) * lds);
    const __m256 r2 = _mm256_loadu_ps(source + (i + 2) * lds), r3 = _mm256_loadu_ps(source + (i + 3) * lds);
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(target + j * ldt, _mm256_permute2f128_ps(t[j], t[4 + j], 0x20));
    _mm256_storeu_ps(target + (j + 4) * ldt, _mm256_permute2f128_ps(t[j], t[4 + j], 0x31));
  }
#else
  for (int i = 0; i < Vec::kWidth; ++i) {
    for (int j = 0; j < Vec::kWidth; ++j) target[j * ldt + i] = source[i * lds + j];
  }
#endif
}

// target [cols, rows] <- source [rows, cols].
inline void transpose(int64_t rows, int64_t cols, const float* source, int64_t lds, float* target,
                      int64_t ldt) {
  constexpr int64_t w = Vec::kWidth;
  int64_t i = 0;
  for (; i + w <= rows; i += w) {
    int64_t j = 0;
    for (; j + w <= cols; j += w) transpose_square(source + i * lds + j, lds, target + j * ldt + i, ldt);
    for (; j < cols; ++j) {
      for (int64_t r = i; r < i + w; ++r) target[j * ldt + r] = source[r * lds + j];
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) target[j * ldt + i] = source[i * lds + j];
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
