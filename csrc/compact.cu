#include "compact.cuh"
#include "launchers.h"

namespace zgcompile {
namespace {

int64_t tile_rows_of(int64_t length) {
  return ceil_div(std::max<int64_t>(length, 1), kCompactTiles * kCompactChunk) * kCompactChunk;
}

int64_t tiles_of(int64_t length) { return std::max<int64_t>(ceil_div(length, tile_rows_of(length)), 1); }

}  // namespace

size_t compact_workspace(int64_t length) { return tiles_of(length) * sizeof(int64_t); }

cudaError_t compact(const uint8_t* flags, const int64_t* n, int64_t length, int64_t cap, int64_t* positions,
                    int64_t* count, void* workspace, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(flags) % 16 == 0;
  const int64_t tile_rows = tile_rows_of(length);
  const int tiles = static_cast<int>(tiles_of(length));
  auto* tile_counts = static_cast<int64_t*>(workspace);
  zg_compact_count<<<tiles, kCompactThreads, 0, stream>>>(flags, aligned, n, length, tile_rows, tile_counts);
  const unsigned blocks = std::max<unsigned>(tiles, grid_blocks(cap, kCompactChunk));
  zg_compact_emit<<<blocks, kCompactThreads, 0, stream>>>(flags, aligned, n, length, tile_rows, tiles, tile_counts, cap,
                                                          positions, count);
  return cudaGetLastError();
}

}  // namespace zgcompile
