"""A policy has one colour in every plot, and axes have labels."""

from __future__ import annotations

import pytest

from shadowkv.eval.reports.colours import OTHERS, PRESETS, colour, styles
from shadowkv.kvcache.presets import PRESETS as POLICIES

pytest.importorskip("matplotlib")

from shadowkv.eval.reports.plots import new_figure, set_logarithmic


def test_every_preset_has_a_colour_of_its_own() -> None:
    assert set(PRESETS) == set(POLICIES)
    assert len({*PRESETS.values(), OTHERS}) == len(PRESETS) + 1


def test_a_colour_does_not_depend_on_what_else_is_drawn() -> None:
    assert colour("turbo:rank=32@1024") == colour("turbo (0)") == PRESETS["turbo"]
    assert colour("turbo-host") == PRESETS["turbo-host"] and colour("vllm") == OTHERS
    for others in ([], ["quest"], ["full", "quest"]):
        assert styles([*others, "turbo"])["turbo"] == {"color": PRESETS["turbo"], "marker": "o"}


def test_variations_of_a_preset_can_be_told_apart() -> None:
    found = styles(["turbo", *(f"turbo:rank={rank}" for rank in range(1, 8))])
    assert len({style["color"] for style in found.values()}) == len(found)
    assert len({style["marker"] for style in found.values()}) == len(found)


@pytest.mark.parametrize("values", [(0.00023, 0.00029), (3, 3), (1.1, 9.5), (0.2, 40), (1e-6, 3)])
@pytest.mark.parametrize("base", [2, 10])
def test_a_logarithmic_axis_has_more_than_one_label(values: tuple[float, float], base: int) -> None:
    figure, (axis,) = new_figure(1, 1, (4, 3))
    axis.plot(values, [0, 1])
    set_logarithmic(axis, "x", base)
    figure.draw_without_rendering()
    low, high = axis.get_xlim()
    shown = [label.get_text() for label in axis.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert len(shown) > 1 and len(set(shown)) == len(shown)
