"""The fetch buffer: bytes are right, tables are consistent, and the least recently used chunks are replaced first."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.fetch_chunks import reference
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.page import PAGE


@dataclass
class Problem:
    """Sequences with shuffled pages and slots, and a stream of selections that repeat a share of the previous one."""

    host: Tensor
    pages: Tensor
    slots: Tensor
    buffer: ChunkBuffer
    last: Tensor

    @classmethod
    def random(
        cls, batch: int, heads: int, k: int, entries: int, num_pages: int, rows: Field, device: str = "cpu"
    ) -> "Problem":
        """``rows`` is the shape (C, c, w) of a head. In a page, other fields with random bytes lie before and after."""
        tier = Tier(
            "host", 1, 70 * 256 + rows.nbytes * heads, batch * num_pages + 3, torch.device(device), device != "cpu"
        )
        tier.arena.copy_(torch.randint(0, 256, tier.arena.shape, dtype=torch.uint8))
        pages = torch.tensor(tier.allocate(tier.num_blocks))[torch.randperm(tier.num_blocks)[: batch * num_pages]]
        pages = pages.view(batch, num_pages).to(device)
        views = tier.views([Field("before", (24,), torch.uint8), replace(rows, shape=(heads, *rows.shape))])
        host = views[rows.name][0]
        slots = torch.randperm(batch + 2)[:batch].to(device)
        chunks = num_pages * rows.shape[0]
        buffer = ChunkBuffer.empty(batch + 2, entries, chunks, host)
        last = torch.rand(batch, heads, chunks, device=device).topk(k).indices
        return cls(host, pages, slots, buffer, last)

    def select(self, share: float, budget: Tensor | None = None) -> Tensor:
        """The next selection, with about ``share`` of the last one, and at most ``budget`` [B] chunks per row."""
        k = self.last.shape[-1]
        weights = torch.rand(*self.last.shape[:-1], self.buffer.entry.shape[-1], device=self.last.device)
        kept = torch.rand(self.last.shape, device=self.last.device) < share
        self.last = weights.scatter_add_(-1, self.last, kept.float()).topk(k).indices
        if budget is None:
            return self.last
        column = torch.arange(k, device=self.last.device)
        return self.last.masked_fill(column >= budget.to(self.last.device)[:, None, None], -1)

    def fetch(self, op: Callable[..., Tensor], selected: Tensor) -> Tensor:
        """Calls the op and checks all that it promises."""
        buffer = self.buffer
        before = clone(buffer)
        entries = op(self.host, self.pages, self.slots, selected, buffer)
        assert entries.shape == selected.shape
        assert entries.dtype == torch.int64
        there = selected >= 0
        assert torch.equal(entries >= 0, there)

        # Bytes, and what the tables say of the selected chunks.
        row, head, column = there.nonzero(as_tuple=True)
        chunk, slot, entry = selected[row, head, column], self.slots[row], entries[row, head, column]
        chunks_of_page = self.host.shape[2]
        expected = self.host[self.pages[row, chunk // chunks_of_page], head, chunk % chunks_of_page]
        assert torch.equal(buffer.rows[slot, head, entry].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(buffer.owner[slot, head, entry].long(), chunk)
        assert torch.equal(buffer.entry[slot, head, chunk].long(), entry)
        selected_now = torch.zeros_like(buffer.owner, dtype=torch.bool)
        selected_now[slot, head, entry] = True
        assert int(selected_now.sum()) == len(entry)

        # Steps and uses.
        calls = torch.zeros_like(buffer.step)
        calls[slot, head] = 1
        assert torch.equal(buffer.step, before.step + calls)
        assert torch.equal(buffer.used, torch.where(selected_now, buffer.step[..., None], before.used))

        # Owners and entries are each other's inverse.
        owned = buffer.owner >= 0
        assert torch.equal(owned, buffer.used > 0)
        at = torch.arange(buffer.owner.shape[-1], device=owned.device).expand_as(owned)
        assert torch.equal(buffer.entry.gather(-1, buffer.owner.clamp(min=0).long())[owned].long(), at[owned])
        assert torch.equal((buffer.entry >= 0).sum(-1), owned.sum(-1))

        # What was fetched took the places of the least recently used; all else is where it was.
        changed = buffer.owner != before.owner
        assert bool((changed <= selected_now).all())
        assert torch.equal(buffer.rows[~changed].view(torch.uint8), before.rows[~changed].view(torch.uint8))
        newest_gone = before.used.masked_fill(~changed, -1).amax(-1)
        oldest_left = before.used.masked_fill(selected_now, 2**31 - 1).amin(-1)
        assert bool((newest_gone <= oldest_left).all())
        assert (buffer.counters - before.counters).tolist() == [len(entry), int(changed.sum())]
        return entries


def clone(buffer: ChunkBuffer) -> ChunkBuffer:
    return ChunkBuffer(*(getattr(buffer, field.name).clone() for field in fields(buffer)))


def bf16_rows(chunk: int, dim: int) -> Field:
    return Field("rows", (PAGE // chunk, chunk, dim), torch.bfloat16)


def byte_rows(chunk: int, width: int) -> Field:
    return Field("rows", (PAGE // chunk, chunk, width), torch.uint8)


def check_stream(problem: Problem, op: Callable[..., Tensor], steps: int) -> None:
    """Checks steps with ragged budgets, padding rows that share a slot, and a slot that gets a new sequence."""
    batch, _, k = problem.last.shape
    for step in range(steps):
        budget = torch.randint(0, k + 1, (batch,))
        budget[0] = k
        if batch > 3:
            budget[1] = budget[2] = 0
            problem.slots[2] = problem.slots[1]
        if step == steps // 2:
            problem.buffer.reset(int(problem.slots[0]))
            problem.pages[0] = problem.pages[0].flip(0)
        problem.fetch(op, problem.select(0.6, budget))


def check_exact_lru(problem: Problem, op: Callable[..., Tensor], steps: int) -> None:
    """Selects one chunk per step, so that no two entries are equally old, and compares all misses with a plain LRU."""
    entries, missed = problem.buffer.owner.shape[-1], 0
    plain: OrderedDict[int, None] = OrderedDict()
    for _ in range(steps):
        selected = (torch.randn(1, 1, 1) * entries / 2 + 50).round().long().clamp(0, 99).to(problem.slots.device)
        problem.fetch(op, selected)
        chunk = int(selected)
        missed += chunk not in plain
        plain[chunk] = None
        plain.move_to_end(chunk)
        if len(plain) > entries:
            plain.popitem(last=False)
        assert problem.buffer.counters.tolist()[1] == missed


@pytest.mark.parametrize("entries", [10, 13, 30])
@pytest.mark.parametrize("rows", [bf16_rows(8, 16), byte_rows(4, 12), bf16_rows(1, 5)], ids=["8x16", "4x12", "1x5"])
def test_a_stream_of_ragged_selections(seed, entries, rows):
    check_stream(Problem.random(5, 3, 10, entries, 7, rows), reference.fetch_chunks, steps=12)


def test_one_chunk_a_step_like_a_plain_lru(seed):
    check_exact_lru(Problem.random(1, 1, 1, 7, 13, bf16_rows(8, 4)), reference.fetch_chunks, steps=60)


def test_a_selection_that_repeats_reads_nothing(seed):
    problem = Problem.random(2, 2, 10, 10, 4, bf16_rows(8, 16))
    selected = problem.select(0)
    entries = problem.fetch(reference.fetch_chunks, selected)
    problem.host.zero_()
    again = reference.fetch_chunks(problem.host, problem.pages, problem.slots, selected.flip(-1), problem.buffer)
    assert torch.equal(again, entries.flip(-1))
    assert problem.buffer.counters.tolist() == [80, 40]
    assert bool(problem.buffer.rows.view(torch.uint8).any())


def test_rows_without_a_selection_touch_nothing(seed):
    problem = Problem.random(4, 2, 5, 8, 4, bf16_rows(8, 16))
    problem.slots[:] = 1
    entries = problem.fetch(reference.fetch_chunks, torch.full((4, 2, 5), -1))
    assert torch.equal(entries, torch.full((4, 2, 5), -1))
    assert problem.fetch(reference.fetch_chunks, problem.last[..., :0]).shape == (4, 2, 0)


def test_reset_empties_one_slot_of_all_layers():
    host = torch.zeros(3, 2, 8, 8, 4)
    one = ChunkBuffer.empty(3, 6, 20, host)
    tensors = [getattr(one, field.name) for field in fields(one)]
    layers = ChunkBuffer(*(tensor.expand(4, *tensor.shape).clone() for tensor in tensors))
    for tensor in (layers.owner, layers.entry, layers.used, layers.step):
        tensor.fill_(5)
    layers.reset(1)
    for name, empty in {"owner": -1, "entry": -1, "used": 0, "step": 0}.items():
        tensor = getattr(layers, name)
        assert bool((tensor[:, 1] == empty).all())
        assert bool((tensor[:, 0] == 5).all() and (tensor[:, 2] == 5).all())
