"""The choice of backends."""

from pathlib import Path

import pytest
import torch

import shadowkv.ops
from shadowkv.ops.registry import NAMES, Ops


def test_every_folder_is_a_known_op_with_a_reference():
    root = Path(shadowkv.ops.__file__).parent
    assert sorted(path.parent.name for path in root.glob("*/reference.py")) == sorted(NAMES)
    assert set(Ops("cpu", dict.fromkeys(NAMES, "reference")).backends.items()) == {
        (name, "reference") for name in NAMES
    }


@pytest.mark.parametrize("device", ["cpu", "cuda", torch.device("cuda", 1)])
def test_every_op_has_a_backend_on_every_device_type(device):
    ops = Ops(device)
    assert set(ops.backends) == set(NAMES)
    assert all(callable(getattr(ops, name)) for name in NAMES)


def test_an_override_chooses_one_ops_backend_alone():
    assert Ops("cuda", {"rotate": "reference"}).backends == {**Ops("cuda").backends, "rotate": "reference"}


def test_unknown_ops_in_overrides_are_all_named():
    with pytest.raises(ValueError, match=r"bake, sort.*known: .*rotate"):
        Ops("cpu", {"sort": "reference", "rotate": "reference", "bake": "reference"})


def test_a_backend_that_the_op_lacks_is_named():
    with pytest.raises(ValueError, match=r"'rotate'.*'abacus'"):
        Ops("cpu", {"rotate": "abacus"})


def test_an_unknown_op_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"'sort'.*paged_attention"):
        _ = Ops("cpu").sort
