// The parts of the host-side module; each binds one header.
#pragma once

#include <pybind11/pybind11.h>

namespace specdec::python {

void bind_tree(pybind11::module_& module);
void bind_suffix_automaton(pybind11::module_& module);

}  // namespace specdec::python
