// Pages of codes as the lanes of a warp copy, load and decode them, put back in order: bytes of levels or codes
// [64, 128], and scales.
#include "kernels/attend_coded/blocks.cuh"
#include "kernels/attend_coded/codes.cuh"
#include "kernels/attend_coded/steps.cuh"

namespace shadowkv {
namespace {

int token(int g, int i) { return i / 2 * 16 + 2 * g + i % 2; }

template <class Page>
Page& copied(const uint8_t* codes, const void* scales) {
  auto& page = *reinterpret_cast<Page*>(shared_memory);
  for (int lane = 0; lane < 32; ++lane) page.copy(codes, static_cast<const typename Page::Scale*>(scales), lane);
  return page;
}

// As a warp does it whose lanes wait for each other in between.
template <class Page>
void put_in_order(Page& page) {
  BlockRows rows[32];
  for (int lane = 0; lane < 32; ++lane) page.take(lane, rows[lane]);
  for (int lane = 0; lane < 32; ++lane) page.put(lane, rows[lane]);
}

template <class Page>
void scales_of(const Page& page, typename Page::Scale* scales) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 8; ++i) scales[token(g, i)] = page.scales_of(g)[i];
}

template <class Codec, class Page>
void keys(const Page& page, LevelBytes levels, int8_t* bytes) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int i = 0; i < 8; ++i) {
        uint32_t word[Codec::kWords], quad[2][4];
        page.load_key(i / 2, i % 2, g, t, word);
        Codec::decode(word, levels, quad);
        for (int unit = 0; unit < 2; ++unit)
          for (int n = 0; n < 16; ++n)
            bytes[token(g, i) * kCodedDim + page.key_dim(unit, n / 4, n % 4, t)] =
                int8_t(quad[unit][n / 4] >> n % 4 * 8);
      }
}

template <class Page, class Decode>
void values(const Page& page, const Decode& decode, int8_t* bytes) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int i = 0; i < 16; ++i) {
        uint32_t quad[2][4];
        decode(i / 2, g, t, quad);
        for (int n = 0; n < 16; ++n)
          bytes[token(t + i / 8 * 4, i % 8) * kCodedDim + page.value_dim(n / 4, n % 4, g)] =
              int8_t(quad[i % 2][n / 4] >> n % 4 * 8);
      }
}

template <class Codec>
void level_rows(
    bool are_keys, const uint8_t* codes, const void* scales, LevelBytes levels, int8_t* to, void* to_scales) {
  const auto& page = copied<CodedPage<Codec>>(codes, scales);
  scales_of(page, static_cast<typename Codec::Scale*>(to_scales));
  if (are_keys) return keys<Codec>(page, levels, to);
  values(page, [&](int i, int g, int t, uint32_t(&quad)[2][4]) { page.decode_values(i, g, t, levels, quad); }, to);
}

void block_rows(bool are_keys, const uint8_t* codes, LevelBytes levels, int8_t* to, void* to_scales) {
  if (are_keys) {
    auto& page = copied<BlockKeyPage>(codes, nullptr);
    put_in_order(page), scales_of(page, static_cast<BlockScales*>(to_scales));
    return keys<Tq3>(page, levels, to);
  }
  auto& page = copied<BlockValuePage>(codes, nullptr);
  put_in_order(page), scales_of(page, static_cast<BlockScales*>(to_scales));
  values(page, [&](int i, int g, int t, uint32_t(&quad)[2][4]) { page.decode_values(i, g, t, levels, quad); }, to);
}

// Numbers of the page: of keys steps and least entries of channels, then scales of tokens.
void stepped_keys(const uint8_t* codes, const void* scales, int8_t* to, __half* numbers) {
  const auto& page = copied<SteppedKeyPage>(codes, scales);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 8; ++i) {
      numbers[2 * kCodedDim + token(g, i)] = page.scale_of(g, i);
      for (int t = 0; t < 4; ++t) {
        uint32_t quad[4][2];
        page.decode_key(i / 2, i % 2, g, t, quad);
        for (int n = 0; n < 32; ++n)
          to[token(g, i) * kCodedDim + page.key_dim(n / 8, n / 4 % 2, n % 4, t)] =
              int8_t(quad[n / 8][n / 4 % 2] >> n % 4 * 8);
      }
    }
  for (int n = 0; n < 16; ++n) {
    uint32_t pair[8];
    page.channels(n % 8, n / 8, pair);
    memcpy(numbers + 16 * n, pair, sizeof(pair));
  }
}

// Of values steps and least entries of tokens in turn, then scales of channels; codes in units of powers of 4.
void stepped_values(const uint8_t* codes, const void* scales, int8_t* to, __half* numbers) {
  const auto& page = copied<SteppedValuePage>(codes, scales);
  values(page, [&](int i, int g, int t, uint32_t(&quad)[2][4]) { page.decode_values(i, g, t, quad); }, to);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 8; ++i) {
      const uint32_t steps = page.steps_of(g, i), scale = page.scales_of(g, i / 2, i % 2);
      memcpy(numbers + 2 * token(g, i), &steps, 4);
      memcpy(numbers + 2 * kPage + page.value_dim(i % 2 * 2, i / 2, g), &scale, 4);
    }
}

} // namespace
} // namespace shadowkv

extern "C" void decode(
    int64_t codec, bool are_keys, const uint8_t* codes, const void* scales, uint64_t levels, int8_t* to,
    void* to_scales) {
  using namespace shadowkv;
  const LevelBytes table = {uint32_t(levels), uint32_t(levels >> 32)};
  switch (codec) {
    case codec::kLloyd4: return level_rows<Lloyd4>(are_keys, codes, scales, table, to, to_scales);
    case codec::kLloyd3: return level_rows<Lloyd3>(are_keys, codes, scales, table, to, to_scales);
    case codec::kLloyd2: return level_rows<Lloyd2>(are_keys, codes, scales, table, to, to_scales);
    case codec::kPolarInt4: return level_rows<PolarInt4>(are_keys, codes, scales, table, to, to_scales);
    case codec::kTq3: return block_rows(are_keys, codes, table, to, to_scales);
    case codec::kKvarn4: return stepped_keys(codes, scales, to, static_cast<__half*>(to_scales));
    case codec::kKvarn2: return stepped_values(codes, scales, to, static_cast<__half*>(to_scales));
  }
}
