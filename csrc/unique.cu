#include "launchers.h"
#include "unique.cuh"

namespace zgcompile {
namespace {

int64_t words_of(int64_t bound) { return ceil_div(bound, 32); }

int64_t tile_words_of(int64_t words) {
  return ceil_div(std::max<int64_t>(words, 1), int64_t{kUniqueTiles} * kUniqueRankThreads) * kUniqueRankThreads;
}

template <typename Id>
void launch(const Id* ids, const int64_t* n, int64_t length, int64_t bound, int64_t cap, Id* values, int64_t* inverse,
            int64_t* counts, int64_t* count, bool* in_bound, void* workspace, cudaStream_t stream) {
  const auto bytes = static_cast<int64_t>(unique_workspace(bound));
  zg_unique_clear<<<grid_blocks(bytes, 16 * kUniqueThreads), kUniqueThreads, 0, stream>>>(workspace, bytes);

  auto* state = static_cast<UniqueState*>(workspace);
  auto* table = reinterpret_cast<uint2*>(state + 1);
  zg_unique_mark<Id>
      <<<grid_blocks(length, kUniqueThreads), kUniqueThreads, 0, stream>>>(ids, n, length, bound, state, table);

  const int64_t words = words_of(bound);
  const int64_t tile_words = tile_words_of(words);
  const auto tiles = static_cast<unsigned>(std::max<int64_t>(ceil_div(words, tile_words), 1));
  zg_unique_rank<Id>
      <<<tiles, kUniqueRankThreads, 0, stream>>>(state, table, words, tile_words, cap, values, counts, count, in_bound);
  zg_unique_inverse<Id><<<grid_blocks(std::max(length, cap), kUniqueThreads), kUniqueThreads, 0, stream>>>(
      ids, n, length, bound, cap, table, count, values, counts, inverse);
}

}  // namespace

size_t unique_workspace(int64_t bound) {
  return ceil_div(sizeof(UniqueState) + words_of(bound) * sizeof(uint2), 16) * 16;
}

cudaError_t unique(const void* ids, int id_bytes, const int64_t* n, int64_t length, int64_t bound, int64_t cap,
                   void* values, int64_t* inverse, int64_t* counts, int64_t* count, bool* in_bound, void* workspace,
                   cudaStream_t stream) {
  if (id_bytes == 4) {
    launch(static_cast<const int32_t*>(ids), n, length, bound, cap, static_cast<int32_t*>(values), inverse, counts,
           count, in_bound, workspace, stream);
  } else {
    launch(static_cast<const int64_t*>(ids), n, length, bound, cap, static_cast<int64_t*>(values), inverse, counts,
           count, in_bound, workspace, stream);
  }
  return cudaGetLastError();
}

}  // namespace zgcompile
