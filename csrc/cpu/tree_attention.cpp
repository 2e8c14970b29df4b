// tree_attention: a node attends to the committed tokens of its sequence, to its ancestors and to itself.
//
// The keys on a node's path have positions: the cache 0, 1, ..., then its ancestors and itself. They are
// reduced in blocks of kBlock positions, each block to one answer (attention_tile.h), and the answers are
// added block after block. Nothing in that asks whether a key stands in the cache or in the tree, how many
// nodes are computed beside it or which thread takes a block: a node's output has the bits of decoding its
// path token by token. Blocks are also what threads share.
#include <vector>

#include "attention_tile.h"
#include "parallel.h"
#include "scratch.h"
#include "specdec/attention_params.h"
#include "specdec/sequences.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kTile = 64;  // keys or values that stay in the first cache while all queries pass over them
constexpr int64_t kMostRows = 32;  // queries of a work item

// A row of the call: a tree below a committed sequence. Its queries are numbered node by node, the query
// heads of one key head side by side, and cut into `chunks` runs of `rows`.
struct Sequence {
  int64_t b, slot, committed, length;  // `length` new nodes
  int64_t blocks;                      // on the longest path
  int64_t rows, chunks;
  int64_t first_item;  // work items: key heads x blocks x chunks
  int64_t answers;     // offset of its answers [length, HQ, blocks], where there are several blocks
};

// The queries of a work item, those whose path reaches the block.
struct Queries {
  int64_t count = 0;
  int32_t node[kMostRows], head[kMostRows];
  int32_t from[kMostRows], to[kMostRows];  // depths of its path whose positions lie in the block
  float* answer[kMostRows];
  float* values[kMostRows];  // the sum in `answer`
};

template <typename T>
class Attention {
 public:
  explicit Attention(const TreeAttentionParams& p)
      : p_(p), prefix_(p.prefix.nodes), groups_(p.HQ / p.HK), answer_size_(Answer::floats(p.D)) {
    int64_t floats = 0;
    sequences_.reserve(p.B);
    for (int64_t b = 0; b < p.B; ++b) {
      Sequence s = sequence_of(b);
      s.first_item = items_;
      s.answers = floats;
      items_ += p.HK * s.blocks * s.chunks;
      if (s.blocks > 1) floats += s.length * p.HQ * s.blocks * answer_size_;
      work_ += 2 * s.length * p.HQ * p.D * (s.committed + s.length);
      sequences_.push_back(s);
    }
    answers_ = call_scratch(floats);
  }

  void run() {
    parallel_for(items_, work_, [this](int64_t item) { run_item(item); });
    const int64_t nodes = p_.B * p_.N;
    parallel_for(nodes, work_ / kBlock, [this](int64_t i) { finish(sequences_[i / p_.N], i % p_.N); });
  }

 private:
  // What a thread works in; all [.., D].
  struct Workspace {
    float* q;                // [rows, D], scaled
    float* scores;           // [rows, kBlock], then weights
    float* answers;          // [rows], where there is one block
    float* tile;             // [kTile], keys or values of the cache in float32
    float *node_k, *node_v;  // [prefix + new nodes] in float32
  };

  Sequence sequence_of(int64_t b) const {
    Sequence s{b, slot_of(p_.slots, b), 0, 0, 0, 0, 0, 0, 0};
    if (s.slot < 0) return s;
    s.length = valid_length(p_.lengths, b, p_.N);
    s.committed = valid_length(p_.cache.lengths, s.slot, p_.cache.room);
    if (s.length == 0) return s;
    int64_t depth[kMaxAttentionNodes], longest = 0;
    for (int64_t i = 0; i < prefix_ + s.length; ++i) {
      const int64_t parent = parent_of(b, i);
      depth[i] = parent < 0 ? 1 : depth[parent] + 1;
      if (i >= prefix_ && depth[i] > longest) longest = depth[i];
    }
    s.blocks = (s.committed + longest + kBlock - 1) / kBlock;
    const int64_t queries = s.length * groups_;
    s.chunks = (queries + kMostRows - 1) / kMostRows;
    s.rows = (queries + s.chunks - 1) / s.chunks;
    return s;
  }

  int64_t parent_of(int64_t b, int64_t id) const {
    if (id < prefix_) return p_.prefix_parents != nullptr ? p_.prefix_parents[b * prefix_ + id] : id - 1;
    return p_.parents != nullptr ? p_.parents[b * p_.N + id - prefix_] : id - 1;
  }

  // The ids on the path to new node n, root first. Returns how many.
  int64_t path_to(int64_t b, int64_t n, int32_t (&path)[kMaxAttentionNodes]) const {
    int64_t first = kMaxAttentionNodes;
    for (int64_t id = prefix_ + n; id >= 0; id = parent_of(b, id)) path[--first] = static_cast<int32_t>(id);
    std::memmove(path, path + first, (kMaxAttentionNodes - first) * sizeof(path[0]));
    return kMaxAttentionNodes - first;
  }

  Workspace workspace(const Sequence& s) const {
    const int64_t nodes = std::is_same_v<T, float> ? 0 : prefix_ + s.length;
    const int64_t tile = std::is_same_v<T, float> ? 0 : kTile;
    const int64_t D = p_.D;
    Workspace w;
    w.q = thread_scratch(kMostRows * (D + kBlock + answer_size_) + (tile + 2 * nodes) * D);
    w.scores = w.q + kMostRows * D;
    w.answers = w.scores + kMostRows * kBlock;
    w.tile = w.answers + kMostRows * answer_size_;
    w.node_k = w.tile + tile * D;
    w.node_v = w.node_k + nodes * D;
    return w;
  }

  void run_item(int64_t item) const {
    const auto next = std::upper_bound(sequences_.begin(), sequences_.end(), item,
                                       [](int64_t i, const Sequence& s) { return i < s.first_item; });
    const Sequence& s = *(next - 1);
    const int64_t local = item - s.first_item;
    const int64_t chunk = local % s.chunks, block = local / s.chunks % s.blocks;
    const int64_t hk = local / s.chunks / s.blocks;
    const Workspace w = workspace(s);
    const int64_t cached = std::clamp<int64_t>(s.committed - block * kBlock, 0, kBlock);

    Queries queries;
    gather(s, block, hk, chunk * s.rows, w, &queries);
    if (queries.count == 0) return;
    if (cached < kBlock) widen_nodes(s, hk, w);
    const float* rows[kBlock];
    for (int64_t t = 0; t < cached; t += kTile) {
      const int64_t count = std::min(kTile, cached - t);
      cache_rows(p_.cache.k, p_.cache.k_stride, s.slot, block * kBlock + t, hk, count, w.tile, rows);
      score(w.q, queries.count, rows, count, w.scores + t);
    }
    for_nodes(s, queries, [&](int64_t r, int64_t heads, const int32_t* path, int64_t count) {
      for (int64_t i = 0; i < count; ++i) rows[i] = node_k(s.b, path[i], hk, w);
      score(w.q + r * p_.D, heads, rows, count, w.scores + r * kBlock + cached);
    });
    for (int64_t r = 0; r < queries.count; ++r) {
      soften(w.scores + r * kBlock, cached + queries.to[r] - queries.from[r], queries.answer[r]);
      std::memset(queries.values[r], 0, p_.D * sizeof(float));
    }
    for (int64_t t = 0; t < cached; t += kTile) {
      const int64_t count = std::min(kTile, cached - t);
      cache_rows(p_.cache.v, p_.cache.v_stride, s.slot, block * kBlock + t, hk, count, w.tile, rows);
      weigh_values(w.scores + t, queries.count, kBlock, rows, count, p_.D, queries.values);
    }
    for_nodes(s, queries, [&](int64_t r, int64_t heads, const int32_t* path, int64_t count) {
      for (int64_t i = 0; i < count; ++i) rows[i] = node_v(s.b, path[i], hk, w);
      weigh_values(w.scores + r * kBlock + cached, heads, kBlock, rows, count, p_.D, queries.values + r);
    });
    if (s.blocks > 1) return;
    for (int64_t r = 0; r < queries.count; ++r) {
      combine_answers(queries.answer[r], 1, p_.D, out_of(s.b, queries.node[r], queries.head[r]));
    }
  }

  // The item's queries, from number `first` on, scaled, and where their answers go.
  void gather(const Sequence& s, int64_t block, int64_t hk, int64_t first, const Workspace& w,
              Queries* queries) const {
    const int64_t begin = block * kBlock - s.committed;  // depth of the block's first position
    const int64_t last = std::min(first + s.rows, s.length * groups_);
    int64_t walked = -1, depth = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / groups_, head = hk * groups_ + i % groups_;
      if (begin + kBlock > 0 && n != walked) depth = depth_of(s.b, n);
      walked = n;
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(depth, begin + kBlock);
      if (begin >= 0 && from >= to) continue;  // its path ends before
      const int64_t r = queries->count++;
      queries->node[r] = static_cast<int32_t>(n);
      queries->head[r] = static_cast<int32_t>(head);
      queries->from[r] = static_cast<int32_t>(from);
      queries->to[r] = static_cast<int32_t>(std::max(from, to));
      queries->answer[r] =
          s.blocks == 1 ? w.answers + r * answer_size_ : answers_of(s, n, head) + block * answer_size_;
      queries->values[r] = queries->answer[r] + Answer::kValues;
      const T* q =
          static_cast<const T*>(p_.q) + s.b * p_.q_stride.b + n * p_.q_stride.n + head * p_.q_stride.h;
      float* to_row = w.q + r * p_.D;
      for (int64_t d = 0; d < p_.D; d += Vec::kWidth)
        (Vec::load(q + d) * Vec::set(p_.scale)).store(to_row + d);
    }
  }

  int64_t depth_of(int64_t b, int64_t n) const {
    int64_t depth = 0;
    for (int64_t id = prefix_ + n; id >= 0; id = parent_of(b, id)) ++depth;
    return depth;
  }

  // f(first query, queries, path in the block, its nodes) for every node of the item that has such a path.
  template <typename F>
  void for_nodes(const Sequence& s, const Queries& queries, F&& f) const {
    int32_t path[kMaxAttentionNodes];
    for (int64_t r = 0, end; r < queries.count; r = end) {
      for (end = r + 1; end < queries.count && queries.node[end] == queries.node[r];) ++end;
      if (queries.from[r] == queries.to[r]) continue;
      path_to(s.b, queries.node[r], path);
      f(r, end - r, path + queries.from[r], queries.to[r] - queries.from[r]);
    }
  }

  void score(const float* q, int64_t rows, const float* const* keys, int64_t count, float* scores) const {
    switch (p_.D / Vec::kWidth) {
      case 2:
        return score_keys<2>(q, rows, keys, count, p_.D, scores, kBlock);
      case 4:
        return score_keys<4>(q, rows, keys, count, p_.D, scores, kBlock);
      case 8:
        return score_keys<8>(q, rows, keys, count, p_.D, scores, kBlock);
      default:
        return score_keys<0>(q, rows, keys, count, p_.D, scores, kBlock);
    }
  }

  // rows [count] <- tokens of the cache from `token` on.
  void cache_rows(const void* cache, const Strides& stride, int64_t slot, int64_t token, int64_t hk,
                  int64_t count, float* tile, const float** rows) const {
    const T* at = static_cast<const T*>(cache) + slot * stride.b + token * stride.n + hk * stride.h;
    for (int64_t i = 0; i < count; ++i) rows[i] = as_float(at + i * stride.n, tile + i * p_.D);
  }

  // x [D] in float32: itself, or widened to `room`.
  const float* as_float(const T* x, float* room) const {
    if constexpr (std::is_same_v<T, float>) {
      return x;
    } else {
      for (int64_t d = 0; d < p_.D; d += Vec::kWidth) Vec::load(x + d).store(room + d);
      return room;
    }
  }

  void widen_nodes(const Sequence& s, int64_t hk, const Workspace& w) const {
    if constexpr (std::is_same_v<T, float>) return;
    for (int64_t id = 0; id < prefix_ + s.length; ++id) {
      as_float(node(s.b, id, hk, p_.prefix.k, p_.prefix.k_stride, p_.nodes.k, p_.nodes.k_stride),
               w.node_k + id * p_.D);
      as_float(node(s.b, id, hk, p_.prefix.v, p_.prefix.v_stride, p_.nodes.v, p_.nodes.v_stride),
               w.node_v + id * p_.D);
    }
  }

  const T* node(int64_t b, int64_t id, int64_t hk, const void* prefix, const Strides& prefix_stride,
                const void* fresh, const Strides& stride) const {
    if (id < prefix_) {
      return static_cast<const T*>(prefix) + b * prefix_stride.b + id * prefix_stride.n +
             hk * prefix_stride.h;
    }
    return static_cast<const T*>(fresh) + b * stride.b + (id - prefix_) * stride.n + hk * stride.h;
  }

  const float* node_k(int64_t b, int64_t id, int64_t hk, const Workspace& w) const {
    if constexpr (std::is_same_v<T, float>) {
      return node(b, id, hk, p_.prefix.k, p_.prefix.k_stride, p_.nodes.k, p_.nodes.k_stride);
    } else {
      return w.node_k + id * p_.D;
    }
  }

  const float* node_v(int64_t b, int64_t id, int64_t hk, const Workspace& w) const {
    if constexpr (std::is_same_v<T, float>) {
      return node(b, id, hk, p_.prefix.v, p_.prefix.v_stride, p_.nodes.v, p_.nodes.v_stride);
    } else {
      return w.node_v + id * p_.D;
    }
  }

  float* answers_of(const Sequence& s, int64_t n, int64_t head) const {
    return answers_ + s.answers + (n * p_.HQ + head) * s.blocks * answer_size_;
  }

  T* out_of(int64_t b, int64_t n, int64_t head) const {
    return static_cast<T*>(p_.out) + ((b * p_.N + n) * p_.HQ + head) * p_.D;
  }

  // Node n of a row, when the blocks have been answered.
  void finish(const Sequence& s, int64_t n) const {
    if (n >= s.length) {
      std::memset(out_of(s.b, n, 0), 0, p_.HQ * p_.D * sizeof(T));
    } else if (s.blocks > 1) {
      const int64_t blocks = (s.committed + depth_of(s.b, n) + kBlock - 1) / kBlock;
      for (int64_t head = 0; head < p_.HQ; ++head) {
        combine_answers(answers_of(s, n, head), blocks, p_.D, out_of(s.b, n, head));
      }
    }
  }

  const TreeAttentionParams& p_;
  const int64_t prefix_, groups_, answer_size_;
  std::vector<Sequence> sequences_;
  int64_t items_ = 0, work_ = 0;
  float* answers_ = nullptr;
};

}  // namespace

Status tree_attention(const TreeAttentionParams& p) {
  if (p.D < 1 || p.D > kMaxAttentionWidth || p.D % kAttentionMultiple != 0) return Status::kUnsupported;
  if (p.N + p.prefix.nodes > kMaxAttentionNodes) return Status::kUnsupported;
  if (p.HK < 1 || p.HQ % p.HK != 0) return Status::kInvalidArgument;
  visit_dtype(p.dtype, [&](auto tag) { Attention<decltype(tag)>(p).run(); });
  return Status::kOk;
}

}  // namespace specdec::cpu::SPECDEC_ISA
