"""ShadowKV and `turbo`, the default policy, for one layer of one sequence, in plain PyTorch.

This is what the engine computes and nothing of how: no pages, no batches, no kernels. Read it from top to bottom: first
`prefill`, then `decode`. `tests/kvcache/test_reference_decoder.py` holds it equal to the engine, with the engine's
samples: the last bits of a sum may decide for another token. Left out: prompts that are too short to be compressed, and
those of under 2,048 tokens, whose subspace serves only a quarter more (`kvcache/policy/growth.py`); sparse prefill.

n tokens, H kv heads of d dimensions, G query heads on each of them (H_q = H G). Keys arrive before RoPE.

ShadowKV (arXiv:2410.21465) keeps of each key a few numbers in a subspace found from the prompt's own keys, and of each
chunk of 8 tokens the mean key; a step scores the means, rebuilds the keys of the best chunks and attends to those.
`turbo` changes all of it: the numbers are integers of 8 and 4 bits, the index is a sketch of every token, half of what
is selected is sampled, and values have 3 bits. Narrow keys (H d < 512) have values in 4 bits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.codecs import ROW_CODECS
from shadowkv.ops.page import PAGE
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sampling import Sampling, row_seeds
from shadowkv.ops.select_by_sketch.reference import select_by_sketch
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, pack_sketch, sign_scores
from shadowkv.ops.sketch_queries.reference import sketch_queries

LOCAL = 32
"""Newest tokens that always stay exact, beside up to a page of 64 that is not full yet."""
SINK = 8
"""First tokens, which stay exact because all others look at them (StreamingLLM, arXiv:2309.17453)."""
OBSERVED = 64
"""Last queries of a prompt, from which the sketch learns in which directions queries will look."""
ISOTROPIC = 0.85
"""Share of all directions alike in what the sketch learns from those queries: later ones will differ."""
STRONG = 32
"""Numbers of a key with 8 bits; the others have 4."""


class ReferenceLayer:
    """The cache of one layer of one sequence.

    Args:
        turbo: the default policy, or else ShadowKV as in its paper (values on the device).
        rank: numbers that are kept of a key, all kv heads together.
        theta: base of RoPE.
        layer, seed: what is sampled follows from these and the position.
        values: format of values, 3 bits where the head dim is a multiple of 64 and keys are not narrow, else 4.
    """

    def __init__(
        self, turbo: bool, rank: int, theta: float, layer: int = 0, seed: int = 0, values: str = "rotated-3bit"
    ):
        self.turbo, self.rank, self.theta, self.layer, self.seed = turbo, rank, theta, layer, seed
        self.chunk, self.outliers, self.sampled = (1, 0, 0.5) if turbo else (8, 48, 0.0)
        self.codec = ROW_CODECS[values].for_axis("values")
        self.latents: list[Tensor] = []
        self.values: list[Tensor] = []
        self.index: list[tuple[Tensor, ...]] = []  # landmarks, or planes of the sketch

    # -- the prompt --------------------------------------------------------------------------------------------------

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [n, H_q, d] of a prompt's queries [n, H_q, d], keys and values [n, H, d]: exact. Then all full
        pages before the newest tokens are compressed."""
        self.heads, self.length = k.shape[1], len(k)
        q, rope_k = self.rope(q, 0), self.rope(k, 0)
        scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (self.heads, -1)), rope_k) * q.shape[2] ** -0.5
        later = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        out = torch.einsum("hgqk,khd->qhgd", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(1, 2)

        self.compressed = (self.length - LOCAL) // PAGE * PAGE
        self.tail_k, self.tail_v = rope_k[self.compressed :], v[self.compressed :]
        self.fit(q[-OBSERVED:], k, rope_k)
        exact = self.exact_chunks(rope_k[: self.compressed])
        tokens = (exact[..., None] * self.chunk + torch.arange(self.chunk)).flatten(1).T[..., None]  # [tokens, H, 1]
        self.static_k, self.static_v = (x.gather(0, tokens.expand(-1, -1, x.shape[2])) for x in (rope_k, v))
        self.excluded = torch.zeros(self.heads, self.compressed // self.chunk, dtype=torch.bool).scatter_(
            1, exact, True
        )
        self.compress(k[: self.compressed], rope_k[: self.compressed], v[: self.compressed])
        return out

    def fit(self, queries: Tensor, k: Tensor, rope_k: Tensor) -> None:
        """Finds the subspace of the prompt's keys, before RoPE and of all heads together: their first right singular
        vectors (section 4.1). The integers of `turbo` are of centred keys, with a step for each direction, which is the
        largest number of the prompt over the largest code; 8-bit codes leave a quarter of room."""
        rows = k.flatten(1).float()
        self.mean = rows.mean(0) if self.turbo else torch.zeros(rows.shape[1])
        _, vectors = torch.linalg.eigh((rows - self.mean).T @ (rows - self.mean))
        self.basis = vectors[:, -self.rank :].flip(1).T  # [r, H d]
        self.largest_code = torch.where(torch.arange(self.rank) < STRONG, 127.0, 7.0)
        largest = ((rows - self.mean) @ self.basis.T).abs().amax(0)
        self.step = torch.where(self.largest_code == 127, 1.25, 1.0) * largest / self.largest_code
        if not self.turbo:
            self.step = torch.ones(self.rank)
            return
        # The sketch: keys times L R, queries times the transposed inverse of L, times R. Products stay as they are, but
        # what the sketch loses is weighed by how much these queries look at it: L L^T is their second moment.
        dim = rope_k.shape[2]
        units = torch.nn.functional.normalize(queries.float(), dim=-1).unflatten(1, (self.heads, -1)).transpose(0, 1)
        units = units.flatten(1, 2)  # [H, queries, d]
        moment = ISOTROPIC * torch.eye(dim) + (1 - ISOTROPIC) * dim / units.shape[1] * (units.mT @ units)
        inverse = torch.linalg.solve_triangular(torch.linalg.cholesky(moment), torch.eye(dim), upper=False)
        query_map = inverse.mT @ random_rotation(dim, "sketch")
        self.query_map, self.key_map = query_map.bfloat16(), (moment @ query_map).bfloat16()
        self.rope_mean = rope_k.mean(0, dtype=torch.float32)

    def exact_chunks(self, rope_k: Tensor) -> Tensor:
        """Chunks of each kv head that stay exact, int64 [H, chunks]: the sink, and the outliers, whose mean is least
        like one of its own keys (section 4.2)."""
        sink = torch.arange(-(-SINK // self.chunk)).expand(self.heads, -1)
        keys = rope_k.unflatten(0, (-1, self.chunk)).float()
        likeness = torch.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1).amin(1)  # [chunks, H]
        outliers = likeness[sink.shape[1] :].topk(self.outliers, dim=0, largest=False).indices.T + sink.shape[1]
        return torch.cat((sink, outliers), dim=1)

    def compress(self, k: Tensor, rope_k: Tensor, v: Tensor) -> None:
        """Compresses full pages: latents of keys, what the index needs, values."""
        latents = (k.flatten(1).float() - self.mean) @ self.basis.T / self.step
        if self.turbo:
            latents = torch.minimum(torch.maximum(latents.round(), -self.largest_code), self.largest_code)
        self.latents.append(latents)
        if self.turbo:
            centred = (rope_k - self.rope_mean).transpose(0, 1)  # [H, n, d]
            self.index.append(pack_sketch(centred @ self.key_map.float()))
            rotation = random_rotation(v.shape[2], "values")
            self.values.append(self.codec.decode(*self.codec.encode(v, rotation), rotation, v.shape[2]).to(v.dtype))
        else:
            self.index.append((rope_k.unflatten(0, (-1, self.chunk)).mean(1),))  # landmarks [chunks, H, d]
            self.values.append(v)

    # -- a step ------------------------------------------------------------------------------------------------------

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [H_q, d] of one more token, q [H_q, d], k and v [H, d]."""
        if (
            self.length - self.compressed >= LOCAL + PAGE
        ):  # the oldest page of the tail is no longer among the newest tokens
            page_k, page_v = self.tail_k[:PAGE], self.tail_v[:PAGE]
            self.tail_k, self.tail_v = self.tail_k[PAGE:], self.tail_v[PAGE:]
            self.compress(self.rope(page_k, self.compressed, inverse=True), page_k, page_v)
            self.excluded = torch.nn.functional.pad(self.excluded, (0, PAGE // self.chunk))
            self.compressed += PAGE
        q, k = self.rope(q[None], self.length)[0], self.rope(k[None], self.length)
        self.tail_k, self.tail_v = torch.cat((self.tail_k, k)), torch.cat((self.tail_v, v[None]))
        selected, log_weight = self.select(q)  # [H, chunks]: which, and the logarithm of how many each stands for
        self.length += 1
        return torch.cat([self.attend(q, head, selected[head], log_weight[head]) for head in range(self.heads)])

    def select(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The chunks of each kv head that its query heads q [H_q, d] attend to: the best by the index, and for `turbo`
        as many that are sampled, so that they stand for the rest. Together they are a 64th of the context, at least 960
        tokens; two thirds of that for `turbo`, but at least 1,280 tokens where keys are narrow."""
        narrow = self.heads * q.shape[1] < 512
        share, least = (96, 1280 if narrow else 640) if self.turbo else (64, 960)
        chunks = -(-max(least, math.ceil(self.length / share)) // self.chunk)
        if not self.turbo:  # section 4.3: the largest share that a chunk's mean key has of any head's softmax
            landmarks = torch.cat([means for (means,) in self.index]).transpose(0, 1)  # [H, chunks, d]
            logits = q.unflatten(0, (self.heads, -1)) @ landmarks.mT * q.shape[1] ** -0.5
            shares = logits.masked_fill(self.excluded[:, None], -math.inf).softmax(-1).amax(1)
            selected = shares.topk(chunks).indices
            return selected, torch.zeros(selected.shape)
        signs, rest, scale = (torch.cat(planes, dim=1) for planes in zip(*self.index, strict=True))
        scale = scale.masked_fill(self.excluded, EXCLUDED_SCALE)
        # The ops look tokens up by pages; here all pages lie in order.
        signs, rest, scale = (x.unflatten(1, (-1, PAGE)).transpose(0, 1) for x in (signs, rest, scale))
        pages, count = torch.arange(len(signs))[None], torch.tensor([len(signs)])
        sampled = chunks - math.ceil(chunks * (1 - self.sampled))
        seeds = row_seeds(*(np.array([x]) for x in (np.uint64(self.seed), self.length, 0)))
        sampling = Sampling(torch.tensor([sampled]), torch.from_numpy(seeds))
        queries = sketch_queries(q[None], self.query_map[None], torch.tensor([0]))
        coarse = sign_scores(queries, signs, scale, pages, count)  # by signs alone: which runs of 8 tokens to look at
        best = torch.tensor([chunks - sampled])
        selected, log_weight = select_by_sketch(
            queries, coarse, signs, rest, scale, pages, count, best, self.chunk, chunks, sampling, self.layer
        )
        assert log_weight is not None
        return selected[0], log_weight[0]

    def attend(self, q: Tensor, head: int, selected: Tensor, log_weight: Tensor) -> Tensor:
        """Softmax attention [G, d] of a kv head's queries over [sink and outliers | selected | tail]."""
        log_weight, selected = log_weight[selected >= 0], selected[selected >= 0]
        tokens = (selected[:, None] * self.chunk + torch.arange(self.chunk)).flatten()
        k = torch.cat((self.static_k[:, head], self.rebuilt(tokens, head), self.tail_k[:, head]))
        v = torch.cat((self.static_v[:, head], torch.cat(self.values)[tokens, head], self.tail_v[:, head]))
        scores = q.unflatten(0, (self.heads, -1))[head] @ k.T * q.shape[1] ** -0.5
        first = len(self.static_k)
        scores[:, first : first + len(tokens)] += log_weight.repeat_interleave(self.chunk)
        return scores.softmax(-1) @ v

    def rebuilt(self, tokens: Tensor, head: int) -> Tensor:
        """Keys [n, d] of a kv head after RoPE, from their latents."""
        rows = torch.cat(self.latents)[tokens] * self.step @ self.basis + self.mean
        rows = rows.unflatten(1, (self.heads, -1))[:, head]
        return self.rope(rows[:, None], tokens)[:, 0]

    def rope(self, x: Tensor, first: int | Tensor, inverse: bool = False) -> Tensor:
        """x [n, heads, d] rotated to positions from ``first`` on, or to those given (RoPE, arXiv:2104.09864)."""
        position = torch.arange(len(x)) + first if isinstance(first, int) else first
        frequency = self.theta ** (-torch.arange(0, x.shape[2], 2, dtype=torch.float64) / x.shape[2])
        angle = (position[:, None] * frequency).float()[:, None] * (-1 if inverse else 1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
