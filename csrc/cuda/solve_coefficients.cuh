// What a block prepares for the solve of a chunk of tokens (solve_chunk.cuh): its shared memory, keys and
// queries, walks along the paths, the coefficients W and R and the inverses of W's diagonal blocks.
#pragma once

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
class SolveCoefficients {
 public:
  static constexpr int kThreads = 128, kWarps = 4;
  static constexpr int kRows = Traits::kRows, kBlocks = kRows / 16;
  static constexpr bool kChannel = Traits::kChannel;
  // Odd from 32 rows on: a lane that walks a row must not meet its neighbours in one bank.
  static constexpr int kLd = kRows == 16 ? 20 : kRows + 5;
  static constexpr int kWriteLd = kStateRows + 8;
  static_assert(kWarps * 8 == kStateRows);

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

  SPECDEC_DEVICE SolveCoefficients(const Recurrence& rec, const SolveSize& size, SharedArena& arena)
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
    SPECDEC_UNROLL_BY(2)
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
    SPECDEC_ROLL
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
    SPECDEC_ROLL
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
      SPECDEC_ROLL
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
    SPECDEC_UNROLL_BY(4)
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
    SPECDEC_ROLL
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
};

}  // namespace specdec::cuda
