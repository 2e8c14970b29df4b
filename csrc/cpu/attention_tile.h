// The two products of attention on a few keys, and the softmax between them. Keys and values are float32 rows
// behind pointers, so that a key does the same whether it stands in the cache or in the tree.
#pragma once

#include <limits>

#include "rows.h"
#include "simd_math.h"
#include "simd_reduce.h"

namespace specdec::cpu::SPECDEC_ISA {

// A block's answer for one query: two numbers, then the values' sum [D].
struct Answer {
  static constexpr int64_t kMax = 0, kSum = 1;  // greatest score, sum of the weights e^(score - greatest)
  static constexpr int64_t kValues = 16;        // a cache line, so that the sum is aligned

  static int64_t floats(int64_t D) { return kValues + D; }
};

// Lane i: q . keys[i], every sum in the order that D fixes. kVecs: vectors of a row, 0 for any number.
template <int kVecs>
SPECDEC_INLINE Vec dots(const float* q, const float* const (&keys)[Vec::kWidth], int64_t D) {
  const int64_t width = kVecs > 0 ? kVecs * Vec::kWidth : D;
  Vec sums[Vec::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < Vec::kWidth; ++i) {
    const float* key = keys[i];
    Vec sum = Vec::load(q) * Vec::load(key);
#pragma GCC unroll 8
    for (int64_t c = Vec::kWidth; c < width; c += Vec::kWidth) {
      sum = fma(Vec::load(q + c), Vec::load(key + c), sum);
    }
    sums[i] = sum;
  }
  return hsum_all(sums);
}

// scores [rows, stride] <- the products of q [rows, D] with `count` keys.
template <int kVecs>
inline void score_keys(const float* q, int64_t rows, const float* const* keys, int64_t count, int64_t D,
                       float* scores, int64_t stride) {
  const float* group[Vec::kWidth];
  for_vectors(count, [&](int64_t first, int64_t n) {
    for (int64_t i = 0; i < Vec::kWidth; ++i) group[i] = keys[first + std::min(i, n - 1)];
    for (int64_t r = 0; r < rows; ++r) {
      store_some(scores + r * stride + first, dots<kVecs>(q + r * D, group, D), n);
    }
  });
}

inline float hmax(Vec a) {
  float lanes[Vec::kWidth];
  a.store(lanes);
  float most = lanes[0];
  for (int i = 1; i < Vec::kWidth; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// scores [count] -> weights in place, and the two numbers of the answer. Lane i adds the keys i, i + width,
// ... of the block; lanes beyond the last key add zeros, which changes nothing.
inline void soften(float* scores, int64_t count, float* answer) {
  const Vec lowest = Vec::set(-std::numeric_limits<float>::infinity());
  const int64_t padded = (count + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
  for (int64_t t = count; t < padded; ++t) scores[t] = -std::numeric_limits<float>::infinity();
  Vec most = lowest;
  for (int64_t t = 0; t < padded; t += Vec::kWidth) most = max(most, Vec::load(scores + t));
  answer[Answer::kMax] = hmax(most);
  most = Vec::set(answer[Answer::kMax]);
  Vec sum = Vec::zero();
  for (int64_t t = 0; t < padded; t += Vec::kWidth) {
    const Vec weight = exp(Vec::load(scores + t) - most);
    weight.store(scores + t);
    sum = sum + weight;
  }
  answer[Answer::kSum] = hsum(sum);
}

// sums[r] [kVecs vectors] += weights[r, t] * values[t], key after key.
template <int kRows, int kVecs>
SPECDEC_INLINE void add_values(const float* weights, int64_t stride, const float* const* values,
                               int64_t count, int64_t column, float* const* sums) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = Vec::load(sums[r] + column + c * Vec::kWidth);
  }
  for (int64_t t = 0; t < count; ++t) {
    const float* value = values[t] + column;
    Vec v[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) v[c] = Vec::load(value + c * Vec::kWidth);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Vec::set(weights[r * stride + t]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma(weight, v[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c].store(sums[r] + column + c * Vec::kWidth);
  }
}

template <int kRows>
inline void add_values_to(const float* weights, int64_t stride, const float* const* values, int64_t count,
                          int64_t D, float* const* sums) {
  constexpr int kWide = Vec::kWidth == 16 ? 4 : 2;  // what the registers hold
  int64_t column = 0;
  for (; column + kWide * Vec::kWidth <= D; column += kWide * Vec::kWidth) {
    add_values<kRows, kWide>(weights, stride, values, count, column, sums);
  }
  for (; column < D; column += Vec::kWidth) {
    add_values<kRows, 1>(weights, stride, values, count, column, sums);
  }
}

// sums[r] [D] += weights[r, 0..count) * values, for `rows` queries.
inline void weigh_values(const float* weights, int64_t rows, int64_t stride, const float* const* values,
                         int64_t count, int64_t D, float* const* sums) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) add_values_to<4>(weights + r * stride, stride, values, count, D, sums + r);
  switch (rows - r) {
    case 3:
      return add_values_to<3>(weights + r * stride, stride, values, count, D, sums + r);
    case 2:
      return add_values_to<2>(weights + r * stride, stride, values, count, D, sums + r);
    case 1:
      return add_values_to<1>(weights + r * stride, stride, values, count, D, sums + r);
  }
}

// out [D] <- the answers of `blocks` blocks, one behind the other, as one softmax: added block after block.
// The answers' maxima become their weights.
template <typename T>
inline void combine_answers(float* answers, int64_t blocks, int64_t D, T* out) {
  const int64_t size = Answer::floats(D);
  float most = answers[Answer::kMax];
  for (int64_t j = 1; j < blocks; ++j) {
    const float other = answers[j * size + Answer::kMax];
    most = other > most ? other : most;
  }
  float sum = 0.0f;
  for (int64_t j = 0; j < blocks; ++j) {
    float* answer = answers + j * size;
    answer[Answer::kMax] = exp(answer[Answer::kMax] - most);
    sum = fma(answer[Answer::kMax], answer[Answer::kSum], sum);
  }
  for (int64_t d = 0; d < D; d += Vec::kWidth) {
    Vec acc = Vec::zero();
    for (int64_t j = 0; j < blocks; ++j) {
      const float* answer = answers + j * size;
      acc = fma(Vec::set(answer[Answer::kMax]), Vec::load(answer + Answer::kValues + d), acc);
    }
    store(out + d, acc / Vec::set(sum));
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
