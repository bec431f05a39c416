#include "binding.h"

namespace shadowkv {

using AttendKnown = AttendSelected<
    Codecs<DenseKeys, DenseValues>, Codecs<Fp8Keys, Fp8Values>, Codecs<LatentBf16, DenseValues>,
    Codecs<LatentBf16, Rotated4>, Codecs<LatentInt8, DenseValues>, Codecs<LatentInt8, Rotated4>,
    Codecs<LatentInt8, Rotated3>, Codecs<LatentInt8, Rotated2>, Codecs<LatentInt4, DenseValues>,
    Codecs<LatentInt4, Rotated4>, Codecs<LatentInt4, Rotated3>, Codecs<LatentInt4, Rotated2>>;

SHADOWKV_ATTEND_SELECTED(attend_selected, AttendKnown)

} // namespace shadowkv
