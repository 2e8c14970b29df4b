// How functions are declared that host and device code have in common.
#pragma once

// SPECDEC_COMMON_FUNCTION is never compiled by itself: a copy that the build for one instruction set left in
// its object file could be linked into the path of a machine without it. Members of a template that is given
// a type of the backend's have names of their own, SPECDEC_COMMON_MEMBER.
#ifdef __CUDACC__
#define SPECDEC_COMMON_FUNCTION __host__ __device__ __forceinline__
#define SPECDEC_COMMON_MEMBER __host__ __device__ __forceinline__
#else
#define SPECDEC_COMMON_FUNCTION inline __attribute__((always_inline))
#define SPECDEC_COMMON_MEMBER inline
#endif
