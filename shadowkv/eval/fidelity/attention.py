"""What attention of one layer loses under a policy: the exact attention mass it misses, and the error of its output.

Both use the policy's own queries, compared with all the keys and values that full attention has cached. Those of
generated tokens also differ because of the policy's earlier errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.eval.fidelity.observed import Attended, ObservedCache, spread
from shadowkv.kvcache.decode.batch import DecodeBatch
from shadowkv.kvcache.inspection import exact_elsewhere, exact_keys, rotated_queries
from shadowkv.kvcache.policy.spec import PAGE


def exact_weights(cache: ObservedCache, layer: int, q: Tensor, batch: DecodeBatch) -> Tensor:
    """Softmax over all positions of a cache of dense sequences, float32 [B, H, G, S], 0 past a sequence's end.

    Args:
        q: [B, H_q, d], before RoPE.
    """
    q = rotated_queries(cache, q, batch).float() * q.shape[-1] ** -0.5
    within, rows = torch.arange(PAGE, device=q.device), []
    for query, pages, counts in zip(q, batch.pages, batch.counts, strict=True):  # one by one, to bound the copies
        keys = exact_keys(cache, layer, pages).float()  # [H, S, d]
        scores = query.unflatten(0, (len(keys), -1)) @ keys.transpose(1, 2)
        rows.append(scores.masked_fill((within >= counts[:, None]).flatten(), float("-inf")).softmax(-1))
    return torch.stack(rows)


def attended_positions(cache: ObservedCache, seen: Attended, length: int) -> Tensor:
    """Which of the first ``length`` positions a step read, bool [B, H, length]; those past a sequence's end count."""
    shape, sealed = cache.shape, seen.batch.sealed
    attended = torch.ones(len(seen.q), shape.num_kv_heads, length, dtype=torch.bool, device=seen.q.device)
    if sealed is None or seen.selected is None:
        return attended
    selected = seen.batch.of_sealed(seen.selected)
    elsewhere = exact_elsewhere(cache, seen.layer, sealed)  # exact, so read
    chunks = elsewhere.shape[-1]
    chosen = torch.zeros(*elsewhere.shape[:2], chunks + 1, dtype=torch.bool, device=elsewhere.device)
    chosen.scatter_(2, selected.where(selected >= 0, chunks), True)
    tail = torch.arange(chunks, device=chosen.device) >= sealed.num_chunks[:, None, None]
    read = (elsewhere | chosen[..., :-1] | tail).repeat_interleave(cache.spec.chunk, dim=2)[..., :length]
    of_sealed = seen.batch.of_sealed(attended)
    of_sealed[..., : read.shape[-1]] = read
    return spread(seen.batch, attended, of_sealed)


class AttentionLoss:
    """Means over steps, for each layer and row.

    Args:
        exact: the cache of full attention, which decodes each step first.
        cache: the policy's, with the same sequences.
        rows: number of sequences.
    """

    def __init__(self, exact: ObservedCache, cache: ObservedCache, rows: int) -> None:
        self.exact, self.cache = exact, cache
        shape = (cache.shape.num_layers, rows)
        self._recall, self._error = (torch.zeros(shape, dtype=torch.float64, device=cache.device) for _ in range(2))
        self._steps = [0] * cache.shape.num_layers

    def take(self, seen: Attended) -> None:
        """Adds one layer of a step."""
        assert self.exact.batch is not None, "full attention comes first"
        weights = exact_weights(self.exact, seen.layer, seen.q, self.exact.batch)
        read = attended_positions(self.cache, seen, weights.shape[-1])
        self._recall[seen.layer] += (weights * read.unsqueeze(2)).sum(-1).mean((1, 2))
        wanted = self.exact.attend(seen.layer, seen.q, self.exact.batch).flatten(1).double()
        self._error[seen.layer] += (seen.out.flatten(1).double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        self._steps[seen.layer] += 1

    def mass_recall(self) -> Tensor:
        """Share of the exact softmax on the tokens that were read, mean over query heads, [num_layers, rows]."""
        return (self._recall / self._steps[0]).cpu()

    def output_error(self) -> Tensor:
        """Norm of the difference to the exact output over the norm of that, all heads joined, [num_layers, rows]."""
        return (self._error / self._steps[0]).cpu()
