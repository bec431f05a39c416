"""Which modules the lists of a quantization config mean."""

from __future__ import annotations

import pytest

from shadowkv.models.checkpoints.quantized.names import list_of_names, matches

Q = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize(
    ("module", "pattern", "meant"),
    [
        ("lm_head", "lm_head", True),
        (Q, Q, True),
        (Q, "self_attn", True),
        (Q, "q_proj", True),
        (Q, "layers.12", True),
        (Q, "model.layers.12", True),
        (Q, "layers.1", False),  # no part of a name
        (Q, "proj", False),
        (Q, "model.layers.*.self_attn.q_proj", True),
        (Q, "model.layers.12*", True),
        (Q, "model.layers.*.self_attn", True),
        (Q, "layers.*", False),  # the whole name
        (Q, "re:.*q_proj", True),
        (Q, "re:.*layers[.]12[.].*", True),
        (Q, "re:.*(k|v)_proj$", False),
        (Q, "re:self_attn", False),  # the beginning of the name
    ],
)
def test_patterns(module: str, pattern: str, meant: bool) -> None:
    assert matches(module, pattern) == meant


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:(a|a)*b", "re:(.*){9}", "re:.*.*.*.*.*.*.*x"])
def test_what_could_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="repeats too much to be matched safely"):
        matches(Q, pattern)


@pytest.mark.parametrize("value", ["lm_head", {"lm_head": 1}, [1], ["x" * 301]])
def test_no_list_of_names(value: object) -> None:
    with pytest.raises(ValueError, match=r"ignore=.* is not a list of names"):
        list_of_names(value, "ignore")
    assert list_of_names(None, "ignore") == ()
