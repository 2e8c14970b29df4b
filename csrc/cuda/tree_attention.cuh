// tree_attention: a node attends to the committed tokens of its sequence, to its ancestors and to itself.
//
// The keys on a node's path have positions: the cache 0, 1, ..., then its ancestors and itself. A block of
// threads takes kKeys positions of them for up to kRows queries of one key head and leaves an answer for
// each: the greatest score, the sum of the weights, the weighted sum of the values. CombineAnswers adds a
// query's answers, block after block. Every sum is in an order that D and the positions fix: a dot product
// along D, a weight's sum by position modulo 32, values key after key. So a node has the bits of decoding its
// path token by token, whether a key stands in the cache or in the tree.
//
// The cache goes through shared memory, tile after tile, keys and then values; scores stay there. Keys of the
// tree, of which each query has its own, are read from where they are.
#pragma once

#include <limits>

#include "device_values.cuh"
#include "primitives.cuh"
#include "specdec/attention_params.h"

namespace specdec::cuda {

constexpr int kAnswerHead = 4;  // floats before an answer's values: greatest score, sum; in a query's first
                                // answer, how many answers it has

struct AttentionWork {
  TreeAttentionParams op;
  float* answers;  // [B, N, HQ, blocks, kAnswerHead + D]; null where one block holds all keys
  int32_t blocks;  // that the longest sequence there is room for could have
  int32_t chunks;  // of a key head's queries
  bool vector;     // every row of q, keys and values begins at a multiple of 16 bytes

  SPECDEC_HOST_DEVICE int64_t answer_size() const { return kAnswerHead + op.D; }
};

// D is kWidth, or any where that is 0.
template <typename T, int kWidth>
struct AttentionTraits {
  using Element = T;
  static constexpr int kD = kWidth;
};

template <typename Traits>
struct TreeAttention {
  using Params = AttentionWork;
  using T = typename Traits::Element;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kKeys = 512;                              // positions of a block
  static constexpr int kRows = 16, kWarpRows = kRows / kWarps;   // queries of a block
  static constexpr int kTile = 32;                               // keys of a tile, one a lane
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements of an access
  static constexpr int kPath = kMaxAttentionNodes;

  SPECDEC_HOST_DEVICE static int width(const Params& p) {
    return Traits::kD > 0 ? Traits::kD : static_cast<int>(p.op.D);
  }
  // Elements of a key in a tile: 16 bytes more, so that lanes that read their keys meet no conflicts.
  SPECDEC_HOST_DEVICE static int tile_stride(const Params& p) { return width(p) + kVec; }

  static Launch shape(const Params& p) {
    const int64_t floats = kRows * (width(p) + kKeys) + 2 * kRows + kPath + kRows;
    return {{static_cast<int32_t>(p.op.B * p.op.HK * p.chunks), p.blocks, 1},
            floats * 4 + 2 * kTile * tile_stride(p) * static_cast<int64_t>(sizeof(T)) + kRows * kPath * 2};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    TreeAttention block(p, shared);
    block.clear_padding();
    if (block.rows_ <= 0) return;
    if (block.cached_ < kKeys && !block.find_paths()) return;
    block.load_queries();
    block.attend();
  }

 private:
  SPECDEC_DEVICE TreeAttention(const Params& p, SharedArena& shared) : p_(p) {
    const int32_t x = block().x;
    const int HK = static_cast<int>(p.op.HK);
    groups_ = static_cast<int>(p.op.HQ) / HK;
    first_ = x % p.chunks * kRows;
    hk_ = x / p.chunks % HK;
    b_ = x / p.chunks / HK;
    prefix_ = static_cast<int>(p.op.prefix.nodes);
    slot_ = slot_of(p.op.slots, b_, p.op.cache.slots);
    const int length = slot_ < 0 ? 0 : length_of(p.op.lengths, b_, p.op.N);
    const int left = length * groups_ - first_;
    rows_ = left < kRows ? left : kRows;
    const int committed = slot_ < 0 ? 0 : length_of(p.op.cache.lengths, slot_, p.op.cache.room);
    begin_ = block().y * kKeys - committed;
    cached_ = -begin_ < 0 ? 0 : -begin_ < kKeys ? -begin_ : kKeys;
    q_ = shared.take<float>(kRows * width(p));
    scores_ = shared.take<float>(kRows * kKeys);
    most_ = shared.take<float>(kRows);
    sum_ = shared.take<float>(kRows);
    tiles_ = shared.take<T>(2 * kTile * tile_stride(p));
    parents_ = shared.take<int32_t>(kPath);
    depths_ = shared.take<int32_t>(kRows);
    paths_ = shared.take<int16_t>(kRows * kPath);
  }

  // --- which keys a query has ---

  // Query r of the block: its node, and that node's number among those of the block.
  SPECDEC_DEVICE int node_of(int r) const { return (first_ + r) / groups_; }
  SPECDEC_DEVICE int own_node(int r) const { return node_of(r) - first_ / groups_; }
  SPECDEC_DEVICE int head_of(int r) const { return hk_ * groups_ + (first_ + r) % groups_; }

  // Keys of query r in the block, those of the cache first.
  SPECDEC_DEVICE int keys_of(int r) const {
    if (cached_ == kKeys) return kKeys;
    const int keys = depths_.load(own_node(r)) - begin_;
    return keys < 0 ? 0 : keys < kKeys ? keys : kKeys;
  }
  // The i-th key of query r that is no key of the cache: a node.
  SPECDEC_DEVICE int node_at(int r, int i) const {
    return paths_.load(own_node(r) * kPath + (begin_ > 0 ? begin_ : 0) + i);
  }

  // The paths of the block's nodes. False where none of them reaches the block.
  SPECDEC_DEVICE bool find_paths() {
    const Global<const int32_t> before(p_.op.prefix_parents), given(p_.op.parents);
    const int N = static_cast<int>(p_.op.N), last = node_of(rows_ - 1);
    for (int id = thread(); id <= prefix_ + last; id += kThreads) {
      int parent = id - 1;
      if (id < prefix_) {
        if (before) parent = before.load(static_cast<int64_t>(b_) * prefix_ + id);
      } else if (given) {
        parent = given.load(static_cast<int64_t>(b_) * N + id - prefix_);
      }
      parents_.store(id, parent_of(parent, id));
    }
    barrier();
    const int nodes = own_node(rows_ - 1) + 1;
    if (thread() < nodes) {
      const int leaf = prefix_ + node_of(0) + thread();
      int depth = 0;
      for (int id = leaf; id >= 0; id = parents_.load(id)) ++depth;
      depths_.store(thread(), depth);
      for (int id = leaf, i = depth - 1; i >= 0; id = parents_.load(id), --i) {
        paths_.store(thread() * kPath + i, static_cast<int16_t>(id));
      }
    }
    barrier();
    bool reached = cached_ > 0;
    for (int i = 0; i < nodes; ++i) reached = reached || depths_.load(i) > begin_;
    return reached;
  }

  // --- memory ---

  // Four elements of a row.
  SPECDEC_DEVICE void load_four(const Global<const T>& from, int64_t i, float (&x)[4]) const {
    if (p_.vector) {
      const Pack<T, 4> pack = from.template load_vec<4>(i);
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) x[e] = float_of(pack[e]);
    } else {
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) x[e] = float_of(from.load(i + e));
    }
  }

  // Key or value of a node.
  SPECDEC_DEVICE Global<const T> node_row(int id, const void* prefix, const Strides& prefix_stride,
                                          const void* fresh, const Strides& stride) const {
    if (id < prefix_) {
      return Global<const T>(static_cast<const T*>(prefix)) +
             (b_ * prefix_stride.b + id * prefix_stride.n + hk_ * prefix_stride.h);
    }
    return Global<const T>(static_cast<const T*>(fresh)) +
           (b_ * stride.b + (id - prefix_) * stride.n + hk_ * stride.h);
  }

  SPECDEC_DEVICE void load_queries() {
    const Strides& stride = p_.op.q_stride;
    const Global<const T> q = Global<const T>(static_cast<const T*>(p_.op.q)) + b_ * stride.b;
    const int D = width(p_);
    for (int i = 4 * thread(); i < rows_ * D; i += 4 * kThreads) {
      const int r = i / D;
      float x[4];
      load_four(q, node_of(r) * stride.n + head_of(r) * stride.h + i % D, x);
      Pack<float, 4> scaled;
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) scaled[e] = x[e] * p_.op.scale;
      q_.template store_vec<4>(i, scaled);
    }
    barrier();
  }

  // Starts the copy of tile t of the cache: keys, then values.
  SPECDEC_DEVICE void start_tile(int t, int tiles) const {
    if (t < 2 * tiles) {
      const bool keys = t < tiles;
      const int first = (keys ? t : t - tiles) * kTile, D = width(p_);
      const int count = cached_ - first < kTile ? cached_ - first : kTile;
      const Strides& stride = keys ? p_.op.cache.k_stride : p_.op.cache.v_stride;
      const Global<const T> from =
          Global<const T>(static_cast<const T*>(keys ? p_.op.cache.k : p_.op.cache.v)) +
          (slot_ * stride.b + (static_cast<int64_t>(block().y) * kKeys + first) * stride.n + hk_ * stride.h);
      const Shared<T> to = tile(t);
      if (p_.vector) {
        for (int i = kVec * thread(); i < count * D; i += kVec * kThreads) {
          copy_async<kVec>(to, i / D * tile_stride(p_) + i % D, from, i / D * stride.n + i % D);
        }
      } else {
        for (int i = thread(); i < count * D; i += kThreads) {
          to.store(i / D * tile_stride(p_) + i % D, from.load(i / D * stride.n + i % D));
        }
      }
    }
    copy_async_commit();
  }
  SPECDEC_DEVICE Shared<T> tile(int t) const { return tiles_ + t % 2 * (kTile * tile_stride(p_)); }

  // f(tile, first key, keys) for every tile of the keys, or of the values, while the next one is copied.
  template <typename F>
  SPECDEC_DEVICE void for_tiles(int from, int tiles, F&& f) const {
    for (int t = from; t < from + tiles; ++t) {
      copy_async_wait<0>();
      barrier();
      start_tile(t + 1, tiles);
      const int first = (t - from) * kTile;
      f(tile(t), first, cached_ - first < kTile ? cached_ - first : kTile);
    }
  }

  // --- the two products and the softmax between them ---

  SPECDEC_DEVICE void attend() {
    const int tiles = (cached_ + kTile - 1) / kTile;
    start_tile(0, tiles);
    for_tiles(0, tiles, [&](const Shared<T>& keys, int first, int count) { score_tile(keys, first, count); });
    SPECDEC_ROLL
    for (int r = warp(); r < rows_; r += kWarps) {
      score_path(r);
      warp_barrier();
      soften(r);
    }
    barrier();
    add_values(tiles);
  }

  // A lane has a key of the tile, a warp every kWarps-th query.
  SPECDEC_DEVICE void score_tile(const Shared<T>& keys, int first, int count) const {
    if (lane() >= count) return;
    const int D = width(p_);
    float sums[kWarpRows] = {};
    SPECDEC_ROLL
    for (int d = 0; d < D; d += kVec) {
      const Pack<T, kVec> key = keys.template load_vec<kVec>(lane() * tile_stride(p_) + d);
      SPECDEC_UNROLL
      for (int i = 0; i < kWarpRows; ++i) {
        const int r = warp() + i * kWarps;
        if (r >= rows_) continue;
        SPECDEC_UNROLL
        for (int e = 0; e < kVec; e += 4) {
          const Pack<float, 4> q = q_.template load_vec<4>(r * D + d + e);
          SPECDEC_UNROLL
          for (int k = 0; k < 4; ++k) sums[i] = fma(q[k], float_of(key[e + k]), sums[i]);
        }
      }
    }
    SPECDEC_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      const int r = warp() + i * kWarps;
      if (r < rows_) scores_.store(r * kKeys + first + lane(), sums[i]);
    }
  }

  // A lane has a node of the path.
  SPECDEC_DEVICE void score_path(int r) const {
    const int count = keys_of(r) - cached_, D = width(p_);
    for (int i = lane(); i < count; i += 32) {
      const KvNodesView &before = p_.op.prefix, &nodes = p_.op.nodes;
      const Global<const T> key = node_row(node_at(r, i), before.k, before.k_stride, nodes.k, nodes.k_stride);
      float sum = 0.0f;
      SPECDEC_ROLL
      for (int d = 0; d < D; d += 4) {
        const Pack<float, 4> q = q_.template load_vec<4>(r * D + d);
        float k[4];
        load_four(key, d, k);
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) sum = fma(q[e], k[e], sum);
      }
      scores_.store(r * kKeys + cached_ + i, sum);
    }
  }

  SPECDEC_DEVICE void soften(int r) const {
    const int count = keys_of(r);
    const Shared<float> row = scores_ + r * kKeys;
    float most = -std::numeric_limits<float>::infinity();
    for (int t = lane(); t < count; t += 32) {
      const float score = row.load(t);
      most = score > most ? score : most;
    }
    SPECDEC_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other = shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    float sum = 0.0f;
    for (int t = lane(); t < count; t += 32) {
      const float weight = exp(row.load(t) - most);
      row.store(t, weight);
      sum += weight;
    }
    SPECDEC_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane() == 0) {
      most_.store(r, most);
      sum_.store(r, sum);
    }
  }

  // A thread has four columns of the values and every teams-th query.
  SPECDEC_DEVICE void add_values(int tiles) {
    constexpr int kLeast = (Traits::kD > 0 ? Traits::kD : static_cast<int>(kMaxAttentionWidth)) / 4;
    constexpr int kMostMine = (kRows * kLeast + kThreads - 1) / kThreads;
    const int columns = width(p_) / 4, teams = kThreads / columns;
    const int column = thread() % columns * 4, team = thread() / columns;
    float sums[kMostMine][4] = {};
    const bool idle = team >= teams;
    for_tiles(tiles, tiles, [&](const Shared<T>& values, int first, int count) {
      if (idle) return;
      SPECDEC_ROLL
      for (int t = 0; t < count; ++t) {
        const Pack<T, 4> value = values.template load_vec<4>(t * tile_stride(p_) + column);
        SPECDEC_UNROLL
        for (int i = 0; i < kMostMine; ++i) {
          const int r = team + i * teams;
          if (r >= rows_) continue;
          const float weight = scores_.load(r * kKeys + first + t);
          SPECDEC_UNROLL
          for (int e = 0; e < 4; ++e) sums[i][e] = fma(weight, float_of(value[e]), sums[i][e]);
        }
      }
    });
    if (idle) return;
    SPECDEC_UNROLL
    for (int i = 0; i < kMostMine; ++i) {
      const int r = team + i * teams;
      if (r >= rows_) continue;
      add_path(r, column, sums[i]);
      write(r, column, sums[i]);
    }
  }

  SPECDEC_DEVICE void add_path(int r, int column, float (&sums)[4]) const {
    const int count = keys_of(r) - cached_;
    SPECDEC_ROLL
    for (int i = 0; i < count; ++i) {
      const KvNodesView &before = p_.op.prefix, &nodes = p_.op.nodes;
      float value[4];
      load_four(node_row(node_at(r, i), before.v, before.v_stride, nodes.v, nodes.v_stride), column, value);
      const float weight = scores_.load(r * kKeys + cached_ + i);
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) sums[e] = fma(weight, value[e], sums[e]);
    }
  }

  // --- what leaves the block ---

  SPECDEC_DEVICE Global<T> out_row(int n, int head) const {
    return Global<T>(static_cast<T*>(p_.op.out)) + ((b_ * p_.op.N + n) * p_.op.HQ + head) * p_.op.D;
  }

  SPECDEC_DEVICE void write(int r, int column, const float (&sums)[4]) const {
    const int count = keys_of(r);
    if (count == 0) return;
    const float sum = sum_.load(r);
    if (p_.blocks == 1) {
      Pack<T, 4> out;
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) out[e] = round_to<T>(sums[e] / sum);
      out_row(node_of(r), head_of(r)).template store_vec<4>(column, out);
      return;
    }
    const int64_t query = (b_ * p_.op.N + node_of(r)) * p_.op.HQ + head_of(r);
    const Global<float> first = Global<float>(p_.answers) + query * p_.blocks * p_.answer_size();
    const Global<float> answer = first + block().y * p_.answer_size();
    Pack<float, 4> values;
    SPECDEC_UNROLL
    for (int e = 0; e < 4; ++e) values[e] = sums[e];
    answer.template store_vec<4>(kAnswerHead + column, values);
    if (column != 0) return;
    answer.store(0, most_.load(r));
    answer.store(1, sum);
    // The block that holds the node itself is its last.
    if (cached_ < kKeys && depths_.load(own_node(r)) - begin_ <= kKeys) {
      first.store(2, static_cast<float>(block().y + 1));
    }
  }

  // Queries of padding, where no launch follows that would see to them.
  SPECDEC_DEVICE void clear_padding() const {
    if (p_.blocks > 1) return;
    const int left = static_cast<int>(p_.op.N) * groups_ - first_;
    const int count = left < kRows ? left : kRows, D = width(p_);
    for (int i = 4 * thread(); i < count * D; i += 4 * kThreads) {
      const int r = i / D;
      if (r >= rows_) out_row(node_of(r), head_of(r)).template store_vec<4>(i % D, Pack<T, 4>{});
    }
  }

  const Params& p_;
  int groups_, first_, hk_, rows_, prefix_;
  int64_t b_, slot_;
  int begin_;   // depth of the node whose position is the block's first; negative where that is in the cache
  int cached_;  // keys of the block in the cache
  Shared<float> q_, scores_, most_, sum_;
  Shared<T> tiles_;
  Shared<int32_t> parents_, depths_;
  Shared<int16_t> paths_;
};

// A warp adds the answers of one query's blocks, block after block, as one softmax.
template <typename T>
struct CombineAnswers {
  using Params = AttentionWork;
  static constexpr int kThreads = 128, kQueries = kThreads / 32;

  static Launch shape(const Params& p) {
    return {{static_cast<int32_t>((p.op.B * p.op.N * p.op.HQ + kQueries - 1) / kQueries), 1, 1}, 0};
  }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena) {
    const int64_t query = static_cast<int64_t>(block().x) * kQueries + warp();
    if (query >= p.op.B * p.op.N * p.op.HQ) return;
    const int64_t n = query / p.op.HQ % p.op.N, b = query / p.op.HQ / p.op.N;
    const int D = static_cast<int>(p.op.D);
    const Global<T> out = Global<T>(static_cast<T*>(p.op.out)) + query * D;
    const int64_t slot = slot_of(p.op.slots, b, p.op.cache.slots);
    if (slot < 0 || n >= length_of(p.op.lengths, b, p.op.N)) {
      for (int d = 4 * lane(); d < D; d += 128) out.template store_vec<4>(d, Pack<T, 4>{});
      return;
    }
    const int64_t size = p.answer_size();
    const Global<const float> answers = Global<const float>(p.answers) + query * p.blocks * size;
    const int blocks = static_cast<int>(answers.load(2));
    float most = answers.load(0);
    for (int j = 1; j < blocks; ++j) {
      const float other = answers.load(j * size);
      most = other > most ? other : most;
    }
    float sum = 0.0f;
    for (int j = 0; j < blocks; ++j) {
      sum = fma(exp(answers.load(j * size) - most), answers.load(j * size + 1), sum);
    }
    for (int d = 4 * lane(); d < D; d += 128) {
      float sums[4] = {};
      for (int j = 0; j < blocks; ++j) {
        const float weight = exp(answers.load(j * size) - most);
        const Pack<float, 4> values = answers.template load_vec<4>(j * size + kAnswerHead + d);
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) sums[e] = fma(weight, values[e], sums[e]);
      }
      Pack<T, 4> rounded;
      SPECDEC_UNROLL
      for (int e = 0; e < 4; ++e) rounded[e] = round_to<T>(sums[e] / sum);
      out.template store_vec<4>(d, rounded);
    }
  }
};

}  // namespace specdec::cuda
