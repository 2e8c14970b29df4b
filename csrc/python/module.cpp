// specdec._lib._host: host-side structures of the Python package. Wrapped by specdec/tree.py and
// specdec/drafters.
#include "bindings.h"

PYBIND11_MODULE(_host, module) {
  specdec::python::bind_tree(module);
  specdec::python::bind_suffix_automaton(module);
}
