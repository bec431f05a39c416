// Attention over codecs that only tests know, each in a header of its own.
#include "kernels/attend_latents_sm90/binding.h"
#include "kernels/attend_selected/binding.h"
#include "byte_rows.cuh"
#include "latent_fp8.cuh"

namespace shadowkv {

using AttendOfTests = AttendSelected<
    Codecs<LatentFp8, DenseValues>, Codecs<LatentFp8, RotatedBytes>, Codecs<LatentInt8, BlockBytes>,
    Codecs<LatentInt8, RotatedBytes>>;
using LatentsOfTests = AttendLatents<std::integer_sequence<int, 64>, RotatedBytes>;

SHADOWKV_ATTEND_SELECTED(attend_codecs, AttendOfTests)
SHADOWKV_ATTEND_LATENTS(attend_codecs_sm90, LatentsOfTests)

} // namespace shadowkv
