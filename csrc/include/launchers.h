// The launchers of all ops: raw device pointers, sizes, a workspace where one is needed, and the stream.
// None allocates or synchronises; each returns cudaGetLastError() after its launches.
// `n` points to one int64 on the device: the number of valid leading rows. Rows beyond it may hold anything.
// `id_bytes` is 4 or 8: the width of the ids.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace zgcompile {

size_t compact_workspace(int64_t length);
cudaError_t compact(const uint8_t* flags, const int64_t* n, int64_t length, int64_t cap, int64_t* positions,
                    int64_t* count, void* workspace, cudaStream_t stream);

size_t repeat_interleave_workspace(int64_t length);
cudaError_t repeat_interleave(const void* repeats, int id_bytes, const int64_t* n, int64_t length, int64_t cap,
                              void* index, int64_t* total, void* workspace, cudaStream_t stream);

size_t unique_workspace(int64_t bound);
// `counts` may be null.
cudaError_t unique(const void* ids, int id_bytes, const int64_t* n, int64_t length, int64_t bound, int64_t cap,
                   void* values, int64_t* inverse, int64_t* counts, int64_t* count, bool* in_bound, void* workspace,
                   cudaStream_t stream);

constexpr int kConcatLimit = 128;
// `pieces` and `lengths` are host arrays of k <= kConcatLimit entries, read before the call returns; `counts` is on the
// device.
cudaError_t concat(const void* const* pieces, const int64_t* lengths, int k, const int64_t* counts, int64_t cap,
                   int64_t row_bytes, void* out, cudaStream_t stream);

enum class Dtype : int { kFloat32, kFloat64, kBfloat16, kFloat16, kInt32, kInt64 };
// `width` elements a row.
cudaError_t index_add(const void* index, int id_bytes, const void* source, Dtype dtype, const int64_t* n,
                      int64_t length, int64_t rows, int64_t width, void* out, cudaStream_t stream);

cudaError_t index_put(const void* self, int64_t rows, const void* index, int id_bytes, const void* values,
                      const int64_t* n, int64_t length, int64_t row_bytes, void* out, cudaStream_t stream);

// `words` holds 2 x ceil(length / 16) bytes.
cudaError_t pack_bits(const uint8_t* flags, int64_t length, void* words, cudaStream_t stream);

// `launch` points to {launch id, address of a host-mapped record of 1 + size int64, or 0}; `published` to 2 int64, the
// launch id and whether the first `checks` words of the metadata are all zero.
cudaError_t publish(const int64_t* metadata, int64_t size, int64_t checks, const int64_t* launch,
                    int64_t* published, cudaStream_t stream);

}  // namespace zgcompile
