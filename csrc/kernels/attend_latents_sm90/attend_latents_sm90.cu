#include "binding.h"

namespace shadowkv {

using LatentsKnown = AttendLatents<std::integer_sequence<int, 32, 64, 96, 128, 160>, Rotated4, Rotated3, Rotated2>;

SHADOWKV_ATTEND_LATENTS(attend_latents_sm90, LatentsKnown)

} // namespace shadowkv
