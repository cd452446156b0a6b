// Sorted unique of ids below a bound, without a sort. Word w of the table holds the marks of ids [32w, 32w + 32) and
// the rank of the first of them; an id's rank is that plus the marks below its own.
#pragma once

#include <cub/block/block_scan.cuh>
#include <cuda/atomic>

#include "block_sum.cuh"
#include "bytes.cuh"
#include "rows.cuh"

namespace zgcompile {

constexpr int kUniqueThreads = 256;
constexpr int kUniqueRankThreads = 128;                // one word a thread
constexpr int kUniqueChunk = kUniqueRankThreads * 32;  // ids
// Each tile of the ranking reads what all tiles before it published, so there are few: larger bounds have longer tiles.
constexpr int kUniqueTiles = 1024;

// Head of the workspace; the table follows. All of it is zero when marking starts.
struct UniqueState {
  uint32_t out_of_bound;  // 1 once an id was outside [0, bound)
  uint32_t padding[3];
  uint32_t published[kUniqueTiles];  // marks in the tile, plus 1; 0 until known
};
static_assert(sizeof(UniqueState) % 16 == 0, "the table is cleared in units of 16 bytes");

__global__ void __launch_bounds__(kUniqueThreads) zg_unique_clear(void* workspace, int64_t bytes) {
  clear_bytes(workspace, bytes);
}

template <typename Id>
__global__ void __launch_bounds__(kUniqueThreads)
    zg_unique_mark(const Id* ids, const int64_t* n, int64_t length, int64_t bound, UniqueState* state, uint2* table) {
  const int64_t rows = valid_rows(n, length);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kUniqueThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kUniqueThreads + threadIdx.x; i < rows; i += stride) {
    const int64_t id = ids[i];
    if (id < 0 || id >= bound) {
      state->out_of_bound = 1;
      continue;
    }
    uint32_t* word = &table[id >> 5].x;
    const uint32_t mark = 1u << (id & 31);
    // Popular ids would queue up at one address; most of their marks are there already. A stale read costs an atomic.
    if ((__ldcg(word) & mark) == 0) atomicOr(word, mark);
  }
}

// One block a tile. A tile waits for tiles of lower index only, and blocks start in the order of their index.
template <typename Id>
__global__ void __launch_bounds__(kUniqueRankThreads)
    zg_unique_rank(UniqueState* state, uint2* table, int64_t words, int64_t tile_words, int64_t cap, Id* values,
                   int64_t* counts, int64_t* count, bool* in_bound) {
  using Scan = cub::BlockScan<int, kUniqueRankThreads>;
  using Published = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ uint16_t marked[kUniqueChunk];  // offsets in the chunk, packed: the stores below are then coalesced

  const int64_t begin = blockIdx.x * tile_words;
  const int64_t end = min(begin + tile_words, words);
  int64_t own = 0;
  for (int64_t w = begin + threadIdx.x; w < end; w += kUniqueRankThreads) own += __popc(table[w].x);
  own = block_sum<kUniqueRankThreads>(own);
  if (threadIdx.x == 0) {
    Published(state->published[blockIdx.x]).store(static_cast<uint32_t>(own) + 1, cuda::memory_order_relaxed);
  }
  int64_t before = 0;
  for (unsigned j = threadIdx.x; j < blockIdx.x; j += kUniqueRankThreads) {
    uint32_t published;
    do {
      published = Published(state->published[j]).load(cuda::memory_order_relaxed);
    } while (published == 0);
    before += published - 1;
  }
  int64_t rank = block_sum<kUniqueRankThreads>(before);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    *count = rank + own;
    *in_bound = state->out_of_bound == 0;
  }

  for (int64_t chunk = begin; chunk < end; chunk += kUniqueRankThreads) {
    const int64_t w = chunk + threadIdx.x;
    uint32_t marks = w < end ? table[w].x : 0;
    int slot, chunk_total;
    Scan(storage).ExclusiveSum(__popc(marks), slot, chunk_total);
    if (w < end) table[w].y = static_cast<uint32_t>(rank + slot);
    for (; marks != 0; marks &= marks - 1) marked[slot++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(marks) - 1);
    __syncthreads();
    for (int j = threadIdx.x; j < chunk_total; j += kUniqueRankThreads) {
      if (rank + j < cap) {
        values[rank + j] = static_cast<Id>(chunk * 32 + marked[j]);
        if (counts != nullptr) counts[rank + j] = 0;
      }
    }
    rank += chunk_total;
    __syncthreads();  // the next chunk reuses the scan storage and `marked`
  }
}

template <typename Id>
__global__ void __launch_bounds__(kUniqueThreads)
    zg_unique_inverse(const Id* ids, const int64_t* n, int64_t length, int64_t bound, int64_t cap, const uint2* table,
                      const int64_t* count, Id* values, int64_t* counts, int64_t* inverse) {
  const int64_t rows = valid_rows(n, length);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kUniqueThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kUniqueThreads;
  for (int64_t i = first; i < length; i += stride) {
    int64_t rank = 0;
    if (i < rows) {
      const int64_t id = ids[i];
      if (id >= 0 && id < bound) {
        const uint2 word = table[id >> 5];
        rank = static_cast<int64_t>(word.y) + __popc(word.x & ((1u << (id & 31)) - 1));
        if (rank < cap) {
          if (counts != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(counts + rank), 1ull);
        } else {
          rank = max(cap - 1, int64_t{0});
        }
      }
    }
    inverse[i] = rank;
  }
  for (int64_t i = *count + first; i < cap; i += stride) {
    values[i] = 0;
    if (counts != nullptr) counts[i] = 0;
  }
}

}  // namespace zgcompile
