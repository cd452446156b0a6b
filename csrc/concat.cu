#include "bytes.cuh"
#include "concat.cuh"

namespace zgcompile {

cudaError_t concat(const void* const* pieces, const int64_t* lengths, int k, const int64_t* counts, int64_t cap,
                   int64_t row_bytes, void* out, cudaStream_t stream) {
  if (k < 1 || k > kConcatLimit) return cudaErrorInvalidValue;
  if (cap == 0 || row_bytes == 0) return cudaGetLastError();
  ConcatPieces table{};
  table.k = k;
  uintptr_t bits = static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(out);
  for (int j = 0; j < k; ++j) {
    table.rows[j] = pieces[j];
    table.lengths[j] = lengths[j];
    bits |= reinterpret_cast<uintptr_t>(pieces[j]);
  }
  with_unit(widest_unit(bits), [&](auto unit) {
    using Unit = decltype(unit);
    const int64_t units = row_bytes / sizeof(Unit);
    const dim3 block = row_block(units);
    zg_concat<Unit>
        <<<grid_blocks(cap, block.y), block, 0, stream>>>(table, counts, cap, units, static_cast<Unit*>(out));
  });
  return cudaGetLastError();
}

}  // namespace zgcompile
