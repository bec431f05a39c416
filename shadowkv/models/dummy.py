"""Random weights for measuring speed without a checkpoint (``load_format="dummy"``)."""

from __future__ import annotations

import torch

from shadowkv.layers.fp8_linear import SCALE
from shadowkv.models.decoder import Decoder
from shadowkv.models.fp8 import fill_quantised

SEED = 0


@torch.no_grad()
def fill_dummy(model: Decoder) -> None:
    """Fills the model where it is: matrices such that activations keep their scale, norms with one, biases with zero;
    each rank of a model gets different numbers."""
    generator = torch.Generator(model.device).manual_seed(SEED + model.group.rank)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.removesuffix(SCALE) in parameters and name.endswith(SCALE):
            continue  # filled together with its weight
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name == "embedding":
            parameter.normal_(0.0, 1.0 if model.head is not None else parameter.shape[1] ** -0.5, generator=generator)
        elif (scale := parameters.get(name + SCALE)) is not None:
            weight = torch.empty(parameter.shape, dtype=model.dtype, device=model.device)
            fill_quantised(parameter, scale, weight.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator))
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
