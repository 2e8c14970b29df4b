// Functions that kernels of every backend share.
#pragma once

#ifdef __CUDACC__
#define SPECDEC_SHARED_FUNCTION __host__ __device__ __forceinline__
#else
#define SPECDEC_SHARED_FUNCTION inline
#endif
