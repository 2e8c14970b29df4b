// The masked UT transform of a chunk or a tree of tokens (recurrent state S0 [DK, DV] before it; p = parent):
//
//   U = diag(b) (V - diag(e^G) K S0) + W U      W_ij = -b_i D_ij (k_i . k_j)   j a proper ancestor of i
//   O = diag(e^G) Q S0 + R U                    R_ij =      D_ij (q_i . k_j)   j an ancestor of i, or i
//
// D_ij is the decay from j to i and e^G that from S0 to i. Both are running products of the tokens' decays
// along the path, D_i = a_i D_p with D_ii = 1: numbers in [0, 1] that are 0 off the path by construction, so
// there is no difference of logarithms to mask, overflow or meet -inf - -inf. With a gate per channel D_ij is
// a vector inside the dot product; a walk from i to its root multiplies k_i and q_i by one decay after the
// other and ends with e^G o k_i, the row that reads S0. (Gated DeltaNet, arXiv 2412.06464, section 3.3, with
// the ancestor mask in place of the causal one.)
#pragma once

#include <initializer_list>

#include "small_matmul.h"
#include "stage.h"

namespace specdec::cpu::SPECDEC_ISA {

// Coefficients of one value head, n tokens.
struct Coefficients {
  int64_t n = 0;
  int64_t ld = 0;           // >= n rounded up to kBlock
  float* write = nullptr;   // W [n rounded up to kBlock, ld], read below the diagonal; delta rule only
  float* read = nullptr;    // R, read up to the diagonal
  float* decays = nullptr;  // D; gate per head or none
  float* reach = nullptr;   // [n]: e^G; gate per head
};

// --- coefficients ---

namespace detail {

inline int64_t parent_of(const int32_t* parents, int64_t i) {
  return parents != nullptr ? parents[i] : i - 1;
}

// Zero rows that fill the last register block.
inline void fill_last_block(Coefficients& c) {
  const int64_t rows = round_up(c.n, kBlock) - c.n;
  for (float* m : {c.write, c.read}) {
    if (m != nullptr) std::memset(m + c.n * c.ld, 0, rows * c.ld * sizeof(float));
  }
}

}  // namespace detail

// Gate per head (`decay` [n]) or none (null). kk and qk [n, ldg] are the Gram matrices k_i . k_j and q_i .
// k_j, read for j <= i, a vector beyond the diagonal at most. ld is a multiple of kWidth. `parents` null: a
// chain.
inline void coefficients_of(const int32_t* parents, const float* decay, const float* beta, const float* kk,
                            const float* qk, int64_t ldg, Coefficients& c) {
  for (int64_t i = 0; i < c.n; ++i) {
    const int64_t p = detail::parent_of(parents, i);
    const float a = decay != nullptr ? decay[i] : 1.0f;
    float* d = c.decays + i * c.ld;
    if (p < 0) {
      std::memset(d, 0, c.ld * sizeof(float));
    } else {
      const float* above = c.decays + p * c.ld;
      for (int64_t j = 0; j < c.ld; j += Vec::kWidth) (Vec::set(a) * Vec::load(above + j)).store(d + j);
    }
    d[i] = 1.0f;
    if (decay != nullptr) c.reach[i] = p < 0 ? a : a * c.reach[p];
    for (int64_t j = 0; j <= i; j += Vec::kWidth) {
      (Vec::load(d + j) * Vec::load(qk + i * ldg + j)).store(c.read + i * c.ld + j);
    }
    if (c.write == nullptr) continue;
    for (int64_t j = 0; j <= i; j += Vec::kWidth) {
      (Vec::set(-beta[i]) * (Vec::load(d + j) * Vec::load(kk + i * ldg + j))).store(c.write + i * c.ld + j);
    }
  }
  detail::fill_last_block(c);
}

// Gate per channel, decay [n, DK]. k_reach and q_reach [n, DK] receive e^G o k and e^G o q.
inline void channel_coefficients(const int32_t* parents, const float* decay, const float* beta,
                                 const float* k, const float* q, int64_t DK, float* k_reach, float* q_reach,
                                 Coefficients& c) {
  for (int64_t i = 0; i < c.n; ++i) {
    float* read = c.read + i * c.ld;
    float* write = c.write != nullptr ? c.write + i * c.ld : nullptr;
    std::memset(read, 0, i * sizeof(float));
    if (write != nullptr) std::memset(write, 0, i * sizeof(float));
    float* ki = k_reach + i * DK;
    float* qi = q_reach + i * DK;
    std::memcpy(ki, k + i * DK, DK * sizeof(float));
    std::memcpy(qi, q + i * DK, DK * sizeof(float));
    read[i] = dot(qi, ki, DK);
    const float* a = decay + i * DK;
    for (int64_t j = detail::parent_of(parents, i);; j = detail::parent_of(parents, j)) {
      // Down to j: the decay of the node before, and the dots with k_j in the same pass.
      const float* kj = j < 0 ? ki : k + j * DK;
      Vec kk = Vec::zero(), qk = Vec::zero();
      for (int64_t d = 0; d < DK; d += Vec::kWidth) {
        const Vec other = Vec::load(kj + d);
        const Vec key = Vec::load(a + d) * Vec::load(ki + d);
        const Vec query = Vec::load(a + d) * Vec::load(qi + d);
        key.store(ki + d);
        query.store(qi + d);
        kk = fma(key, other, kk);
        qk = fma(query, other, qk);
      }
      if (j < 0) break;
      read[j] = hsum(qk);
      if (write != nullptr) write[j] = -beta[i] * hsum(kk);
      a = decay + j * DK;
    }
  }
  detail::fill_last_block(c);
}

// U <- (I - W)^-1 U on one panel [n rounded up to kBlock, kPanel], whose rows beyond n are zero.
inline void substitute(const Coefficients& c, float* u) {
  for (int64_t i0 = 0; i0 < c.n; i0 += kBlock) {
    float* rows = u + i0 * kPanel;
    const float* w = c.write + i0 * c.ld;
    multiply_block<kBlock, kPanelVecs, Layout::kRows, Into::kAdd>(i0, w, c.ld, u, kPanel, rows, kPanel);
    for (int v = 0; v < kPanelVecs; ++v) {
      Vec done[kBlock];
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) {
        done[i] = Vec::load(rows + i * kPanel + v * Vec::kWidth);
#pragma GCC unroll 8
        for (int j = 0; j < i; ++j) done[i] = fma(Vec::set(w[i * c.ld + i0 + j]), done[j], done[i]);
        done[i].store(rows + i * kPanel + v * Vec::kWidth);
      }
    }
  }
}

// O += R U on one panel, the triangle alone: a token above the diagonal may hold a NaN, which 0 would not
// stop.
inline void read_writes(const Coefficients& c, const float* u, float* o) {
  for (int64_t i0 = 0; i0 < c.n; i0 += kBlock) {
    float* rows = o + i0 * kPanel;
    const float* r = c.read + i0 * c.ld;
    multiply_block<kBlock, kPanelVecs, Layout::kRows, Into::kAdd>(i0, r, c.ld, u, kPanel, rows, kPanel);
    for (int v = 0; v < kPanelVecs; ++v) {
      Vec sum[kBlock];
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) sum[i] = Vec::load(rows + i * kPanel + v * Vec::kWidth);
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) {
        const Vec write = Vec::load(u + (i0 + j) * kPanel + v * Vec::kWidth);
#pragma GCC unroll 8
        for (int i = j; i < kBlock; ++i) sum[i] = fma(Vec::set(r[i * c.ld + i0 + j]), write, sum[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) sum[i].store(rows + i * kPanel + v * Vec::kWidth);
    }
  }
}

// --- trees that hold a NaN or an infinity ---
//
// In the masked matrices a node takes 0 times the numbers of the nodes off its path, which is NaN where those
// are not finite. A write that is not finite shows in its own answer, so the answers tell.

// Whether all of x [n, kPanel] is finite.
inline bool all_finite(const float* x, int64_t n) {
  Vec sum = Vec::zero();  // of zeros and NaN
  for (int64_t i = 0; i < n * kPanel; i += Vec::kWidth) sum = fma(Vec::load(x + i), Vec::zero(), sum);
  return hsum(sum) == 0.0f;
}

// `substitute` (delta rule) and `read_writes` over the paths of the tree alone. The terms that remain are
// added in the same order: a node whose path is finite gets the same numbers.
inline void solve_paths(const int32_t* parents, const Coefficients& c, float* u, float* o) {
  int32_t path[kMaxSolveNodes];
  for (int64_t i = 0; i < c.n; ++i) {
    int64_t first = kMaxSolveNodes;
    for (int32_t j = parents[i]; j >= 0; j = parents[j]) path[--first] = j;
    for (int64_t v = 0; v < kPanel; v += Vec::kWidth) {
      Vec write = Vec::load(u + i * kPanel + v);
      Vec answer = Vec::load(o + i * kPanel + v);
      for (int64_t a = first; a < kMaxSolveNodes; ++a) {
        const int64_t j = path[a];
        const Vec above = Vec::load(u + j * kPanel + v);
        if (c.write != nullptr) write = fma(Vec::set(c.write[i * c.ld + j]), above, write);
        answer = fma(Vec::set(c.read[i * c.ld + j]), above, answer);
      }
      write.store(u + i * kPanel + v);
      fma(Vec::set(c.read[i * c.ld + i]), write, answer).store(o + i * kPanel + v);
    }
  }
}

}  // namespace specdec::cpu::SPECDEC_ISA
