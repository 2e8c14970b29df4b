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

#include "matrix.cuh"
#include "solve_state.cuh"

namespace specdec::cuda {

// kRows: tokens of a chunk, 16, 32 or 64. kChannel: a gate per key channel.
template <Precision kPrecision_, bool kChannel_, int kRows_>
struct SolveTraits {
  static constexpr Precision kPrecision = kPrecision_;
  static constexpr bool kChannel = kChannel_;
  static constexpr int kRows = kRows_;
  static_assert(kRows == 16 || kRows == 32 || kRows == 64);
};

// What the shared memory of a block depends on.
struct SolveSize {
  int DK = 0;
  int nodes = 0;         // tokens whose parents and decays are held: a multiple of the chunk
  bool apart = false;    // the Gram matrices are kept while heads come and go
  bool earlier = false;  // there are chunks before a chunk
  bool pending = false;
};

template <typename Traits>
class SolveChunk {
 public:
  static constexpr int kThreads = 128, kWarps = 4;
  static constexpr int kRows = Traits::kRows, kBlocks = kRows / 16;
  static constexpr bool kChannel = Traits::kChannel;
  // Odd from 32 rows on: a lane that walks a row must not meet its neighbours in one bank.
  static constexpr int kLd = kRows == 16 ? 20 : kRows + 5;
  static constexpr int kWriteLd = kStateRows + 8;
  static_assert(kWarps * 8 == kStateRows);

  struct Sums {  // [kRows, 8] of this warp's columns, as the tensor cores hold it
    float x[kBlocks][4];
  };

  static constexpr int64_t matrix_floats() { return kRows * kLd; }
  static constexpr int64_t shared_bytes(const SolveSize& s) {
    const int64_t row = s.DK + 4, rows = kRows * row;
    const bool apart = s.apart && !kChannel;
    int64_t floats = kStateRows * row + 2 * rows + (kChannel ? 2 * rows : s.earlier ? rows : 0);
    floats += (apart ? 4 : 2) * matrix_floats() + (s.earlier ? 2 * matrix_floats() : 0);
    floats += (s.earlier ? 2 : 1) * kRows * kWriteLd;
    floats += 4 * s.nodes + 4 * kRows;  // parents, decays, strengths, marks; walks
    floats += 2 * ((s.earlier ? 2 : 1) * kRows + kStateRows + s.nodes / kRows);  // masks of 64 bits
    if (s.pending) floats += kPendingRows * (s.DK + kStateRows + (kChannel ? s.DK : 1));
    return floats * 4 + 32 * 16;  // and what the arrays' alignment takes
  }

  SPECDEC_DEVICE SolveChunk(const Recurrence& rec, const SolveSize& size, SharedArena& arena)
      : DK(static_cast<int>(rec.DK)),
        ld(DK + 4),
        delta(rec.update == Update::kDelta),
        gated(rec.gate != Gate::kNone) {
    state = arena.take<float>(kStateRows * ld);
    keys = arena.take<float>(kRows * ld);
    queries = arena.take<float>(kRows * ld);
    reach_keys = kChannel ? arena.take<float>(kRows * ld) : keys;
    decays = kChannel ? arena.take<float>(kRows * ld) : arena.take<float>(size.nodes);
    earlier_keys = kChannel ? keys : size.earlier ? arena.take<float>(kRows * ld) : keys;
    write = arena.take<float>(matrix_floats());
    read = arena.take<float>(matrix_floats());
    const bool apart = size.apart && !kChannel;
    gram_keys = apart ? arena.take<float>(matrix_floats()) : write;
    gram_queries = apart ? arena.take<float>(matrix_floats()) : read;
    if (size.earlier) {
      earlier_write = arena.take<float>(matrix_floats());
      earlier_read = arena.take<float>(matrix_floats());
      earlier_u = arena.take<float>(kRows * kWriteLd);
      earlier_ancestors = arena.take<uint64_t>(kRows);
    }
    u = arena.take<float>(kRows * kWriteLd);
    parents = arena.take<int32_t>(size.nodes);
    strengths = arena.take<float>(size.nodes);
    marks = arena.take<int32_t>(size.nodes);
    key_marks = arena.take<int32_t>(kRows);
    next = arena.take<int32_t>(kRows);
    reach = arena.take<float>(kRows);
    tail = arena.take<float>(kRows);
    ancestors = arena.take<uint64_t>(kRows);
    tainted = arena.take<uint64_t>(kStateRows);
    bad = arena.take<uint64_t>(size.nodes / kRows);
    if (size.pending) {
      pending_keys = arena.take<float>(kPendingRows * DK);
      pending_decays = arena.take<float>(kPendingRows * (kChannel ? DK : 1));
      pending_writes = arena.take<float>(kPendingRows * kStateRows);
    }
  }

  // --- coefficients, by the block ---

  // A node's parent, decay (1 without gate and with one per channel) and strength (0 for the additive rule).
  // One that has a number that is not finite is marked and gets zeros.
  SPECDEC_DEVICE void stage_node(int i, int parent, float decay, float strength) const {
    const bool finite = is_finite(decay) && is_finite(strength);
    parents.store(i, parent);
    strengths.store(i, finite ? strength : 0.0f);
    if constexpr (!kChannel) decays.store(i, finite ? decay : 0.0f);
    marks.store(i, finite ? 0 : 1);
  }

  // Keys and queries of `count` tokens as the recurrence uses them; `k_out(row)` receives the keys. Between
  // two barriers.
  template <typename Out>
  SPECDEC_DEVICE void finish_tokens(int count, bool normalise, float scale, const Out& k_out) const {
    for (int r = warp(); r < kRows; r += kWarps) {
      Pack<float, 4> x[kQuads];
      finish_row(queries + r * ld, DK, normalise && r < count, scale, x);
      store_row(queries + r * ld, DK, x);
      const bool finite = finish_key(keys, r, count, normalise, k_out);
      if (lane() == 0) key_marks.store(r, finite ? 0 : 1);
    }
  }
  template <typename Out>
  SPECDEC_DEVICE bool finish_key(const Shared<float>& to, int r, int count, bool normalise,
                                 const Out& k_out) const {
    Pack<float, 4> x[kQuads];
    const bool finite = finish_row(to + r * ld, DK, normalise && r < count, 1.0f, x);
    if (r < count) k_out(r, x);
    if (!finite) {
      SPECDEC_UNROLL
      for (int q = 0; q < kQuads; ++q) x[q] = Pack<float, 4>{};
    }
    store_row(to + r * ld, DK, x);
    return finite;
  }

  // Decays [kRows, DK] from rows of g, as staged, zero where a node is bad; marks it in `marks` from `first`
  // on.
  SPECDEC_DEVICE void finish_decays(int first, int count) const {
    for (int r = warp(); r < kRows; r += kWarps) {
      float zero = 0.0f;
      for (int c = lane(); c < DK; c += 32) {
        const float a = r < count ? exp(decays.load(r * ld + c)) : 1.0f;
        zero = fma(a, 0.0f, zero);
        decays.store(r * ld + c, a);
      }
      if (!any(!(zero == 0.0f))) continue;
      for (int c = lane(); c < DK; c += 32) decays.store(r * ld + c, 0.0f);
      if (lane() == 0) marks.store(first + r, 1);
    }
  }

  // to_keys, to_queries [kRows, kLd]: dots of the chunk's keys and queries with `other` keys; `diagonal`:
  // tiles above the diagonal are not needed and zero.
  SPECDEC_DEVICE void gram(const Shared<float>& other, bool diagonal, const Shared<float>& to_keys,
                           const Shared<float>& to_queries) const {
    constexpr int kColumns = kRows / 8;
    for (int task = warp(); task < 2 * kBlocks * kColumns; task += kWarps) {
      const bool query = task % 2 == 0;
      const int m = task / 2 / kColumns, c = task / 2 % kColumns;
      if (!query && !delta) continue;
      const Shared<float> rows = query ? queries : keys;
      float sum[4] = {};
      const int terms = diagonal && c > 2 * m + 1 ? 0 : DK;
      for (int k = 0; k < terms; k += 16) {
        multiply_add<Traits::kPrecision>(sum, fragment_a(rows, m * 16 * ld + k, ld, 1),
                                         fragment_b(other, c * 8 * ld + k, 1, ld));
      }
      const Shared<float> to = query ? to_queries : to_keys;
      SPECDEC_UNROLL
      for (int r = 0; r < 4; ++r) to.store((m * 16 + sum_row(r)) * kLd + c * 8 + sum_column(r), sum[r]);
    }
  }

  // Begins the walks of the chunk's `count` nodes, `first` and on.
  SPECDEC_DEVICE void begin_walks(int first, int count) const {
    const int i = thread();
    if (i < kRows) {
      next.store(i, i < count ? first + i : -1);
      reach.store(i, 1.0f);
    }
    if constexpr (kChannel) {
      for (int r = warp(); r < kRows; r += kWarps) {
        for (int c = lane(); c < DK; c += 32) reach_keys.store(r * ld + c, keys.load(r * ld + c));
      }
    }
  }

  // One decay a head. Walks on over the nodes of the chunk that begins at `other`: coefficients from Gram
  // matrices (in place where they are the same), 0 off the paths, and the ancestors as bits. A chunk's own
  // nodes come first: then `tail` receives the decays from its nodes to node `last`.
  SPECDEC_DEVICE void walk(int first, int other, int last, const Shared<float>& from_keys,
                           const Shared<float>& from_queries, const Shared<float>& to_write,
                           const Shared<float>& to_read, const Shared<uint64_t>& to_ancestors) const {
    const int i = thread();
    if (i >= kRows) return;
    int node = next.load(i);
    float decay = reach.load(i);
    const float strength = delta ? -strengths.load(first + i) : 0.0f;
    uint64_t bits = 0;
    for (int j = kRows - 1; j >= 0; --j) {
      const float query = from_queries.load(i * kLd + j), key = delta ? from_keys.load(i * kLd + j) : 0.0f;
      float w = 0.0f, r = 0.0f;
      if (node == other + j) {
        r = decay * query;
        if (node != first + i) w = strength * (decay * key);
        if (i == last) tail.store(j, decay);
        bits |= uint64_t{1} << j;
        if (gated) decay *= decays.load(node);
        node = parents.load(node);
      }
      to_write.store(i * kLd + j, w);
      to_read.store(i * kLd + j, r);
    }
    next.store(i, node);
    reach.store(i, decay);
    to_ancestors.store(i, bits);
  }

  // One decay a channel: the walk carries D_i o k_i and D_i o q_i, and a warp takes a row.
  SPECDEC_DEVICE void walk_channels(int first, int other, const Shared<float>& to_write,
                                    const Shared<float>& to_read,
                                    const Shared<uint64_t>& to_ancestors) const {
    constexpr int kParts = 8;  // DK / 32 at most
    for (int i = warp(); i < kRows; i += kWarps) {
      float key[kParts], query[kParts];
      SPECDEC_UNROLL
      for (int m = 0; m < kParts; ++m) {
        const int c = lane() + 32 * m;
        key[m] = c < DK ? reach_keys.load(i * ld + c) : 0.0f;
        query[m] = c < DK ? queries.load(i * ld + c) : 0.0f;
      }
      int node = next.load(i);
      const float strength = delta ? -strengths.load(first + i) : 0.0f;
      for (int j = lane(); j < kRows; j += 32) {
        to_write.store(i * kLd + j, 0.0f);
        to_read.store(i * kLd + j, 0.0f);
      }
      warp_barrier();
      uint64_t bits = 0;
      while (node >= other) {
        const int j = node - other;
        float keys_sum = 0.0f, queries_sum = 0.0f;
        SPECDEC_UNROLL
        for (int m = 0; m < kParts; ++m) {
          const int c = lane() + 32 * m;
          if (c >= DK) break;
          const float k = keys.load(j * ld + c), a = decays.load(j * ld + c);
          keys_sum = fma(key[m], k, keys_sum);
          queries_sum = fma(query[m], k, queries_sum);
          key[m] *= a;
          query[m] *= a;
        }
        // Both sums over the warp: half of the lanes go on with one, half with the other.
        const bool upper = lane() >= 16;
        float sum = (upper ? queries_sum : keys_sum) + shuffle_xor(upper ? keys_sum : queries_sum, 16);
        SPECDEC_UNROLL
        for (int mask = 8; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        if (lane() == 16) to_read.store(i * kLd + j, sum);
        if (lane() == 0 && delta && node != first + i) to_write.store(i * kLd + j, strength * sum);
        bits |= uint64_t{1} << j;
        node = parents.load(node);
      }
      SPECDEC_UNROLL
      for (int m = 0; m < kParts; ++m) {
        const int c = lane() + 32 * m;
        if (c >= DK) break;
        reach_keys.store(i * ld + c, key[m]);
        queries.store(i * ld + c, query[m]);
      }
      warp_barrier();
      if (lane() == 0) {
        next.store(i, node);
        to_ancestors.store(i, bits);
      }
    }
  }

  // The diagonal blocks of I - W are replaced by their inverses. A lane solves for a column.
  SPECDEC_DEVICE void invert() const {
    if (!delta || warp() >= kBlocks) return;
    const Shared<float> block = write + warp() * 16 * (kLd + 1);
    const int column = lane() % 16;
    float t[16];
    SPECDEC_UNROLL
    for (int i = 0; i < 16; ++i) {
      t[i] = i == column ? 1.0f : 0.0f;
      SPECDEC_UNROLL
      for (int j = 0; j < i; ++j) t[i] = fma(block.load(i * kLd + j), t[j], t[i]);
    }
    warp_barrier();
    if (lane() >= 16) return;
    SPECDEC_UNROLL
    for (int i = 0; i < 16; ++i) block.store(i * kLd + column, t[i]);
  }

  // Bits of the chunk's bad nodes, from `first` on, to bad[first / kRows].
  SPECDEC_DEVICE void mark_bad(int first) const {
    if (warp() != 0) return;
    uint64_t mask = 0;
    SPECDEC_UNROLL
    for (int r = 0; r < kRows; r += 32) {
      const int i = r + lane();
      const bool is_bad = i < kRows && (key_marks.load(i) | marks.load(first + i)) != 0;
      mask |= static_cast<uint64_t>(ballot(is_bad)) << r;
    }
    if (lane() == 0) bad.store(first / kRows, mask);
  }

  // --- what a warp does for its columns ---

  SPECDEC_DEVICE static int column() { return warp() * 8; }

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
    for (int m = 0; m < kBlocks; ++m) taint |= clean(earlier_u, m);
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
      u.store_vec<2>((m * 16 + sum_row(r)) * kWriteLd + column() + sum_column(r),
                     {{x.x[m][r], x.x[m][r + 1]}});
    }
  }

  const int DK, ld;
  const bool delta, gated;
  Shared<float> state;          // [kStateRows, ld]
  Shared<float> keys, queries;  // [kRows, ld]; with a gate per channel the walks turn queries to e^G o q
  Shared<float> reach_keys;     // [kRows, ld]: e^G o k with a gate per channel, else keys
  Shared<float> decays;         // [nodes], or [kRows, ld] of the chunk that is walked over
  Shared<float> earlier_keys;   // [kRows, ld]: of a chunk before; with a gate per channel keys
  Shared<float> write, read;    // [kRows, kLd]: W, its diagonal blocks inverted, and R
  Shared<float> gram_keys, gram_queries;      // [kRows, kLd]; may be write and read
  Shared<float> earlier_write, earlier_read;  // [kRows, kLd]
  Shared<float> u, earlier_u;                 // [kRows, kWriteLd]
  Shared<int32_t> parents, marks;             // [nodes]; a mark: gate or strength is not finite
  Shared<float> strengths;                    // [nodes]
  Shared<int32_t> key_marks, next;            // [kRows]
  Shared<float> reach, tail;           // [kRows]: e^G; the decay from a token to the last one of the chunk
  Shared<uint64_t> ancestors;          // [kRows]: nodes of the chunk as bits
  Shared<uint64_t> earlier_ancestors;  // [kRows]: of a chunk before
  Shared<uint64_t> tainted;            // [kStateRows]: a column's nodes with numbers that are not finite
  Shared<uint64_t> bad;                // [chunks]
  Shared<float> pending_keys, pending_decays, pending_writes;  // [kPendingRows, ..]

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
