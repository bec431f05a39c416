"""Tiny models whose files have a layer that drafts tokens, and what the layer computes, in plain operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from bad_files import edit_json
from families import build
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


class Theirs(NamedTuple):
    """transformers' model, of which one more layer drafts tokens."""

    model: Any
    layer: nn.Module
    weights: dict[str, Tensor]
    offset: float
    """Added to the weights of norms."""
    feeds_normed: bool
    """Whether the layer goes on from normalised states."""
    window: int = 1 << 20
    """Number of newest tokens that the layer attends to."""

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """Final hidden states [T, D]."""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def states(self, following: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D], and logits [T, V], of rows with the tokens behind those of ``hidden`` [T, D]."""
        text, rows = self.model.model, len(following)
        embedded = self._norm(text.embed_tokens(torch.tensor(following)), "embedding_norm")
        x = torch.cat((embedded, self._norm(hidden, "hidden_norm")), -1) @ self.weights["projection"].T
        places = torch.arange(rows)[None]
        of_grids = places.expand(3, 1, rows) if hasattr(text.rotary_emb, "mrope_section") else places
        unseen = torch.ones(rows, rows).triu(1) + torch.ones(rows, rows).tril(-self.window)
        mask = torch.finfo(x.dtype).min * unseen[None, None]
        rotary = text.rotary_emb(x[None], of_grids)
        x = self.layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=rotary)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        normed = self._norm(x, "norm")
        return normed if self.feeds_normed else x, self.model.lm_head(normed)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name] + self.offset, eps=1e-5)

    def draft(self, known: list[int], hidden: Tensor, count: int) -> list[int]:
        """The likeliest ``count`` tokens. ``hidden`` [T, D] are the states of all ``known`` tokens but the newest T -
        1, ``known`` [T + 1] of which the first has no row."""
        tokens = list(known[1:])
        for _ in range(count):
            states, logits = self.states(tokens, hidden)
            tokens.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, states[-1:]))
        return tokens[len(known) - 1 :]


GLM = {
    "embedding_norm": "model.layers.{}.enorm.weight",
    "hidden_norm": "model.layers.{}.hnorm.weight",
    "projection": "model.layers.{}.eh_proj.weight",
    "norm": "model.layers.{}.shared_head.norm.weight",
}
QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}


def build_with_head(name: str, directory: Path, adds: float | None = None, **sizes: Any) -> Theirs:
    """Saves the tiny model of a case whose last layer drafts tokens. ``sizes`` are those of the other layers.

    Args:
        adds: if it is 0, layers add nothing and the head passes on the embedding. So the next token depends on the
            newest one alone, and the head says the same as the model. The more layers add, the less the two agree. None
            for a head that knows nothing of the model.
    """
    qwen = name.startswith("qwen")
    layers = sizes.pop("num_hidden_layers", 3)
    kinds = {"layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"] * 2} if qwen else {}
    model: Any = build(name, directory, {**sizes, "num_hidden_layers": layers + 1, **kinds})
    generator = torch.Generator().manual_seed(3)
    size = model.config.hidden_size
    weights = {
        one: torch.randn(size, generator=generator) * 0.3 + (not qwen)
        for one in ("embedding_norm", "hidden_norm", "norm")
    }
    weights["projection"] = torch.randn(size, 2 * size, generator=generator) * 0.15
    file, named = directory / "model.safetensors", QWEN if qwen else GLM
    stored, last = load_file(file), f"model.layers.{layers}."
    if adds is not None:
        weights["projection"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        weights |= {"embedding_norm": torch.ones(size), "norm": stored["model.norm.weight"].clone()}
        for one, weight in (*stored.items(), *model.named_parameters()):
            if "o_proj" in one or "down_proj" in one:
                weight.data *= adds
    if qwen:
        stored = {key.replace(last, "mtp.layers.0."): value for key, value in stored.items()}
    stored |= {named[one].format(layers): weight for one, weight in weights.items()}
    if not qwen:  # copies of the tables, as in published files
        tables = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        stored |= {f"{last}{copy}.weight": stored[f"{table}.weight"].clone() for copy, table in tables.items()}
    save_file(stored, file)
    counts = {"mtp_num_hidden_layers": 1} if qwen else {"num_nextn_predict_layers": 1}
    listed = {"layer_types": kinds["layer_types"][:-1]} if qwen else {}
    edit_json(directory / "config.json", num_hidden_layers=layers, **counts, **listed)
    layer, model.model.layers = model.model.layers[-1], model.model.layers[:-1]
    model.config.num_hidden_layers = layers
    return Theirs(model, layer, weights, 1.0 if qwen else 0.0, qwen)
