# CUTLASS_INCLUDE_DIR: where cute/tensor.hpp is. In the order of preference: CUTLASS_DIR (a checkout or an include
# directory; variable or environment), then the Python package nvidia-cutlass of Python_EXECUTABLE or python3.
set(SPECDEC_CUTLASS_HINT "pip install nvidia-cutlass==4.2.0.0")  # the Makefile says why this one
find_path(CUTLASS_INCLUDE_DIR cute/tensor.hpp
          HINTS "${CUTLASS_DIR}" "$ENV{CUTLASS_DIR}" PATH_SUFFIXES include source/include NO_DEFAULT_PATH)
if(NOT CUTLASS_INCLUDE_DIR)
  set(_cutlass_python "${Python_EXECUTABLE}")
  if(NOT _cutlass_python)
    find_program(_cutlass_python NAMES python3 python NO_CACHE)
  endif()
  execute_process(
    COMMAND "${_cutlass_python}" -c
            "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
    OUTPUT_VARIABLE _cutlass_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _cutlass_missing)
  if(NOT _cutlass_missing)
    find_path(CUTLASS_INCLUDE_DIR cute/tensor.hpp HINTS "${_cutlass_package}" PATH_SUFFIXES source/include NO_DEFAULT_PATH)
  endif()
endif()
mark_as_advanced(CUTLASS_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUTLASS REQUIRED_VARS CUTLASS_INCLUDE_DIR
                                  REASON_FAILURE_MESSAGE "set CUTLASS_DIR or ${SPECDEC_CUTLASS_HINT}")
if(CUTLASS_FOUND AND NOT TARGET CUTLASS::CUTLASS)
  add_library(CUTLASS::CUTLASS INTERFACE IMPORTED)
  set_target_properties(CUTLASS::CUTLASS PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${CUTLASS_INCLUDE_DIR}")
endif()
