// out[index[i]] += source[i], with the widest atomics that rows and hardware allow.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bytes.cuh"
#include "rows.cuh"

namespace zgcompile {

__device__ __forceinline__ void add(float* out, float value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(double* out, double value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(int32_t* out, int32_t value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(int64_t* out, int64_t value) {
  // Two's complement: the unsigned sum has the same bits.
  atomicAdd(reinterpret_cast<unsigned long long*>(out), static_cast<unsigned long long>(value));
}
__device__ __forceinline__ void add(__half* out, __half value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(__half2* out, __half2 value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(__nv_bfloat16* out, __nv_bfloat16 value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(__nv_bfloat162* out, __nv_bfloat162 value) { atomicAdd(out, value); }
__device__ __forceinline__ void add(float2* out, float2 value) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(out, value);
#else
  atomicAdd(&out->x, value.x);
  atomicAdd(&out->y, value.y);
#endif
}
__device__ __forceinline__ void add(float4* out, float4 value) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(out, value);
#else
  atomicAdd(&out->x, value.x);
  atomicAdd(&out->y, value.y);
  atomicAdd(&out->z, value.z);
  atomicAdd(&out->w, value.w);
#endif
}

__global__ void __launch_bounds__(kRowThreads) zg_index_add_clear(void* out, int64_t bytes) { clear_bytes(out, bytes); }

// Unit: what one thread adds; `units` of them make a row. Blocks as by row_block(units).
template <typename Unit, typename Id>
__global__ void __launch_bounds__(kRowThreads)
    zg_index_add_rows(const Id* index, const Unit* source, const int64_t* n, int64_t length, int64_t rows,
                      int64_t units, Unit* out) {
  const int64_t valid = valid_rows(n, length);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < valid; i += stride) {
    const int64_t row = index[i];
    if (row < 0 || row >= rows) continue;
    const Unit* from = source + i * units;
    Unit* to = out + row * units;
    for (int64_t u = threadIdx.x; u < units; u += blockDim.x) add(to + u, from[u]);
  }
}

}  // namespace zgcompile
