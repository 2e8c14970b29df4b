// accept_greedy: the argmax of those rows alone that an accepted node with drafts below it, or the last one,
// asks for.
#include "accept_tree.h"
#include "ops.h"
#include "sampling_filter.h"
#include "scratch.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kUnknown = -2;

template <typename T>
class GreedyRows {
 public:
  GreedyRows(const AcceptGreedyParams& p, int64_t b, char* scratch)
      : logits_(static_cast<const T*>(p.logits) + b * p.stride_b), stride_(p.stride_n), V_(p.V) {
    parts_ = reinterpret_cast<double*>(scratch);
    wanted_ = reinterpret_cast<int64_t*>(parts_ + parts_of(V_));
    depth_ = reinterpret_cast<int32_t*>(wanted_ + p.N);
  }

  static int64_t scratch_bytes(const AcceptGreedyParams& p) {
    return parts_of(p.V) * static_cast<int64_t>(sizeof(double)) +
           p.N * static_cast<int64_t>(sizeof(int64_t) + sizeof(int32_t));
  }

  // The leaf: of the deepest accepted nodes the one of lowest index.
  int walk(const DraftTree& tree) {
    int leaf = 0;
    for (int64_t n = 0; n < tree.length; ++n) {
      wanted_[n] = kUnknown;
      const int parent = tree.parent(n);
      const bool accepted = n == 0 || (depth_[parent] >= 0 && tree.tokens[n] == wanted(parent));
      depth_[n] = n == 0 ? 0 : accepted ? depth_[parent] + 1 : -1;
      if (depth_[n] > depth_[leaf]) leaf = static_cast<int>(n);
    }
    return leaf;
  }

  // The argmax after a node, -1 where there is none.
  int64_t wanted(int64_t node) {
    int64_t& token = wanted_[node];
    if (token != kUnknown) return token;
    const T* row = logits_ + node * stride_;
    float largest;
    const bool found = find_largest(row, V_, parts_, largest);
    token = found ? first_largest(row, V_, parts_, largest) : -1;
    return token;
  }

 private:
  const T* logits_;
  int64_t stride_, V_;
  double* parts_;
  int64_t* wanted_;  // [N]
  int32_t* depth_;   // [N], -1: not accepted
};

}  // namespace

Status accept_greedy(const AcceptGreedyParams& p) {
  return visit_dtype(p.dtype, [&](auto tag) {
    using Rows = GreedyRows<decltype(tag)>;
    const size_t floats = static_cast<size_t>(Rows::scratch_bytes(p)) / sizeof(float) + 1;
    each_sequence(p.B, p.N, p.V, [&](int64_t b) {
      const DraftTree tree(p.draft, b, p.N);
      if (tree.length == 0) {
        write_absent(p.accepted, b);
        return;
      }
      Rows rows(p, b, reinterpret_cast<char*>(thread_scratch(floats)));
      const int leaf = rows.walk(tree);
      write_outcome(p.accepted, b, tree, leaf, rows.wanted(leaf));
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
