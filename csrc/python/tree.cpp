#include "specdec/tree.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "specdec/types.h"

namespace py = pybind11;

namespace specdec::python {
namespace {

constexpr int64_t kMaxToken = std::numeric_limits<int32_t>::max();

void check_token(int64_t token, const std::string& where) {
  if (token >= 0 && token <= kMaxToken) return;
  throw py::value_error(where + " is " + std::to_string(token) + ", want a token id (0 to " +
                        std::to_string(kMaxToken) + ")");
}

void check_size(size_t nodes) {
  if (nodes <= static_cast<size_t>(TreeSchedule::kMaxNodes)) return;
  throw py::value_error("the tree has " + std::to_string(nodes) + " nodes, want at most " +
                        std::to_string(TreeSchedule::kMaxNodes));
}

[[noreturn]] void raise(const TreeError& error) {
  char text[96];
  error.format(text, sizeof(text));
  throw py::value_error("parents[" + std::to_string(error.node) + "] " + text);
}

// 64-bit arguments, so that a message can show a value that no int32 holds.
void check_tree(const std::vector<int64_t>& tokens, const std::vector<int64_t>& parents) {
  check_size(tokens.size());
  if (tokens.size() != parents.size()) {
    throw py::value_error("parents has " + std::to_string(parents.size()) + " entries for " +
                          std::to_string(tokens.size()) + " tokens, want one for each");
  }
  for (size_t i = 0; i < tokens.size(); ++i) check_token(tokens[i], "tokens[" + std::to_string(i) + "]");
  const TreeError error = check_parents(parents.data(), static_cast<int64_t>(parents.size()));
  if (!error.ok()) raise(error);
}

// Paths merged into a tree in the order of their first appearance.
std::pair<py::tuple, py::tuple> merge_paths(const std::vector<std::vector<int64_t>>& paths) {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;
  for (size_t p = 0; p < paths.size(); ++p) {
    int32_t node = -1;
    for (size_t i = 0; i < paths[p].size(); ++i) {
      const int64_t token = paths[p][i];
      const int32_t known = static_cast<int32_t>(tokens.size());
      int32_t child = node + 1;
      while (child < known && (parents[child] != node || tokens[child] != token)) ++child;
      if (child == known) {
        check_token(token, "paths[" + std::to_string(p) + "][" + std::to_string(i) + "]");
        tokens.push_back(token);
        parents.push_back(node);
        check_size(tokens.size());
      }
      node = child;
    }
  }
  return {py::tuple(py::cast(tokens)), py::tuple(py::cast(parents))};
}

std::unique_ptr<TreeSchedule> make_schedule(const std::vector<int32_t>& parents) {
  check_size(parents.size());
  const TreeError error = check_parents(parents.data(), static_cast<int64_t>(parents.size()));
  if (!error.ok()) raise(error);
  auto tree = std::make_unique<TreeSchedule>();
  tree->build(parents.data(), static_cast<int64_t>(parents.size()));
  return tree;
}

py::tuple to_tuple(const int16_t* begin, int64_t count) {
  py::tuple result(count);
  for (int64_t i = 0; i < count; ++i) result[i] = begin[i];
  return result;
}

py::tuple chains(const TreeSchedule& tree) {
  py::tuple result(tree.chains);
  for (int32_t c = 0; c < tree.chains; ++c) {
    const int32_t begin = tree.chain_begin[c];
    result[c] = to_tuple(tree.chain_nodes + begin, tree.chain_begin[c + 1] - begin);
  }
  return result;
}

py::tuple waves(const TreeSchedule& tree) {
  py::tuple result(tree.waves);
  for (int32_t w = 0; w < tree.waves; ++w) {
    py::tuple wave(tree.wave_begin[w + 1] - tree.wave_begin[w]);
    for (size_t i = 0; i < wave.size(); ++i) wave[i] = tree.wave_begin[w] + static_cast<int32_t>(i);
    result[w] = wave;
  }
  return result;
}

py::array_t<bool> ancestor_mask(const TreeSchedule& tree) {
  py::array_t<bool> mask({tree.nodes, tree.nodes});  // [N, N]
  auto view = mask.mutable_unchecked<2>();
  AncestorMask ancestors;
  ancestors.build(tree.parent, tree.nodes);
  for (int32_t i = 0; i < tree.nodes; ++i)
    for (int32_t j = 0; j < tree.nodes; ++j) view(i, j) = ancestors.is_ancestor_or_self(j, i);
  return mask;
}

}  // namespace

void bind_tree(py::module_& module) {
  module.attr("MAX_NODES") = static_cast<int>(TreeSchedule::kMaxNodes);
  module.attr("MAX_SERIAL_NODES") = kMaxSerialNodes;
  module.def("check_tree", &check_tree);
  module.def("merge_paths", &merge_paths);
  py::class_<TreeSchedule>(module, "TreeSchedule")
      .def(py::init(&make_schedule))
      .def_property_readonly("depths", [](const TreeSchedule& t) { return to_tuple(t.depth, t.nodes); })
      .def_property_readonly("sizes", [](const TreeSchedule& t) { return to_tuple(t.size, t.nodes); })
      .def_property_readonly("order", [](const TreeSchedule& t) { return to_tuple(t.order, t.nodes); })
      .def_property_readonly("chains", &chains)
      .def_property_readonly("waves", &waves)
      .def("ancestor_mask", &ancestor_mask);
}

}  // namespace specdec::python
