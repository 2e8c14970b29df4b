// Functions that kernels of every backend share.
#pragma once

// SPECDEC_SHARED_FUNCTION is never compiled by itself: a copy that the build for one instruction set left in
// its object file could be linked into the path of a machine without it. Members of a template that is given
// a type of the backend's have names of their own, SPECDEC_SHARED_MEMBER.
#ifdef __CUDACC__
#define SPECDEC_SHARED_FUNCTION __host__ __device__ __forceinline__
#define SPECDEC_SHARED_MEMBER __host__ __device__ __forceinline__
#else
#define SPECDEC_SHARED_FUNCTION inline __attribute__((always_inline))
#define SPECDEC_SHARED_MEMBER inline
#endif
