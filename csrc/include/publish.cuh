// publish: one block copies the metadata buffer to host-mapped memory and writes the launch id last, so that a host
// that sees the id sees the rest. The gate of the step's writes is made of the same words in the same pass.
#pragma once

#include <cstdint>

namespace zgcompile {

constexpr int kPublishThreads = 128;

// launch: {launch id, address of the record}; record: {launch id, metadata[0 .. size)}; published: {launch id, whether
// metadata[0 .. checks) are all zero}.
__global__ void zg_publish(const int64_t* __restrict__ metadata, int64_t size, int64_t checks,
                           const int64_t* __restrict__ launch, int64_t* __restrict__ published) {
  volatile int64_t* record = reinterpret_cast<volatile int64_t*>(launch[1]);
  const int64_t id = launch[0];
  int failed = 0;
  for (int64_t i = threadIdx.x; i < size; i += kPublishThreads) {
    const int64_t word = metadata[i];
    if (i < checks && word != 0) failed = 1;
    if (record != nullptr) record[1 + i] = word;
  }
  if (record != nullptr) __threadfence_system();
  failed = __syncthreads_or(failed);
  if (threadIdx.x == 0) {
    if (record != nullptr) record[0] = id;
    published[0] = id;
    published[1] = failed == 0;
  }
}

}  // namespace zgcompile
