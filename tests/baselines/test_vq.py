"""Values as entries of a codebook: what they lose, and prompts that have nothing to make 256 entries of."""

import pytest
import torch
from coded_rows import gaussian_rows, losses

from shadowkv.baselines import vq
from shadowkv.baselines.vq import VectorRows, k_means, nearest

CODEC = VectorRows()


def test_gaussian_rows_lose_less_than_levels_of_two_bits() -> None:
    rows, later = gaussian_rows(2000, 128), gaussian_rows(1000, 128, seed=1)
    state = CODEC.fit(rows[:, None])
    (own, _), (of_later, _) = losses(CODEC, rows, state), losses(CODEC, later, state)
    assert own <= 0.100 < of_later <= 0.102


def test_heads_share_a_codebook_and_have_their_own_units() -> None:
    rows = gaussian_rows(600, 128).view(300, 2, 128) * torch.tensor([1.0, 100.0])[:, None]
    largest, codebook = CODEC.fit(rows)
    rotation = CODEC.rotation_matrix(128, "values")
    torch.testing.assert_close(largest, (rows @ rotation).abs().amax(0))
    assert codebook.shape == (1, 256, 4)
    for head in range(2):
        assert losses(CODEC, rows[:, head], (largest[head, None], codebook))[0] < 0.12


def test_rows_may_be_weighed_before_they_are_turned_back() -> None:
    rows, weights = gaussian_rows(500, 64), torch.rand(3, 500).softmax(-1)
    state, rotation = CODEC.fit(rows[:, None]), CODEC.rotation_matrix(64, "values")
    coded = CODEC.encode(rows, rotation, state)
    before, after = (CODEC.decode(*coded, kept, 64, state) for kept in (rotation, None))
    torch.testing.assert_close(weights @ before, weights @ after @ rotation.T, atol=1e-5, rtol=1e-5)


def test_rows_that_are_turned_already_have_the_same_bytes_and_so_has_a_second_time() -> None:
    rows, rotation = gaussian_rows(400, 64), CODEC.rotation_matrix(64, "values")
    torch.testing.assert_close(rotation @ rotation, torch.eye(64))
    first, again = (CODEC.fit(rows[:, None]) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    codes, _ = CODEC.encode(rows, rotation, first)
    assert codes.shape == (400, 16)
    assert torch.equal(codes, CODEC.encode(rows @ rotation, None, again)[0])


def test_states_of_any_axes_serve_their_rows() -> None:
    """Such as layers, pages and heads: each row has the bytes that it has alone."""
    rows = gaussian_rows(2 * 3 * 100 * 2, 16).view(2, 3, 100, 2, 16) * torch.rand(2, 3, 1, 2, 16)
    states = [[CODEC.fit(rows[layer, page]) for page in range(3)] for layer in range(2)]
    state = tuple(torch.stack([torch.stack([s[i] for s in of]) for of in states]).unsqueeze(2) for i in range(2))
    rotation = CODEC.rotation_matrix(16, "values")
    codes, _ = CODEC.encode(rows, rotation, state)
    for layer in range(2):
        for page in range(3):
            for head in range(2):
                largest, codebook = states[layer][page]
                alone = largest[head, None], codebook
                assert torch.equal(
                    codes[layer, page, :, head], CODEC.encode(rows[layer, page, :, head], rotation, alone)[0]
                )
    decoded = CODEC.decode(codes, codes[..., :0], rotation, 16, state)
    assert (decoded - rows).square().sum() / rows.square().sum() < 0.1


def test_rows_of_zeros_stay_zero() -> None:
    rows = gaussian_rows(300, 64)
    rows[100:200] = 0
    rows[:, 5] = 0
    state, rotation = CODEC.fit(rows[:, None]), CODEC.rotation_matrix(64, "values")
    decoded = CODEC.decode(*CODEC.encode(rows, rotation, state), rotation, 64, state)
    assert not decoded[100:200].any() and decoded[:100].any(1).all()
    nothing = CODEC.fit(torch.zeros(10, 1, 64))
    assert all(x.isfinite().all() for x in nothing)
    assert not CODEC.decode(*CODEC.encode(rows, rotation, nothing), rotation, 64, nothing).any()


@pytest.mark.parametrize("count", [1, 100, 255, 256])
def test_few_points_are_entries_themselves(count: int) -> None:
    """Although most entries are not the nearest of any point."""
    points = (gaussian_rows(count, 4) / 8).clamp(-1, 1)
    points = torch.cat((points, points))
    codebook = k_means(points)
    found = codebook[nearest(points[None], codebook[None])[0].int()]
    assert codebook.isfinite().all() and not codebook[0].any()
    assert (found - points).square().sum() < 0.5 * points.square().sum()


def test_no_more_groups_are_fitted_on_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(vq, "FITTED", 1000)
    monkeypatch.setattr(vq, "k_means", lambda points: seen.append(len(points)) or points.new_zeros(256, 4))
    for tokens in (50, 500):
        CODEC.fit(gaussian_rows(tokens, 64)[:, None])
    assert seen == [800, 1000]
