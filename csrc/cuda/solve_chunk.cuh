// The masked UT transform of a chunk of tokens on tensor cores, for one tile of value rows. With the state S0
// before the tokens, D_ij the decay from j to i along the tree, e^G that from S0, and j an ancestor of i:
//
//   U = diag(b) (V - diag(e^G) K S0) + W U      W_ij = -b_i D_ij (k_i . k_j)   j != i
//   O = diag(e^G) Q S0 + R U                    R_ij =      D_ij (q_i . k_j)   j == i too
//
// (Gated DeltaNet, arXiv 2412.06464, section 3.3, with the ancestor mask in place of the causal one.) Decays
// are running products along the path from a node to its root, so that there is no difference of logarithms
// to mask or to overflow; the same walk finds the ancestors.
//
// I - W is inverted in blocks of 16 and U follows by forward substitution over the blocks. The finite product
// (I + W)(I + W^2)(I + W^4)... over all tokens would multiply full matrices, N^3 log N instead of N^2, and
// its powers cancel: where a draft repeats a token its keys are equal, the entries of W^8 reach binomials of
// 14 over 7 times b^8, and float32 is left with three digits. The inverse of a block is bounded (a step
// contracts), and a lane finds one of its columns in 120 multiply-adds.
//
// A warp owns 8 value columns from the state to the output: between its products only itself waits.
//
// A number that is not finite must reach the descendants of its node alone, but masked matrices take 0 times
// it. Nodes whose key, gate or strength is not finite are staged as zeros, right sides and writes that are
// not are replaced by zeros where they appear, and what descends from them is set to NaN at the end.
#pragma once

#include <limits>

#include "solve_coefficients.cuh"

namespace specdec::cuda {

// What a warp does for its columns, with what the block has prepared.
template <typename Traits>
class SolveChunk : public SolveCoefficients<Traits> {
  using Base = SolveCoefficients<Traits>;

 public:
  using Base::ancestors;
  using Base::bad;
  using Base::decays;
  using Base::delta;
  using Base::DK;
  using Base::earlier_ancestors;
  using Base::earlier_read;
  using Base::earlier_u;
  using Base::earlier_write;
  using Base::gated;
  using Base::kBlocks;
  using Base::kChannel;
  using Base::keys;
  using Base::kLd;
  using Base::kRows;
  using Base::kThreads;
  using Base::kWriteLd;
  using Base::ld;
  using Base::queries;
  using Base::reach;
  using Base::reach_keys;
  using Base::read;
  using Base::state;
  using Base::strengths;
  using Base::tail;
  using Base::tainted;
  using Base::u;
  using Base::write;

  struct Sums {  // [kRows, 8] of this warp's columns, as the tensor cores hold it
    float x[kBlocks][4];
  };

  using Base::Base;

  SPECDEC_DEVICE static int column() { return warp() * 8; }

  // `count` rows of v from `token` on, its columns from `first` on being those of the block; zeros beyond.
  SPECDEC_DEVICE static void load_values(const Elements& v, const Strides& stride, int64_t row, int64_t token,
                                         int head, int first, int count, Sums& values) {
    const bool aligned = v.aligned(stride);
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; r += 2) {
        const int i = m * 16 + sum_row(r);
        Pack<float, 2> x{};
        if (i < count) {
          x = v.load2(at_token(stride, row, token + i, head) + first + column() + sum_column(r), aligned);
        }
        values.x[m][r] = x[0], values.x[m][r + 1] = x[1];
      }
    }
  }

  // K S0 and Q S0, without e^G where the gate is per head; `count` rows.
  SPECDEC_DEVICE void ask(int count, Sums& from_keys, Sums& from_queries) const {
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) from_keys.x[m][r] = from_queries.x[m][r] = 0.0f;
    }
    for (int k = 0; k < DK; k += 16) {
      const FragmentB s = fragment_b(state, column() * ld + k, 1, ld);
      SPECDEC_UNROLL
      for (int m = 0; m < kBlocks; ++m) {
        if (m * 16 >= count) break;
        const int at = m * 16 * ld + k;
        multiply_add<Traits::kPrecision>(from_queries.x[m], fragment_a(queries, at, ld, 1), s);
        if (delta) multiply_add<Traits::kPrecision>(from_keys.x[m], fragment_a(reach_keys, at, ld, 1), s);
      }
    }
  }

  // The sums of `count` rows get those of a chunk before: W' U', R' U' with earlier_u. `poison` gets the bits
  // of elements with a bad ancestor there, bit 4 m + r.
  SPECDEC_DEVICE void add_earlier(int count, int chunk, Sums& writes, Sums& reads, uint32_t& poison) const {
    clear_tainted(bad.load(chunk));
    bool taint = bad.load(chunk) != 0;
    SPECDEC_ROLL
    for (int m = 0; m < kBlocks; ++m) taint |= clean(earlier_u, m);
    SPECDEC_ROLL
    for (int j = 0; j < kRows; j += 16) {
      const FragmentB b = fragment_b(earlier_u, j * kWriteLd + column(), kWriteLd, 1);
      SPECDEC_UNROLL
      for (int m = 0; m < kBlocks; ++m) {
        if (m * 16 >= count) break;
        const int at = m * 16 * kLd + j;
        if (delta) multiply_add<Traits::kPrecision>(writes.x[m], fragment_a(earlier_write, at, kLd, 1), b);
        multiply_add<Traits::kPrecision>(reads.x[m], fragment_a(earlier_read, at, kLd, 1), b);
      }
    }
    if (taint) poison |= poisoned(earlier_ancestors);
  }

  // Adds to `writes` the right sides, b (v - e^G K S0) or v, and to `answers` e^G Q S0, for the chunk at
  // `first`.
  SPECDEC_DEVICE void right_sides(int first, const Sums& values, const Sums& from_keys,
                                  const Sums& from_queries, Sums& writes, Sums& answers) const {
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) {
        const int i = m * 16 + sum_row(r);
        const float decay = kChannel ? 1.0f : reach.load(i);
        answers.x[m][r] += decay * from_queries.x[m][r];
        const float value = values.x[m][r];
        writes.x[m][r] += delta ? strengths.load(first + i) * (value - decay * from_keys.x[m][r]) : value;
      }
    }
  }

  // Right sides to writes, answers of S0 to answers, `count` rows; u holds the writes afterwards. `poison`:
  // of elements with a bad ancestor, itself included.
  SPECDEC_DEVICE void substitute(int count, int chunk, Sums& writes, Sums& answers, uint32_t& poison) const {
    clear_tainted(bad.load(chunk));
    bool taint = bad.load(chunk) != 0;
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      if (m * 16 >= count) {
        Sums zeros = {};
        store_writes(m, zeros);
        warp_barrier();
        continue;
      }
      if (delta) {
        for (int j = 0; j < m; ++j) {
          multiply_add<Traits::kPrecision>(writes.x[m], fragment_a(write, m * 16 * kLd + j * 16, kLd, 1),
                                           fragment_b(u, j * 16 * kWriteLd + column(), kWriteLd, 1));
        }
      }
      store_writes(m, writes);
      warp_barrier();
      taint |= clean(u, m);
      if (delta) {
        SPECDEC_UNROLL
        for (int r = 0; r < 4; ++r) writes.x[m][r] = 0.0f;
        multiply_add<Traits::kPrecision>(writes.x[m], fragment_a(write, m * 16 * (kLd + 1), kLd, 1),
                                         fragment_b(u, m * 16 * kWriteLd + column(), kWriteLd, 1));
        warp_barrier();
        store_writes(m, writes);
        warp_barrier();
        taint |= clean(u, m);
      }
      for (int j = 0; j <= m; ++j) {
        multiply_add<Traits::kPrecision>(answers.x[m], fragment_a(read, m * 16 * kLd + j * 16, kLd, 1),
                                         fragment_b(u, j * 16 * kWriteLd + column(), kWriteLd, 1));
      }
    }
    if (taint) poison |= poisoned(ancestors);
  }

  // S <- e^G S + sum_j D_j u_j k_j^T over the chunk's `count` tokens, a chain; D_j is the decay from j to the
  // last.
  SPECDEC_DEVICE void advance_state(int count, Sums& writes) const {
    if constexpr (kChannel) {
      // D_j goes into the keys, e^G to the first row of reach_keys, which nobody asks any more.
      barrier();
      SPECDEC_ROLL
      for (int c = thread(); c < DK; c += kThreads) {
        float decay = 1.0f;
        for (int j = count - 1; j >= 0; --j) {
          keys.store(j * ld + c, decay * keys.load(j * ld + c));
          decay *= decays.load(j * ld + c);
        }
        reach_keys.store(c, decay);
      }
      barrier();
    } else if (gated) {
      SPECDEC_UNROLL
      for (int m = 0; m < kBlocks; ++m) {
        SPECDEC_UNROLL
        for (int r = 0; r < 4; ++r) {
          const int i = m * 16 + sum_row(r);
          if (i < count) writes.x[m][r] *= tail.load(i);
        }
      }
    }
    warp_barrier();
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) store_writes(m, writes);
    warp_barrier();
    const float total = kChannel || !gated ? 1.0f : reach.load(count - 1);
    for (int d = 0; d < DK; d += 16) {
      float sum[4];
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) {
        const float decay = kChannel ? reach_keys.load(d + sum_row(r)) : total;
        sum[r] = decay * state.load((column() + sum_column(r)) * ld + d + sum_row(r));
      }
      for (int j = 0; j < count; j += 16) {
        multiply_add<Traits::kPrecision>(sum, fragment_a(keys, j * ld + d, 1, ld),
                                         fragment_b(u, j * kWriteLd + column(), kWriteLd, 1));
      }
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) state.store((column() + sum_column(r)) * ld + d + sum_row(r), sum[r]);
    }
  }

  SPECDEC_DEVICE static void set_nan(uint32_t poison, Sums& x) {
    if (poison == 0) return;
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) {
        if ((poison >> (4 * m + r) & 1) != 0) x.x[m][r] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }

  // Rows 16 m to 16 m + 15 of x to u.
  SPECDEC_DEVICE void store_writes(int m, const Sums& x) const {
    SPECDEC_UNROLL
    for (int r = 0; r < 4; r += 2) {
      u.template store_vec<2>((m * 16 + sum_row(r)) * kWriteLd + column() + sum_column(r),
                              {{x.x[m][r], x.x[m][r + 1]}});
    }
  }

 private:
  SPECDEC_DEVICE void clear_tainted(uint64_t mask) const {
    warp_barrier();
    if (lane() < 8) tainted.store(column() + lane(), mask);
    warp_barrier();
  }

  // Zeros for what is not finite in rows 16 m to 16 m + 15 of x, remembered in `tainted`. Rare beyond the
  // first look.
  SPECDEC_DEVICE bool clean(const Shared<float>& x, int m) const {
    const int row = lane() / 2, at = column() + lane() % 2 * 4;
    const Pack<float, 4> seen = x.load_vec<4>((m * 16 + row) * kWriteLd + at);
    if (all(is_finite(seen[0]) && is_finite(seen[1]) && is_finite(seen[2]) && is_finite(seen[3])))
      return false;
    warp_barrier();
    if (lane() < 8) {
      uint64_t mask = tainted.load(column() + lane());
      SPECDEC_ROLL
      for (int i = m * 16; i < m * 16 + 16; ++i) {
        if (is_finite(x.load(i * kWriteLd + column() + lane()))) continue;
        mask |= uint64_t{1} << i;
        x.store(i * kWriteLd + column() + lane(), 0.0f);
      }
      tainted.store(column() + lane(), mask);
    }
    warp_barrier();
    return true;
  }

  SPECDEC_DEVICE uint32_t poisoned(const Shared<uint64_t>& above) const {
    uint32_t poison = 0;
    SPECDEC_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) {
        const uint64_t both = above.load(m * 16 + sum_row(r)) & tainted.load(column() + sum_column(r));
        if (both != 0) poison |= 1u << (4 * m + r);
      }
    }
    return poison;
  }
};

}  // namespace specdec::cuda
