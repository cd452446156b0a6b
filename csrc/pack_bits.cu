#include "launchers.h"
#include "pack_bits.cuh"

namespace zgcompile {

cudaError_t pack_bits(const uint8_t* flags, int64_t length, void* words, cudaStream_t stream) {
  if (length == 0) return cudaSuccess;
  const bool aligned = reinterpret_cast<uintptr_t>(flags) % 16 == 0;
  const unsigned blocks = grid_blocks(ceil_div(length, kFlags), kPackThreads);
  zg_pack_bits<<<blocks, kPackThreads, 0, stream>>>(flags, aligned, length, static_cast<uint16_t*>(words));
  return cudaGetLastError();
}

}  // namespace zgcompile
