// Chunks of host memory through a buffer on the device. One block per sequence and kv head finds the missing chunks,
// chooses the entries to evict and lists the copies; a small grid then reads all of them across the bus, whose latency
// of microseconds requires about 100 KB in flight, but not many multiprocessors.
//
// Copies of short rows are first roughly ordered by address. An address translation covers 64 KiB of host memory,
// however that was allocated: short rows in random order, each in a different 64 KiB, wait for translations, 30 ns per
// row one after the other, and meanwhile other work waits for its own translations. Ordering takes a third to half less
// time, and buckets of less than 32 MiB are no better (H200; 18,600 rows of 384 B in 3 GiB take 0.55 ms in random order
// and 0.38 ordered if other kernels have used the L2 cache since, 0.42 and 0.20 if not; the bus takes 0.15). Rows of
// 2 KiB are limited by the bus: for them, ordering saves nothing and takes 10 us.
#pragma once

#include <cstdint>

namespace shadowkv {

constexpr int kFindThreads = 256;
constexpr int kCopyThreads = 256;     // if misses are not ordered
constexpr int kOrderedThreads = 128;  // if they are
constexpr int kCopyLoads = 4;         // of 16 bytes that a thread has in flight
constexpr int kBuckets = 512;         // of addresses, by which the copies of short rows are ordered
constexpr int kSortBlocks = 16;
constexpr int kMostEntries = 32767;   // per slot and head, limited by the type of their numbers
constexpr uint32_t kOldest = 0xffff; // steps since an entry's last use, clamped to this

struct alignas(16) Miss {
  const uint4* from;
  uint4* to;
};

// Counts over all misses of a call.
struct MissCounts {
  uint32_t all;
  uint32_t of_bucket[kBuckets];
  uint32_t placed[kBuckets]; // of a bucket so far
};

// Buckets are consecutive, with the first following the last.
__device__ __forceinline__ int bucket_of(const uint4* host, int bucket_bits) {
  return int((reinterpret_cast<uintptr_t>(host) >> bucket_bits) % kBuckets);
}

struct FindMisses {
  const uint8_t* host;     // [N, H, C, row_bytes]
  int64_t page_stride;     // from one page id to the next, in bytes
  const int64_t* pages;    // [B, P]
  int64_t pages_stride;    // of a row, in page ids
  const int64_t* slots;    // [B]
  const int64_t* selected; // [B, H, k]
  uint8_t* rows;           // [slots, H, M, row_bytes]
  int32_t* owner;          // [slots, H, M]
  int16_t* entry;          // [slots, H, n]
  int32_t* used;           // [slots, H, M]
  int32_t* step;           // [slots, H]
  unsigned long long* counters;
  Miss* misses;            // [B H k]
  MissCounts* counts;      // initially 0
  int64_t* entries;        // [B, H, k]
  int64_t row_bytes;
  int heads, k, capacity, chunks, chunks_of_page; // H, k, M, n, C
  int bucket_bits;         // of an address within a bucket; together the buckets cover about all pages. -1: unordered
};

// Ages of all entries, entries to evict, columns of `selected` that need one.
__host__ __device__ constexpr int64_t find_misses_bytes(int64_t capacity, int64_t k) { return 2 * (capacity + 2 * k); }

__global__ void clear_counts_kernel(MissCounts* counts) {
  uint32_t* words = reinterpret_cast<uint32_t*>(counts);
  for (int i = threadIdx.x; i < int(sizeof(MissCounts) / 4); i += blockDim.x) words[i] = 0;
}

// The part of the buffer of a sequence and head, at the current step.
struct BufferPart {
  int64_t state;  // its number among all
  int32_t* owner; // [M], the chunk of each entry, or below 0
  int32_t* used;  // [M], the step in which each was last selected
  int16_t* entry; // [n], of each chunk, or below 0
  int32_t now;

  __device__ __forceinline__ BufferPart(const FindMisses& p, int64_t row, int64_t head)
      : state(p.slots[row] * p.heads + head),
        owner(p.owner + state * p.capacity),
        used(p.used + state * p.capacity),
        entry(p.entry + state * p.chunks),
        now(p.step[state] + 1) {}
};

// Counts shared by a block's threads.
struct FindCounts {
  uint32_t older[16]; // by bit of an age: entries that are at least as old as the tried age
  uint32_t misses, places, ties;
  uint32_t list; // where the block's misses begin among all misses of the call
};

// Finds the entries of the selected chunks, which have age 0 from here on, and lists the columns without an entry.
__device__ __forceinline__ void look_up_selected(
    const FindMisses& p, const BufferPart& part, const int64_t* selected, int64_t* entries, uint16_t* ages,
    uint16_t* columns, FindCounts& counts) {
  for (int i = threadIdx.x; i < p.k; i += kFindThreads) {
    const int64_t chunk = selected[i];
    const int found = chunk < 0 ? -1 : part.entry[chunk];
    if (chunk >= 0 && found < 0) {
      columns[atomicAdd(&counts.misses, 1)] = i;
    } else {
      entries[i] = found;
    }
    if (found >= 0) part.used[found] = part.now, ages[found] = 0;
    if (chunk >= 0 && (i + 1 == p.k || selected[i + 1] < 0)) atomicAdd(&p.counters[0], i + 1);
  }
}

// Lists the `need` (1 or more) oldest entries, to be evicted. The greatest age that at least `need` entries reach is
// found bit by bit, as is the number of entries that are older still. It is not 0, the age of what is selected now, as
// all selected chunks fit.
__device__ __forceinline__ void
choose_places(const uint16_t* ages, int capacity, uint32_t need, uint16_t* places, FindCounts& counts) {
  uint32_t limit = 0, beyond = 0;
  for (int bit = 15; bit >= 0; --bit) {
    const uint32_t tried = limit | 1u << bit;
    uint32_t mine = 0;
    for (int i = threadIdx.x; i < capacity; i += kFindThreads) mine += ages[i] >= tried;
    mine = __reduce_add_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) atomicAdd(&counts.older[bit], mine);
    __syncthreads();
    counts.older[bit] >= need ? limit = tried : beyond = counts.older[bit];
  }
  for (int i = threadIdx.x; i < capacity; i += kFindThreads) {
    const uint32_t age = ages[i];
    if (age > limit) places[atomicAdd(&counts.places, 1)] = i;
    if (age == limit) {
      const uint32_t place = beyond + atomicAdd(&counts.ties, 1);
      if (place < need) places[place] = i;
    }
  }
}

// Assigns an entry to a chunk, and returns the copy that fetches its row.
__device__ __forceinline__ Miss
replace_entry(const FindMisses& p, const BufferPart& part, const int64_t* pages, int64_t head, int place, int chunk) {
  const int old = part.owner[place];
  if (old >= 0) part.entry[old] = -1;
  part.owner[place] = chunk;
  part.entry[chunk] = place;
  part.used[place] = part.now;
  const int64_t page = pages[chunk / p.chunks_of_page], inside = head * p.chunks_of_page + chunk % p.chunks_of_page;
  return {
      reinterpret_cast<const uint4*>(p.host + page * p.page_stride + inside * p.row_bytes),
      reinterpret_cast<uint4*>(p.rows + (part.state * p.capacity + place) * p.row_bytes)};
}

__global__ void __launch_bounds__(kFindThreads) find_misses_kernel(const FindMisses p) {
  extern __shared__ uint16_t memory[];
  uint16_t *ages = memory, *places = ages + p.capacity, *columns = places + p.k;
  __shared__ FindCounts counts;
  const int thread = threadIdx.x;
  const int64_t row = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const int64_t* selected = p.selected + int64_t(blockIdx.x) * p.k;
  int64_t* entries = p.entries + int64_t(blockIdx.x) * p.k;
  if (selected[0] < 0) { // a padding row, whose slot may belong to any sequence
    for (int i = thread; i < p.k; i += kFindThreads) entries[i] = -1;
    return;
  }
  const BufferPart part(p, row, head);
  if (thread < 16) counts.older[thread] = 0;
  if (thread == 0) counts.misses = counts.places = counts.ties = 0;
  for (int i = thread; i < p.capacity; i += kFindThreads) ages[i] = min(uint32_t(part.now - part.used[i]), kOldest);
  __syncthreads();

  look_up_selected(p, part, selected, entries, ages, columns, counts);
  __syncthreads();
  const uint32_t need = counts.misses;
  if (thread == 0) p.step[part.state] = part.now;
  if (need == 0) return;
  if (thread == 0) {
    counts.list = atomicAdd(&p.counts->all, need);
    atomicAdd(&p.counters[1], need);
  }
  choose_places(ages, p.capacity, need, places, counts);
  __syncthreads();

  const int64_t* pages = p.pages + row * p.pages_stride;
  for (int i = thread; i < need; i += kFindThreads) {
    const int column = columns[i], place = places[i];
    const Miss miss = replace_entry(p, part, pages, head, place, int(selected[column]));
    entries[column] = place;
    p.misses[counts.list + i] = miss;
    if (p.bucket_bits >= 0) atomicAdd(&p.counts->of_bucket[bucket_of(miss.from, p.bucket_bits)], 1);
  }
}

// A counting sort by buckets; within a bucket, misses are in any order. Every block sums up the counts for itself.
__global__ void __launch_bounds__(kBuckets)
    sort_misses_kernel(const Miss* misses, MissCounts* counts, int bucket_bits, Miss* sorted) {
  __shared__ uint32_t first[kBuckets], of_warps[kBuckets / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const uint32_t own = counts->of_bucket[thread];
  uint32_t until = own; // over this warp's buckets up to this one, then over all
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, until, step);
    if (lane >= step) until += other;
  }
  if (lane == 31) of_warps[warp] = until;
  __syncthreads();
  for (int before = 0; before < warp; ++before) until += of_warps[before];
  first[thread] = until - own;
  __syncthreads();
  const uint32_t all = counts->all;
  for (uint32_t i = blockIdx.x * kBuckets + thread; i < all; i += gridDim.x * kBuckets) {
    const Miss miss = misses[i];
    const int bucket = bucket_of(miss.from, bucket_bits);
    sorted[first[bucket] + atomicAdd(&counts->placed[bucket], 1)] = miss;
  }
}

// Not through the read-only path: an earlier kernel may have written to host memory.
__device__ __forceinline__ uint4 load_host16(const uint4* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// Loaded as first to be evicted from the L2 cache: ordered short rows arrive a fifth sooner while nothing else runs, as
// if translations had more of the cache to stay in.
__device__ __forceinline__ uint4 load_host16(const uint4* p, uint64_t first_out) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p), "l"(first_out));
  return x;
}

// Warps take equal shares of all bytes, not of rows: as much is in flight, however short rows are. On an H200 that
// gives 46 GB/s, as for any kernel, with 16 blocks as with 64, and no more with twice the loads or with bulk copies.
// row: in units of 16 bytes.
template <bool kOrdered>
__global__ void __launch_bounds__(kOrdered ? kOrderedThreads : kCopyThreads)
    copy_misses_kernel(const Miss* misses, const MissCounts* counts, uint32_t row) {
  constexpr int kThreads = kOrdered ? kOrderedThreads : kCopyThreads;
  uint64_t first_out;
  if constexpr (kOrdered) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_out));
  const uint32_t total = counts->all * row, lane = threadIdx.x % 32;
  const uint32_t warp = (blockIdx.x * kThreads + threadIdx.x) / 32, share = 32 * kCopyLoads;
  for (uint32_t first = warp * share; first < total; first += gridDim.x * (kThreads / 32) * share) {
    const uint4* from[kCopyLoads];
    uint4 *to[kCopyLoads], data[kCopyLoads];
#pragma unroll
    for (int i = 0; i < kCopyLoads; ++i) {
      const uint32_t at = min(first + 32 * i + lane, total - 1); // repeats the end rather than branching
      const Miss miss = misses[at / row];
      from[i] = miss.from + at % row;
      to[i] = miss.to + at % row;
    }
#pragma unroll
    for (int i = 0; i < kCopyLoads; ++i) {
      if constexpr (kOrdered)
        data[i] = load_host16(from[i], first_out);
      else
        data[i] = load_host16(from[i]);
    }
#pragma unroll
    for (int i = 0; i < kCopyLoads; ++i) *to[i] = data[i];
  }
}

} // namespace shadowkv
