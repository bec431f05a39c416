#include "fetch_chunks.cuh"

#include "kernels/common/checks.h"

namespace shadowkv {

static void check_counts(const Tensor& counts, int64_t bucket_bits) {
  check(counts, "counts", Dtype::Int, {int64_t(sizeof(MissCounts) / 4)});
  STD_TORCH_CHECK(-1 <= bucket_bits && bucket_bits < 64, "buckets of 2**", bucket_bits, " bytes");
}

void find_missing_chunks(
    const Tensor host, const Tensor pages, const Tensor slots, const Tensor selected, Tensor rows, Tensor owner,
    Tensor entry, Tensor used, Tensor step, Tensor counters, Tensor misses, Tensor counts, int64_t bucket_bits,
    Tensor entries) {
  check_dense(host, "host", Dtype::Byte, {-1, -1, -1, -1, -1}, 1);
  check_aligned(address(host) | bytes_apart(host), "host", 16);
  const int64_t heads = host.size(1), row_bytes = host.size(3) * host.size(4);
  STD_TORCH_CHECK(row_bytes % 16 == 0, "host has chunks of ", row_bytes, " bytes, no multiple of 16");
  check_dense(selected, "selected", Dtype::Long, {-1, heads, -1});
  const int64_t batch = selected.size(0), k = selected.size(2);
  check_dense(pages, "pages", Dtype::Long, {batch, -1}, 1);
  check_dense(slots, "slots", Dtype::Long, {batch});
  check_dense(rows, "rows", Dtype::Byte, {-1, heads, -1, host.size(3), host.size(4)});
  check_aligned(address(rows), "rows", 16);
  const int64_t num_slots = rows.size(0), capacity = rows.size(2);
  STD_TORCH_CHECK(
      k <= capacity && capacity <= kMostEntries, capacity, " entries, not between ", k, " and ", kMostEntries);
  check_dense(owner, "owner", Dtype::Int, {num_slots, heads, capacity});
  check_dense(entry, "entry", Dtype::Short, {num_slots, heads, -1});
  check_dense(used, "used", Dtype::Int, {num_slots, heads, capacity});
  check_dense(step, "step", Dtype::Int, {num_slots, heads});
  check_dense(counters, "counters", Dtype::Long, {2});
  check_dense(misses, "misses", Dtype::Long, {bucket_bits < 0 ? 1 : 2, batch * heads * k, 2});
  check_counts(counts, bucket_bits);
  check_dense(entries, "entries", Dtype::Long, {batch, heads, k});
  STD_TORCH_CHECK(
      batch * heads * k * (row_bytes / 16) < int64_t(1) << 31, batch * heads * k, " chunks of ", row_bytes,
      " bytes are 32 GiB or more");
  if (batch * heads * k == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(selected.get_device());
  FindMisses p{};
  p.host = static_cast<const uint8_t*>(host.const_data_ptr());
  p.page_stride = host.stride(0);
  p.pages = static_cast<const int64_t*>(pages.const_data_ptr());
  p.pages_stride = pages.stride(0);
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.selected = static_cast<const int64_t*>(selected.const_data_ptr());
  p.rows = static_cast<uint8_t*>(rows.mutable_data_ptr());
  p.owner = static_cast<int32_t*>(owner.mutable_data_ptr());
  p.entry = static_cast<int16_t*>(entry.mutable_data_ptr());
  p.used = static_cast<int32_t*>(used.mutable_data_ptr());
  p.step = static_cast<int32_t*>(step.mutable_data_ptr());
  p.counters = static_cast<unsigned long long*>(counters.mutable_data_ptr());
  p.misses = static_cast<Miss*>(misses.mutable_data_ptr());
  p.counts = static_cast<MissCounts*>(counts.mutable_data_ptr());
  p.entries = static_cast<int64_t*>(entries.mutable_data_ptr());
  p.row_bytes = row_bytes;
  p.heads = int(heads), p.k = int(k), p.capacity = int(capacity), p.chunks = int(entry.size(2));
  p.chunks_of_page = int(host.size(2)), p.bucket_bits = int(bucket_bits);

  const cudaStream_t stream = current_stream(selected);
  const int bytes = int(find_misses_bytes(capacity, k));
  const cudaError_t error = cudaFuncSetAttribute(find_misses_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  STD_TORCH_CHECK(
      error == cudaSuccess, capacity, " entries and ", k, " chunks do not fit in shared memory: ",
      cudaGetErrorString(error));
  // Not a memset: in a graph it took 9 us, with equally long gaps on either side, while other chunks were copied.
  clear_counts_kernel<<<1, kBuckets, 0, stream>>>(p.counts);
  find_misses_kernel<<<unsigned(batch * heads), kFindThreads, bytes, stream>>>(p);
  check_launch("fetch_chunks");
}

void copy_missing_chunks(Tensor misses, Tensor counts, int64_t bucket_bits, Tensor rows, int64_t blocks) {
  check_dense(misses, "misses", Dtype::Long, {bucket_bits < 0 ? 1 : 2, -1, 2});
  check_counts(counts, bucket_bits);
  check(rows, "rows", Dtype::Byte, {-1, -1, -1, -1, -1});
  const int64_t row_bytes = rows.size(3) * rows.size(4);
  STD_TORCH_CHECK(row_bytes % 16 == 0, "chunks have ", row_bytes, " bytes, no multiple of 16");
  STD_TORCH_CHECK(0 < blocks && blocks <= 1024, blocks, " blocks, not between 1 and 1024");
  if (misses.size(1) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(misses.get_device());
  const cudaStream_t stream = current_stream(misses);
  Miss *unsorted = static_cast<Miss*>(misses.mutable_data_ptr()), *sorted = unsorted + misses.size(1);
  MissCounts* of_all = static_cast<MissCounts*>(counts.mutable_data_ptr());
  const uint32_t row = uint32_t(row_bytes / 16);
  if (bucket_bits < 0) {
    copy_misses_kernel<false><<<unsigned(blocks), kCopyThreads, 0, stream>>>(unsorted, of_all, row);
  } else {
    sort_misses_kernel<<<kSortBlocks, kBuckets, 0, stream>>>(unsorted, of_all, int(bucket_bits), sorted);
    copy_misses_kernel<true><<<unsigned(blocks), kOrderedThreads, 0, stream>>>(sorted, of_all, row);
  }
  check_launch("fetch_chunks's copies");
}

} // namespace shadowkv

STABLE_TORCH_LIBRARY_FRAGMENT(shadowkv_cuda, m) {
  m.def(
      "find_missing_chunks(Tensor host, Tensor pages, Tensor slots, Tensor selected, Tensor(a!) rows, Tensor(b!) owner, "
      "Tensor(c!) entry, Tensor(d!) used, Tensor(e!) step, Tensor(f!) counters, Tensor(g!) misses, Tensor(h!) counts, "
      "int bucket_bits, Tensor(i!) entries) -> ()");
  m.def(
      "copy_missing_chunks(Tensor(a!) misses, Tensor(b!) counts, int bucket_bits, Tensor(c!) rows, int blocks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(shadowkv_cuda, CUDA, m) {
  m.impl("find_missing_chunks", TORCH_BOX(&shadowkv::find_missing_chunks));
  m.impl("copy_missing_chunks", TORCH_BOX(&shadowkv::copy_missing_chunks));
}
