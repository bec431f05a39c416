// Locations of a warp's tokens, and the copies of their keys.
#pragma once

#include "shape.cuh"

namespace shadowkv {

// The walk over a warp's tiles; lane i handles token i. Chunk numbers are read three tiles ahead, page ids two, keys
// and scales one.
template <class Shape>
struct TileWalk {
  static constexpr int kTokens = Shape::kTokens;
  const AttendInputs& in;
  const AttendTile<Shape>& to;
  const int head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
  const int64_t* const selected = in.selected + (int64_t(batch) * in.heads + head) * in.chunks;
  const int64_t* const key_pages = in.key_pages + batch * in.key_pages_row;
  const bool buffered = in.value_slots != nullptr;
  const int64_t* const value_pages = in.value_pages + batch * in.value_pages_row + (buffered ? head * in.chunks : 0);
  const int stride = in.splits * kAttendWarps;
  const int within = lane & ((1 << in.log_chunk) - 1);
  int tile = BlockQueries(in).split * kAttendWarps + threadIdx.x / 32;
  int chunk = chunk_at(tile), position, key_page, value_page; // of the lane's token; pages are -1 if there is no token
  __half scale[Shape::kScales]; // of the lane's token in the tile started last

  __device__ __forceinline__ TileWalk(const AttendInputs& in_, const AttendTile<Shape>& to_) : in(in_), to(to_) {}

  __device__ __forceinline__ int index_in(int tile) const { return uint32_t(tile * kTokens + lane) >> in.log_chunk; }
  __device__ __forceinline__ int chunk_at(int tile) const {
    const int index = index_in(tile);
    return lane < kTokens && index < in.chunks ? int(selected[index]) : -1;
  }

  // Finds the pages of `chunk`, then the next tile's chunk.
  __device__ __forceinline__ void advance() {
    position = (chunk << in.log_chunk) + within;
    key_page = value_page = -1;
    if (chunk >= 0) {
      key_page = int(key_pages[uint32_t(position) / kPage]);
      value_page = int(value_pages[buffered ? index_in(tile) : uint32_t(position) / kPage]);
      if (buffered) value_page += (int(in.value_slots[batch]) * in.heads + head) * in.buffer_entries;
    }
    tile += stride;
    chunk = chunk_at(tile);
  }

  // Makes the tile of key_page, ... the next one: publishes where its rows are and starts the copy of its keys. Returns
  // which tokens exist. `first` is added to positions.
  __device__ __forceinline__ uint32_t start(int first) {
    const uint32_t valid = __ballot_sync(~0u, key_page >= 0);
    if (lane < kTokens) {
      // A missing token uses the key of some row, which is masked, and the codes of some row, with scale zero.
      const int row = position & (kPage - 1);
      const bool exists = key_page >= 0;
      to.key_rows[lane] =
          exists ? in.keys + key_page * in.key_page + (Shape::kLow ? row : head * kPage + row) * in.key_bytes
                : in.keys;
      const int value_row = buffered ? within : head * kPage + row;
      to.value_rows[lane] =
          exists ? in.values + value_page * in.value_page + value_row * Shape::Value::row_bytes(Shape::kDim)
          : Shape::kCodes ? in.values
                          : nullptr;
      to.positions[lane] = exists ? position + first : 0;
      if constexpr (Shape::kCodes) {
#pragma unroll
        for (int i = 0; i < Shape::kScales; ++i) {
          scale[i] = __half(0.f);
          if (exists)
            scale[i] = *reinterpret_cast<const __half*>(
                in.scale + key_page * in.scale_page + ((head * kPage + row) * Shape::kScales + i) * 2);
        }
      }
    }
    __syncwarp();
    if (valid) {
      constexpr int kUnits = (Shape::key_bytes(Shape::kRank) + 31) / 32;
      constexpr bool kWhole = [] {
        if constexpr (Shape::kLow) return Shape::kExactRank && Shape::Key::kLeast == Shape::Key::kBits;
        return true;
      }() && Shape::key_bytes(Shape::kRank) % 32 == 0;
      const int bytes = in.key_bytes - lane % 2 * 16;
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) {
        const int token = 16 * i + lane / 2; // two lanes share a 32-byte sector
        const char* from = to.key_rows[token] + lane % 2 * 16;
        const uint32_t into = shared_address(to.keys + token * to.key_row) + lane % 2 * 16;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
          if (kWhole || unit * 32 < bytes) copy16_async(into + unit * 32, from + unit * 32);
      }
    }
    close_copy_group();
    return valid;
  }

  // Stores the scales of the tile started last where all lanes can read them.
  __device__ __forceinline__ void store_scales() const {
    if constexpr (Shape::kCodes) {
      if (lane >= kTokens) return;
#pragma unroll
      for (int i = 0; i < Shape::kScales; ++i) to.scales[i * kTokens + lane] = __half2float(scale[i]);
    }
  }
};

} // namespace shadowkv
