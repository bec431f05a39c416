"""What is learnt: answers and a little of all text by cross entropy, the base's distributions by their divergence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from training.model import Base, Lora, hidden_states, padded
from training.samples import Tokens

ROWS = 2048
"""Places whose logits are in memory at a time: 49,152 float32 each."""
LM_PLACES = 1024


def answer_places(samples: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column, int64 [n], of the places whose next token is an answer's."""
    rows = [row for row, sample in enumerate(samples) for _ in range(sample.answer)]
    columns = [place for each in samples for place in range(len(each.ids) - each.answer - 1, len(each.ids) - 1)]
    return torch.tensor(rows, device=device), torch.tensor(columns, device=device)


def retrieval_loss(
    base: Base, lora: Lora, theta: float, samples: Sequence[Tokens], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross entropy of the answers' tokens and of ``LM_PLACES`` drawn ones, and the share of samples whose answers
    are greedily right, token by token."""
    ids = padded([sample.ids for sample in samples], base.embedding.device)
    hidden = hidden_states(base, ids, theta, lora)
    row, column = answer_places(samples, ids.device)
    logits = F.linear(hidden[row, column], base.embedding).float()
    targets = ids[row, column + 1]
    right = (logits.argmax(-1) == targets).tolist()
    answers = F.cross_entropy(logits, targets)
    exact, first = 0, 0
    for sample in samples:
        exact += all(right[first : first + sample.answer])
        first += sample.answer
    ends = torch.tensor([len(sample.ids) - 1 for sample in samples])
    drawn_row = torch.randint(len(samples), (LM_PLACES,), generator=generator)
    drawn = (torch.rand(LM_PLACES, generator=generator) * ends[drawn_row]).long()
    drawn_row, drawn = drawn_row.to(ids.device), drawn.to(ids.device)
    logits = F.linear(hidden[drawn_row, drawn], base.embedding).float()
    return answers, F.cross_entropy(logits, ids[drawn_row, drawn + 1]), torch.tensor(exact / len(samples))


def divergence(
    base: Base, lora: Lora, thetas: tuple[float, float], chats: Sequence[Tokens]
) -> tuple[Tensor, list[int]]:
    """KL(base || base with the adapter), nats, float32 [n], at every token of the answers, and how many each chat has.

    Args:
        thetas: RoPE's, of the base and of the student.
    """
    ids = padded([chat.ids for chat in chats], base.embedding.device)
    row, column = answer_places(chats, ids.device)
    with torch.no_grad():
        teacher = hidden_states(base, ids, thetas[0])[row, column]
    student = hidden_states(base, ids, thetas[1], lora)[row, column]
    parts = [
        checkpoint(_divergence, base.embedding, teacher[start : start + ROWS], student[start : start + ROWS],
                   use_reentrant=False)
        for start in range(0, len(row), ROWS)
    ]  # fmt: skip
    return torch.cat(parts), [chat.answer for chat in chats]


def _divergence(head: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    teacher, student = (F.linear(hidden, head).float().log_softmax(-1) for hidden in (teacher, student))
    return (teacher.exp() * (teacher - student)).sum(-1)
