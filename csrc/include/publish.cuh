// publish: one block copies the metadata buffer to host-mapped memory and writes the launch id last, so that a host
// that sees the id sees the rest.
#pragma once

#include <cstdint>

namespace zgcompile {

constexpr int kPublishThreads = 128;

// launch: {launch id, address of the record}; record: {launch id, metadata[0 .. size)}.
__global__ void zg_publish(const int64_t* __restrict__ metadata, int64_t size, const int64_t* __restrict__ launch,
                           int64_t* __restrict__ published) {
  volatile int64_t* record = reinterpret_cast<volatile int64_t*>(launch[1]);
  const int64_t id = launch[0];
  if (record != nullptr) {
    for (int64_t i = threadIdx.x; i < size; i += kPublishThreads) record[1 + i] = metadata[i];
    __threadfence_system();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (record != nullptr) record[0] = id;
    published[0] = id;
  }
}

}  // namespace zgcompile
