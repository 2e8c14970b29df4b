#include "specdec/suffix_automaton.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "specdec/types.h"

namespace py = pybind11;

namespace specdec::python {
namespace {

std::unique_ptr<SuffixAutomaton> make_automaton(int32_t max_match) {
  if (max_match < 1) throw py::value_error("max_match is " + std::to_string(max_match) + ", want at least 1");
  return std::make_unique<SuffixAutomaton>(max_match);
}

void extend(SuffixAutomaton& automaton, const std::vector<int32_t>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0) continue;
    throw py::value_error("tokens[" + std::to_string(i) + "] is " + std::to_string(tokens[i]) +
                          ", want a token id (0 or more)");
  }
  for (const int32_t token : tokens) automaton.append(token);
}

py::tuple to_tuple(const std::vector<int32_t>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

// (tokens, parents, match length); parents is None for a chain.
py::tuple propose(const SuffixAutomaton& automaton, int32_t min_match, int32_t max_nodes, int32_t max_depth,
                  int32_t branches) {
  const SuffixAutomaton::Continuations tree =
      automaton.propose(min_match, std::min(max_nodes, kMaxSolveNodes), max_depth, branches);
  py::object parents = py::none();
  if (!tree.chain) parents = to_tuple(tree.parents);
  return py::make_tuple(to_tuple(tree.tokens), parents, tree.match_length);
}

}  // namespace

void bind_suffix_automaton(py::module_& module) {
  py::class_<SuffixAutomaton>(module, "SuffixAutomaton")
      .def(py::init(&make_automaton), py::arg("max_match"))
      .def("extend", &extend, py::arg("tokens"))
      .def("clear", &SuffixAutomaton::clear)
      .def("match",
           [](const SuffixAutomaton& automaton) {
             const SuffixAutomaton::Match match = automaton.match();
             return py::make_tuple(match.length, match.end);
           })
      .def("propose", &propose, py::arg("min_match"), py::arg("max_nodes"), py::arg("max_depth"),
           py::arg("branches"))
      .def("memory", &SuffixAutomaton::memory)
      .def("__len__", &SuffixAutomaton::size);
}

}  // namespace specdec::python
