#include "launchers.h"
#include "publish.cuh"

namespace zgcompile {

cudaError_t publish(const int64_t* metadata, int64_t size, int64_t checks, const int64_t* launch,
                    int64_t* published, cudaStream_t stream) {
  zg_publish<<<1, kPublishThreads, 0, stream>>>(metadata, size, checks, launch, published);
  return cudaGetLastError();
}

}  // namespace zgcompile
