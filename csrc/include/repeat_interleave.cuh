// Row i, repeats[i] times: one launch sums each tile of rows, the next writes. A tile with many outputs is shared by
// several blocks and an empty one costs none, so neither a heavy row nor a long run of zeros makes one block late.
#pragma once

#include <cub/block/block_scan.cuh>

#include "block_sum.cuh"
#include "rows.cuh"

namespace zgcompile {

constexpr int kRepeatThreads = 256;
constexpr int kRepeatItems = 4;
constexpr int kRepeatChunk = kRepeatThreads * kRepeatItems;
// Each block of the second launch scans all tile sums, kRepeatItems a thread.
constexpr int kRepeatTiles = kRepeatThreads * kRepeatItems;
constexpr int64_t kRepeatOutputs = 2048;  // a block, at most

// One block a tile. A negative repeat counts as 0 and marks its tile.
template <typename Id>
__global__ void __launch_bounds__(kRepeatThreads)
    zg_repeat_interleave_sum(const Id* repeats, const int64_t* n, int64_t length, int64_t tile_rows, int64_t* tile_sums,
                             int* tile_negative) {
  const int64_t begin = blockIdx.x * tile_rows;
  const int64_t end = min(begin + tile_rows, valid_rows(n, length));
  int64_t own = 0;
  bool negative = false;
  for (int64_t row = begin + threadIdx.x; row < end; row += kRepeatThreads) {
    const int64_t repeat = repeats[row];
    negative |= repeat < 0;
    own += repeat < 0 ? 0 : repeat;
  }
  const int64_t sum = block_sum<kRepeatThreads>(own);
  const int any = __syncthreads_or(negative);
  if (threadIdx.x == 0) {
    tile_sums[blockIdx.x] = sum;
    tile_negative[blockIdx.x] = any;
  }
}

// Needs tiles + ceil(cap / kRepeatOutputs) blocks: a tile with s outputs below `cap` takes ceil(s / kRepeatOutputs).
template <typename Id>
__global__ void __launch_bounds__(kRepeatThreads)
    zg_repeat_interleave_emit(const Id* repeats, const int64_t* n, int64_t length, int64_t tile_rows, int tiles,
                              const int64_t* tile_sums, const int* tile_negative, int64_t cap, Id* index,
                              int64_t* total_out) {
  using Scan = cub::BlockScan<int64_t, kRepeatThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int64_t starts[kRepeatTiles + 1];       // first output of each tile
  __shared__ int64_t first_block[kRepeatTiles + 1];  // first block of each tile
  __shared__ int64_t ends[kRepeatChunk];             // running sums of one chunk of rows

  const int lane = threadIdx.x * kRepeatItems;
  int64_t items[kRepeatItems];
  for (int j = 0; j < kRepeatItems; ++j) items[j] = lane + j < tiles ? tile_sums[lane + j] : 0;
  int64_t total;
  Scan(storage).ExclusiveSum(items, items, total);
  for (int j = 0; j < kRepeatItems; ++j) starts[lane + j] = items[j];
  if (threadIdx.x == 0) starts[kRepeatTiles] = total;
  __syncthreads();
  for (int j = 0; j < kRepeatItems; ++j) {
    const int64_t outputs = min(starts[lane + j + 1], cap) - starts[lane + j];
    items[j] = outputs > 0 ? (outputs + kRepeatOutputs - 1) / kRepeatOutputs : 0;
  }
  int64_t blocks;
  Scan(storage).ExclusiveSum(items, items, blocks);
  for (int j = 0; j < kRepeatItems; ++j) first_block[lane + j] = items[j];
  __syncthreads();

  if (blockIdx.x == 0) {
    bool negative = false;
    for (int j = threadIdx.x; j < tiles; j += kRepeatThreads) negative |= tile_negative[j] != 0;
    const int any = __syncthreads_or(negative);
    if (threadIdx.x == 0) *total_out = any ? -1 : total;
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRepeatThreads;
  for (int64_t o = max(total, int64_t{0}) + static_cast<int64_t>(blockIdx.x) * kRepeatThreads + threadIdx.x; o < cap;
       o += stride) {
    index[o] = 0;
  }
  if (blockIdx.x >= blocks) return;

  const int tile = upper_bound(first_block, kRepeatTiles, static_cast<int64_t>(blockIdx.x)) - 1;
  const int64_t part = blockIdx.x - first_block[tile];
  const int64_t first = starts[tile] + part * kRepeatOutputs;
  const int64_t last = min(min(first + kRepeatOutputs, starts[tile + 1]), cap);
  const int64_t end = min((tile + 1) * tile_rows, valid_rows(n, length));
  int64_t base = starts[tile];
  for (int64_t chunk = tile * tile_rows; chunk < end && base < last; chunk += kRepeatChunk) {
    for (int j = 0; j < kRepeatItems; ++j) {
      const int64_t row = chunk + lane + j;
      const int64_t repeat = row < end ? static_cast<int64_t>(repeats[row]) : 0;
      items[j] = repeat < 0 ? 0 : repeat;
    }
    int64_t chunk_total;
    Scan(storage).InclusiveSum(items, items, chunk_total);
    for (int j = 0; j < kRepeatItems; ++j) ends[lane + j] = items[j];
    __syncthreads();
    const int64_t stop = min(last, base + chunk_total);
    for (int64_t o = max(first, base) + threadIdx.x; o < stop; o += kRepeatThreads) {
      index[o] = static_cast<Id>(chunk + upper_bound(ends, kRepeatChunk, o - base));
    }
    base += chunk_total;
    __syncthreads();  // the next chunk reuses the scan storage and `ends`
  }
}

}  // namespace zgcompile
