// Positions of the True flags: one launch counts each tile, the next ranks and writes. No tile waits for another.
#pragma once

#include <cub/block/block_scan.cuh>

#include "block_sum.cuh"
#include "flags.cuh"
#include "rows.cuh"

namespace zgcompile {

constexpr int kCompactThreads = 256;
constexpr int kCompactChunk = kCompactThreads * kFlags;
// Every block of the second launch reads all tile counts, so there are few: longer inputs have longer tiles.
constexpr int64_t kCompactTiles = 1024;

// One block a tile.
__global__ void __launch_bounds__(kCompactThreads)
    zg_compact_count(const uint8_t* flags, bool aligned, const int64_t* n, int64_t length, int64_t tile_rows,
                     int64_t* tile_counts) {
  const int64_t begin = blockIdx.x * tile_rows;
  const int64_t end = min(begin + tile_rows, valid_rows(n, length));
  int64_t own = 0;
  for (int64_t row = begin + threadIdx.x * kFlags; row < end; row += kCompactChunk) {
    own += __popc(load_flags(flags, row, end, aligned));
  }
  const int64_t sum = block_sum<kCompactThreads>(own);
  if (threadIdx.x == 0) tile_counts[blockIdx.x] = sum;
}

// One block a tile; further blocks help with the pads.
__global__ void __launch_bounds__(kCompactThreads)
    zg_compact_emit(const uint8_t* flags, bool aligned, const int64_t* n, int64_t length, int64_t tile_rows, int tiles,
                    const int64_t* tile_counts, int64_t cap, int64_t* positions, int64_t* count) {
  using Scan = cub::BlockScan<int, kCompactThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ uint16_t kept[kCompactChunk];  // offsets in the chunk, packed: the stores below are then coalesced

  int64_t before = 0, all = 0;
  for (int j = threadIdx.x; j < tiles; j += kCompactThreads) {
    const int64_t tile_count = tile_counts[j];
    all += tile_count;
    if (j < blockIdx.x) before += tile_count;
  }
  int64_t rank = block_sum<kCompactThreads>(before);
  const int64_t total = block_sum<kCompactThreads>(all);
  if (blockIdx.x == 0 && threadIdx.x == 0) *count = total;

  const int64_t begin = blockIdx.x * tile_rows;
  const int64_t end = blockIdx.x < tiles ? min(begin + tile_rows, valid_rows(n, length)) : 0;
  for (int64_t chunk = begin; chunk < end && rank < cap; chunk += kCompactChunk) {
    const int offset = threadIdx.x * kFlags;
    unsigned bits = chunk + offset < end ? load_flags(flags, chunk + offset, end, aligned) : 0;
    int slot, chunk_total;
    Scan(storage).ExclusiveSum(__popc(bits), slot, chunk_total);
    for (; bits != 0; bits &= bits - 1) kept[slot++] = static_cast<uint16_t>(offset + __ffs(bits) - 1);
    __syncthreads();
    for (int j = threadIdx.x; j < chunk_total; j += kCompactThreads) {
      if (rank + j < cap) positions[rank + j] = chunk + kept[j];
    }
    rank += chunk_total;
    __syncthreads();  // the next chunk reuses the scan storage and `kept`
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCompactThreads;
  for (int64_t j = total + static_cast<int64_t>(blockIdx.x) * kCompactThreads + threadIdx.x; j < cap; j += stride) {
    positions[j] = 0;
  }
}

}  // namespace zgcompile
