"""Pages of rows whose variances are made alike (KVarN): what they take, what they lose, and that no page is cut."""

import pytest
import torch
from coded_rows import back, gaussian_rows

from shadowkv.baselines.kvarn import KVarNKeys, KVarNValues, balance
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.presets import preset

KEYS, VALUES = KVarNKeys(), KVarNValues()
BOTH = pytest.mark.parametrize("codec", [KEYS, VALUES], ids=lambda codec: codec.name)


def loss(codec, rows: torch.Tensor) -> float:
    return float((back(codec, rows) - rows).square().sum() / rows.square().sum())


@pytest.mark.parametrize(("dim", "keys", "values"), [(128, 64 + 10, 32 + 8), (64, 32 + 6, 16 + 6)])
def test_bytes_of_a_page(dim: int, keys: int, values: int) -> None:
    """For keys two float16 per channel and one per token, for values the other way round, and the codes."""
    shape = ModelShape(2, 16, 8, dim)
    parts = build_parts(resolve(preset("kvarn"), shape), shape, torch.bfloat16)
    assert [part.bytes_per_token() for part in parts] == [8 * keys, 0, 8 * values]
    assert not any(part.state_fields() for part in parts)


@pytest.mark.parametrize(("codec", "distortion"), [(KEYS, 0.0079), (VALUES, 0.242)])
def test_what_gaussian_rows_lose(codec, distortion: float) -> None:
    assert loss(codec, gaussian_rows(64 * 40, 128)) == pytest.approx(distortion, rel=0.03)


@BOTH
def test_scales_of_tokens_and_channels_cost_nothing(codec) -> None:
    """Such as those of outliers: a channel's is one after the rotation."""
    rotation = codec.rotation_matrix(64, "keys")
    rows = gaussian_rows(640, 64)
    tokens, channels = torch.exp(gaussian_rows(640, 1, 1)), torch.exp(gaussian_rows(1, 64, 2))
    plain, scaled = rows, rows * channels * tokens
    found = codec.decode(*codec.encode(scaled, None), None, 64) / channels / tokens
    again = codec.decode(*codec.encode(plain, None), None, 64)
    errors = [float((x - plain).square().mean()) for x in (found, again)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    rotated = codec.decode(*codec.encode(rows, rotation), None, 64)
    assert float((rotated - rows @ rotation).square().mean()) == pytest.approx(errors[1], rel=0.1)


def test_balance_makes_deviations_alike() -> None:
    tokens, channels = torch.exp(0.8 * gaussian_rows(64, 1)), torch.exp(0.8 * gaussian_rows(1, 64))
    tiles = tokens * gaussian_rows(3 * 64, 64, 1).view(3, 64, 64) * channels
    of_token, of_channel = balance(tiles)
    even = tiles / of_token / of_channel
    for axis in (-1, -2):
        assert tiles.std(axis).amax() / tiles.std(axis).amin() > 10
        assert even.std(axis).amax() / even.std(axis).amin() < 1.01


@BOTH
def test_pages_are_coded_alone_and_whole(codec) -> None:
    rows = gaussian_rows(64 * 6, 64).view(2, 3 * 64, 64)
    rotation = codec.rotation_matrix(64, "keys")
    codes, scale = codec.encode(rows, rotation)
    assert codes.shape == (2, 192, codec.row_bytes(64)) and scale.shape == (2, 192, codec.scales(64))
    alone = codec.encode(rows[1, 64:128], rotation)
    assert torch.equal(codes[1, 64:128], alone[0]) and torch.equal(scale[1, 64:128], alone[1])
    with pytest.raises(ValueError, match="coded 64 at a time, not 50"):
        codec.encode(rows[0, :50], rotation)


@BOTH
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 1e4])
def test_rows_of_any_size(codec, size: float) -> None:
    """Constant rows, and channels of zeros, too."""
    rows = gaussian_rows(128, 64)
    rows[3], rows[:, 7], rows[10:20] = 0, 0, 1
    decoded = codec.decode(*codec.encode(size * rows, None), None, 64)
    assert decoded.isfinite().all()
    assert not decoded[3].any() or codec is KEYS
    assert (decoded - size * rows).square().sum() <= 0.3 * (size * rows).square().sum()


def test_what_decodes_less_than_pages_is_refused() -> None:
    shape = ModelShape(2, 8, 2, 64)
    for kv in ("kvarn:index=sketch", "kvarn:keys=low-rank,rank=32", "turbo:values=kvarn-2bit"):
        with pytest.raises(ValueError, match="is decoded page by page"):
            resolve(preset(kv), shape)
    with pytest.raises(ValueError, match="a power of two from 64 on, not 80"):
        resolve(preset("kvarn"), ModelShape(2, 8, 2, 80))
    with pytest.raises(ValueError, match="the format is only for values"):
        resolve(preset("kvarn:keys=kvarn-2bit"), shape)
