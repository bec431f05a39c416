"""The maps of a sketch: products are unchanged, and errors are small where the prompt's last queries look."""

import torch
from torch import Tensor

from shadowkv.kvcache.parts.index_sketch import sketch_maps
from shadowkv.ops.registry import Ops
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sign_scores.reference import decode_scale, pack_sketch, plane_bits

HEADS, GROUP, DIM = 2, 3, 64
OPS = Ops("cpu")


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Products of queries [w, H G, d] with the keys [H, n, d] of their kv head, [H, G w, n]."""
    return q.unflatten(1, (HEADS, -1)).permute(1, 2, 0, 3).flatten(1, 2) @ keys.transpose(1, 2)


def test_products_stay_as_they_are(seed):
    queries = torch.randn(64, HEADS * GROUP, DIM) * torch.linspace(3, 0.1, DIM)
    key_map, query_map = sketch_maps(queries, HEADS, random_rotation(DIM, "sketch"), OPS)
    torch.testing.assert_close(
        key_map @ query_map.transpose(1, 2), torch.eye(DIM).expand(HEADS, -1, -1), atol=1e-5, rtol=0
    )
    assert not torch.allclose(key_map[0], key_map[1])


def test_without_queries_keys_are_only_rotated():
    rotation = random_rotation(DIM, "sketch")
    for found in sketch_maps(torch.empty(0, HEADS * GROUP, DIM), HEADS, rotation, OPS):
        torch.testing.assert_close(found, rotation.expand(HEADS, -1, -1))


def test_a_query_of_zero_counts_for_no_direction(seed):
    queries = torch.randn(64, HEADS * GROUP, DIM)
    queries[3] = 0
    assert all(found.isfinite().all() for found in sketch_maps(queries, HEADS, random_rotation(DIM, "sketch"), OPS))


def test_scores_of_queries_like_those_observed_have_smaller_errors(seed):
    """Queries look in a quarter of the directions; what a sketch errs in others costs them nothing."""
    queries = torch.randn(128, HEADS * GROUP, DIM) * (torch.arange(DIM) < DIM // 4)
    keys, rotation = torch.randn(HEADS, 500, DIM), random_rotation(DIM, "sketch")

    def error(observed: Tensor) -> float:
        key_map, query_map = sketch_maps(observed, HEADS, rotation, OPS)
        signs, rest, scale = pack_sketch(keys @ key_map)
        codes = 2 * plane_bits(signs, DIM) + plane_bits(rest, DIM)
        sketched = codes.float().sub(1.5) * decode_scale(scale).unsqueeze(-1)
        new = queries[64:]
        return float((products(new, sketched @ query_map.transpose(1, 2)) - products(new, keys)).square().mean())

    assert error(queries[:64]) < 0.8 * error(queries[:0])
