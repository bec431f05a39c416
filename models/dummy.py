"""Random weights for measuring speed without a checkpoint (``load_format="dummy"``)."""

from __future__ import annotations

import torch

from shadowkv.models.decoder import Decoder

SEED = 0


@torch.no_grad()
def fill_dummy(model: Decoder) -> None:
    """Fill the model where it lives: matrices so that activations keep their scale, norms one, biases zero."""
    generator = torch.Generator(model.device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name == "embedding":
            parameter.normal_(0.0, 1.0 if model.head is not None else parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
