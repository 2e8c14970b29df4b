# The libraries of torch operators: schemas and checks are the same files in each, backend_*.cpp makes the difference.
# Wants TORCH_DIR, and TORCH_CUDA where torch has CUDA.

# specdec_operators(TARGET FILE NAMESPACE KEY SOURCE...): FILE.so with the operators of one backend.
function(specdec_operators target file namespace key)
  list(TRANSFORM ARGN PREPEND csrc/torch/)
  add_library(${target} MODULE EXCLUDE_FROM_ALL csrc/torch/acceptance.cpp csrc/torch/attention.cpp csrc/torch/conv.cpp csrc/torch/layer.cpp
    csrc/torch/prefill.cpp csrc/torch/recurrence.cpp csrc/torch/views.cpp ${ARGN})
  # Target 2.11: the binary serves that torch and every later one.
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000
    SPECDEC_NAMESPACE=${namespace} SPECDEC_DISPATCH_KEY=${key})
  target_include_directories(${target} SYSTEM PRIVATE "${TORCH_DIR}/include")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  target_link_directories(${target} PRIVATE "${TORCH_DIR}/lib")
  target_link_libraries(${target} PRIVATE torch_cpu)
  set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME ${file} LIBRARY_OUTPUT_DIRECTORY "${SPECDEC_LIBRARY_DIR}"
                        BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
endfunction()

if(SPECDEC_TORCH)
  specdec_operators(specdec_ops libspecdec_cpu specdec CPU backend_cpu.cpp library.cpp block.cpp dense.cpp draft_children.cpp
    draft_step.cpp draft_tree.cpp isa.cpp stack.cpp)
  target_link_libraries(specdec_ops PRIVATE specdec_cpu)
  set_target_properties(specdec_ops PROPERTIES EXCLUDE_FROM_ALL OFF)
endif()

# Loaded after the CPU library, which has the schemas, and only where torch has CUDA.
if(SPECDEC_TORCH AND SPECDEC_CUDA_ENABLED)
  specdec_operators(specdec_ops_cuda libspecdec_cuda specdec CUDA backend_cuda.cpp)
  target_compile_definitions(specdec_ops_cuda PRIVATE USE_CUDA)
  find_package(CUDAToolkit REQUIRED)
  # torch's stream is asked for by a function of libtorch_cuda, which a CPU build of torch lacks: it is found through
  # libtorch, which needs it where it exists.
  target_link_libraries(specdec_ops_cuda PRIVATE specdec_kernels_cuda CUDA::cudart_static -Wl,--no-as-needed torch)
  if(SPECDEC_CUDA STREQUAL AUTO AND NOT TORCH_CUDA)
    message(STATUS "CUDA operators: not built, this torch has no CUDA (-DSPECDEC_CUDA=ON builds them all the same)")
  else()
    set_target_properties(specdec_ops_cuda PROPERTIES EXCLUDE_FROM_ALL OFF)
    message(STATUS "CUDA operators: built for ${CMAKE_CUDA_ARCHITECTURES}; set SPECDEC_CUDA=OFF to leave them out")
  endif()
endif()

# For the tests alone: the CUDA kernels through the executor, on tensors of the CPU.
if(SPECDEC_TESTS)
  specdec_operators(specdec_ops_simt libspecdec_simt specdec_simt CPU backend_simt.cpp simt_memory.cpp library.cpp)
  target_link_libraries(specdec_ops_simt PRIVATE specdec_kernels_simt)
  set_target_properties(specdec_ops_simt PROPERTIES EXCLUDE_FROM_ALL OFF LIBRARY_OUTPUT_DIRECTORY "${CMAKE_SOURCE_DIR}/build/lib")
endif()
