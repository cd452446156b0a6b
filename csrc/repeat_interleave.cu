#include "launchers.h"
#include "repeat_interleave.cuh"

namespace zgcompile {
namespace {

int64_t tile_rows_of(int64_t length) {
  return ceil_div(std::max<int64_t>(length, 1), kRepeatTiles * kRepeatChunk) * kRepeatChunk;
}

int64_t tiles_of(int64_t length) { return std::max<int64_t>(ceil_div(length, tile_rows_of(length)), 1); }

template <typename Id>
void launch(const void* repeats, const int64_t* n, int64_t length, int64_t cap, void* index, int64_t* total,
            void* workspace, cudaStream_t stream) {
  const int64_t tile_rows = tile_rows_of(length);
  const int tiles = static_cast<int>(tiles_of(length));
  auto* tile_sums = static_cast<int64_t*>(workspace);
  auto* tile_negative = reinterpret_cast<int*>(tile_sums + tiles);
  zg_repeat_interleave_sum<Id><<<tiles, kRepeatThreads, 0, stream>>>(static_cast<const Id*>(repeats), n, length,
                                                                     tile_rows, tile_sums, tile_negative);
  const auto blocks = static_cast<unsigned>(tiles + ceil_div(cap, kRepeatOutputs));
  zg_repeat_interleave_emit<Id><<<blocks, kRepeatThreads, 0, stream>>>(static_cast<const Id*>(repeats), n, length,
                                                                       tile_rows, tiles, tile_sums, tile_negative, cap,
                                                                       static_cast<Id*>(index), total);
}

}  // namespace

size_t repeat_interleave_workspace(int64_t length) { return tiles_of(length) * (sizeof(int64_t) + sizeof(int)); }

cudaError_t repeat_interleave(const void* repeats, int id_bytes, const int64_t* n, int64_t length, int64_t cap,
                              void* index, int64_t* total, void* workspace, cudaStream_t stream) {
  if (id_bytes == 4) {
    launch<int32_t>(repeats, n, length, cap, index, total, workspace, stream);
  } else {
    launch<int64_t>(repeats, n, length, cap, index, total, workspace, stream);
  }
  return cudaGetLastError();
}

}  // namespace zgcompile
