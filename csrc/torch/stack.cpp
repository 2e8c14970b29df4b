// Bindings of consecutive Gated DeltaNet blocks: verify_stack, verify_stack_deferred. With a few rows the way
// from one block to the next through Python takes as long as half a block.
#include "stack.h"

#include <algorithm>
#include <cstdint>

namespace specdec::binding {

namespace {

using StackResult = std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>>;

const OptionalTensor kAbsent;

std::string numbered(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void check_count(const std::vector<Tensor>& list, const char* name, size_t want, const char* of) {
  STD_TORCH_CHECK(list.size() == want, name, ": got ", list.size(), " tensors, want ", want, ", ", of);
}

// One block: which weights are its own, and which mixer it is.
struct Part {
  int64_t first, count, mixer;  // mixer -1: it has none
};

std::vector<Part> parts_of(const StackArgs& stack) {
  std::vector<Part> parts;
  int64_t weights = 0, mixers = 0;
  for (int64_t count : stack.parts) {
    STD_TORCH_CHECK(count == kMlpWeights || count == kMixerWeights || count == kMixerWeights + kMlpWeights,
                    "parts: got ", count,
                    ", want the number of a block's weights: 10, 7 without an MLP or 3 without a mixer");
    parts.push_back({weights, count, count >= kMixerWeights ? mixers++ : -1});
    weights += count;
  }
  check_count(stack.weights, "weights", weights, "those of all blocks");
  check_count(stack.conv_states, "conv_states", mixers, "one a mixer");
  check_count(stack.states, "states", mixers, "one a mixer");
  if (!stack.conv_biases.empty())
    check_count(stack.conv_biases, "conv_biases", mixers, "one a mixer, or none");
  return parts;
}

// Runs the blocks; `mixer`(x, BlockArgs, which) verifies one that has a mixer.
template <typename Mixer>
StackOutputs run_blocks(const Tensor& x, const StackArgs& stack, const std::vector<Part>& parts,
                        const StackNodes& nodes, Mixer&& mixer) {
  check_shape(x, "x", {-1, -1, -1}, "[B, N, D]");
  StackOutputs made;
  made.hidden.reserve(parts.size());
  Tensor stream = x;
  for (const Part& part : parts) {
    const BlockWeights weights(stack.weights.data() + part.first, part.count);
    if (part.mixer >= 0) {
      const OptionalTensor bias =
          stack.conv_biases.empty() ? OptionalTensor() : OptionalTensor(stack.conv_biases[part.mixer]);
      const auto [y, o, mixed, k, u, g] =
          mixer(stream,
                BlockArgs{weights, bias, stack.gated, stack.eps, stack.neg_eigval,
                          stack.conv_states[part.mixer], stack.states[part.mixer], stack.slots, nodes.parents,
                          nodes.lengths, stack.scale, nodes.strategy},
                part.mixer);
      stream = y;
      made.read.push_back(o);
      made.entries.insert(made.entries.end(), {k, u, g, mixed});
    } else {
      stream = block_mlp(stream, weights, stack.eps);
    }
    made.hidden.push_back(stream);
  }
  return made;
}

void check_alike(const std::vector<Tensor>& list, const char* name, size_t i, size_t first,
                 bool strides = true) {
  const Tensor &t = list[i], &model = list[first];
  STD_TORCH_CHECK(t.scalar_type() == model.scalar_type() && t.sizes() == model.sizes() &&
                      (!strides || t.strides() == model.strides()),
                  name, "[", i, "]: got ", torch::headeronly::toString(t.scalar_type()), " ", shape_string(t),
                  ", want the dtype, shape and strides of ", name, "[", first, "], ",
                  torch::headeronly::toString(model.scalar_type()), " ", shape_string(model));
}

// Factors are contiguous; the raw projections may be a part of all projections, or of those of other rounds.
void check_pending_alike(const std::vector<Tensor>& pending, size_t i) {
  for (int64_t part = 0; part < kEntryParts; ++part) {
    const size_t place = kEntryParts * i + part;
    const std::string name = numbered("pending", place);
    check_alike(pending, "pending", place, part, false);
    if (part < kEntryParts - 1) {
      check_contiguous(pending[place], name.c_str());
    } else {
      check_last_contiguous(pending[place], name.c_str());
    }
  }
}

// What could fail in a later block when an earlier one has written its state: what the first one refuses is
// refused of the others by being unlike it. That the blocks' weights fit each other is up to who made them.
void check_all_alike(const StackArgs& stack, const std::vector<Tensor>& pending) {
  for (size_t i = 0; i < stack.states.size(); ++i) {
    check_alike(stack.states, "states", i, 0);
    check_alike(stack.conv_states, "conv_states", i, 0);
    if (!stack.conv_biases.empty()) check_alike(stack.conv_biases, "conv_biases", i, 0);
    check_pending_alike(pending, i);
  }
}

// Memory from a tensor's first to its last byte.
struct Extent {
  explicit Extent(const Tensor& t, bool written) : written(written) {
    begin = reinterpret_cast<intptr_t>(t.const_data_ptr());
    const auto sizes = t.sizes(), strides = t.strides();
    int64_t last = 0;
    bool empty = false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      empty = empty || sizes[d] == 0;
      last += (sizes[d] - 1) * strides[d];
    }
    end = empty ? begin : begin + (last + 1) * static_cast<int64_t>(t.element_size());
  }

  intptr_t begin, end;
  bool written;
};

// Whether anything that is written lies within the reach of anything else.
bool entangled(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  intptr_t any = 0, written = 0;  // where what began before ends
  for (const Extent& extent : extents) {
    if (extent.begin < (extent.written ? any : written)) return true;
    any = std::max(any, extent.end);
    if (extent.written) written = std::max(written, extent.end);
  }
  return false;
}

// An argument, or one of a list; its name is made where something is wrong with it.
struct Listed {
  const char* list;
  int64_t index;  // -1: no list
  const Tensor* tensor;

  std::string name() const { return index < 0 ? list : numbered(list, index); }
};

void add(std::vector<Listed>& all, const char* name, const OptionalTensor& t) {
  if (t.has_value()) all.push_back({name, -1, &*t});
}

void add(std::vector<Listed>& all, const char* name, const std::vector<Tensor>& list) {
  for (size_t i = 0; i < list.size(); ++i) all.push_back({name, static_cast<int64_t>(i), &list[i]});
}

// A pool of one mixer may share no memory with anything that is read with another one, nor with its pools. Of
// the weights only vectors and taps count, as for a single block.
void check_all_apart(const Tensor& x, const StackArgs& stack, const std::vector<Part>& parts,
                     const StackNodes& nodes, const std::vector<Tensor>& pending, const OptionalTensor& path,
                     const OptionalTensor& path_lengths) {
  std::vector<Listed> pools, read = {{"x", -1, &x}};
  add(pools, "states", stack.states);
  add(pools, "conv_states", stack.conv_states);
  add(read, "slots", stack.slots);
  add(read, "parents", nodes.parents);
  add(read, "lengths", nodes.lengths);
  add(read, "pending", pending);
  add(read, "pending.path", path);
  add(read, "pending.path_lengths", path_lengths);
  add(read, "conv_biases", stack.conv_biases);
  for (const Part& part : parts) {
    if (part.mixer < 0) continue;
    for (int64_t i : {2, 3, 4}) read.push_back({"weights", part.first + i, &stack.weights[part.first + i]});
  }
  std::vector<Extent> extents;
  for (const Listed& pool : pools) extents.emplace_back(*pool.tensor, true);
  for (const Listed& input : read) extents.emplace_back(*input.tensor, false);
  if (!entangled(std::move(extents))) return;  // else they may still lie between each other's slots

  std::vector<std::string> names;
  for (const Listed& pool : pools) names.push_back(pool.name());
  for (const Listed& input : read) names.push_back(input.name());
  const size_t mixers = stack.states.size();
  for (size_t i = 0; i < mixers; ++i) {
    std::vector<Named> others;
    for (size_t j = 0; j < read.size(); ++j)
      others.emplace_back(names[pools.size() + j].c_str(), *read[j].tensor);
    for (size_t j = i + 1; j < mixers; ++j) {
      others.emplace_back(names[j].c_str(), stack.states[j]);
      others.emplace_back(names[mixers + j].c_str(), stack.conv_states[j]);
    }
    check_apart(
        Operands{{{names[i].c_str(), stack.states[i]}, {names[mixers + i].c_str(), stack.conv_states[i]}},
                 Access::kWrite,
                 others});
  }
}

StackResult verify_stack_op(Tensor x, std::vector<Tensor> weights, std::vector<int64_t> parts,
                            std::vector<Tensor> conv_biases, bool gated, double eps, bool neg_eigval,
                            std::vector<Tensor> conv_states, std::vector<Tensor> states, OptionalTensor slots,
                            OptionalTensor parents, OptionalTensor lengths, std::vector<Tensor> prefix,
                            OptionalTensor prefix_parents, std::optional<double> scale, int64_t strategy) {
  StackOutputs made = verify_stack(
      x, {weights, parts, conv_biases, gated, eps, neg_eigval, conv_states, states, slots, scale},
      {parents, lengths, strategy}, prefix, prefix_parents);
  return {std::move(made.hidden), std::move(made.read), std::move(made.entries)};
}

StackResult verify_stack_deferred(Tensor x, std::vector<Tensor> weights, std::vector<int64_t> parts,
                                  std::vector<Tensor> conv_biases, bool gated, double eps, bool neg_eigval,
                                  std::vector<Tensor> conv_states, std::vector<Tensor> states,
                                  OptionalTensor slots, OptionalTensor parents, OptionalTensor lengths,
                                  std::vector<Tensor> pending, OptionalTensor path,
                                  OptionalTensor path_lengths, std::optional<double> scale,
                                  int64_t strategy) {
  const StackArgs stack{weights,    parts,       conv_biases, gated, eps,
                        neg_eigval, conv_states, states,      slots, scale};
  const std::vector<Part> blocks = parts_of(stack);
  check_count(pending, "pending", kEntryParts * states.size(),
              "k, u, g and the raw projections of each mixer");
  check_all_alike(stack, pending);
  check_all_apart(x, stack, blocks, {parents, lengths, strategy}, pending, path, path_lengths);
  StackOutputs made =
      run_blocks(x, stack, blocks, {parents, lengths, strategy},
                 [&](const Tensor& stream, const BlockArgs& args, int64_t mixer) {
                   const Tensor* earlier = pending.data() + kEntryParts * mixer;
                   const OptionalTensor g = earlier[2];
                   return verify_block_deferred(stream, args,
                                                {earlier[0], earlier[1], g, path, path_lengths, earlier[3]});
                 });
  return {std::move(made.hidden), std::move(made.read), std::move(made.entries)};
}

}  // namespace

StackOutputs verify_stack(const Tensor& x, const StackArgs& stack, const StackNodes& nodes,
                          const std::vector<Tensor>& prefix, const OptionalTensor& prefix_parents) {
  const std::vector<Part> parts = parts_of(stack);
  if (!prefix.empty()) {
    check_count(prefix, "prefix", kEntryParts * stack.states.size(),
                "k, u, g and the raw projections of each mixer");
    for (size_t i = kEntryParts; i < prefix.size(); i += kEntryParts) {
      check_alike(prefix, "prefix", i, 0, false);  // of another number of nodes each would fit its own layer
    }
  }
  return run_blocks(x, stack, parts, nodes, [&](const Tensor& stream, const BlockArgs& args, int64_t mixer) {
    if (prefix.empty()) return verify_block(stream, args, {kAbsent, kAbsent, kAbsent, kAbsent, kAbsent});
    const Tensor* earlier = prefix.data() + kEntryParts * mixer;
    const OptionalTensor k = earlier[0], u = earlier[1], g = earlier[2], mixed = earlier[3];
    return verify_block(stream, args, {k, u, g, prefix_parents, mixed});
  });
}

}  // namespace specdec::binding

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "verify_stack(Tensor x, Tensor[] weights, int[] parts, Tensor[] conv_biases, bool gated, float eps, "
      "bool neg_eigval, Tensor[] conv_states, Tensor[] states, Tensor? slots, Tensor? parents, "
      "Tensor? lengths, Tensor[] prefix, Tensor? prefix_parents, float? scale, int strategy) -> "
      "(Tensor[] hidden, Tensor[] read, Tensor[] entries)");
  m.def(
      "verify_stack_deferred(Tensor x, Tensor[] weights, int[] parts, Tensor[] conv_biases, bool gated, "
      "float eps, bool neg_eigval, Tensor(a!)[] conv_states, Tensor(b!)[] states, Tensor? slots, "
      "Tensor? parents, Tensor? lengths, Tensor[] pending, Tensor? path, Tensor? path_lengths, "
      "float? scale, int strategy) -> (Tensor[] hidden, Tensor[] read, Tensor[] entries)");
}

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("verify_stack", TORCH_BOX(&specdec::binding::verify_stack_op));
  m.impl("verify_stack_deferred", TORCH_BOX(&specdec::binding::verify_stack_deferred));
}
