"""Rules by which steps select tokens: their errors are those of samples, and a fixed number is what a step takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.step_budgets.__main__ import Follower, summarise
from benchmarks.step_budgets.rules import CANDIDATES, RULES, ByRule, Rule, numbers_of_halves, probabilities
from robustness.tiny_model import tiny_model
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.startup.loading import load_from_config
from shadowkv.kvcache import parts
from shadowkv.kvcache.parts.index_sketch import Sketch
from shadowkv.ops.sampling import systematic_sample


def shares_of(tokens: int, sharpness: float) -> torch.Tensor:
    """Shares [1, 2, 3, tokens] of a softmax, with another part outside."""
    logits = sharpness * torch.randn(1, 2, 3, tokens, generator=torch.Generator().manual_seed(1))
    return 0.7 * logits.softmax(-1)


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_probabilities_have_the_error_or_the_number(sharpness: float) -> None:
    shares = shares_of(3000, sharpness).expand(2, -1, -1, -1)
    found = probabilities(shares, torch.tensor([0.02, 400]), torch.tensor([True, False]))
    assert found.sum(-1)[1].tolist() == pytest.approx([400, 400], rel=1e-3)
    variance = (shares.square() * (1 / found - 1).unsqueeze(2)).sum(-1).amax(-1)
    assert (variance[0].sqrt() <= 0.02).all() and (variance[0].sqrt() > 0.018).all()


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_numbers_of_halves_have_the_error_of_their_samples(sharpness: float) -> None:
    """Half of the tokens are the best ones and half are sampled by flattened weights, many times over."""
    shares, error, times = shares_of(3000, sharpness), 0.03, 400
    log_weight = 0.7 * shares.amax(2).log2()
    numbers = numbers_of_halves(log_weight, shares, torch.tensor([error]))
    assert CANDIDATES[0] < numbers.min() and numbers.max() < 2000
    for head, number in enumerate(numbers[0]):
        values = log_weight[0, head].half().expand(times, -1)
        top, whole, one = (torch.full((times,), x) for x in (number - number // 2, number, 1.0))
        uniform = torch.randint(2**32, (times,), generator=torch.Generator().manual_seed(head))
        taken, chance = systematic_sample(values, top, whole, one, uniform)
        sums = torch.where(taken, 1 / chance, 0).float() @ shares[0, head].T
        assert 0.4 * error < float(sums.std(0).max()) < 1.1 * error


def test_rows_follow_full_attention(tmp_path, capsys, monkeypatch) -> None:
    """A fixed number of ``halves`` selects what a step of that budget selects."""
    select, row = ByRule.select, RULES.index(Rule("halves", "sketch", "fixed", 240))

    def checked(self, store, layer, q, batch):
        selected = select(self, store, layer, q, batch)
        counts = torch.full_like(batch.budget, 120)
        step = replace(batch, budget=counts, sampling=replace(batch.sampling, counts=counts))
        own = Sketch.select(self, store, layer, q, step)
        found = (selected.chunks[row], selected.log_weight[row]), (own.chunks[row], own.log_weight[row])
        chunks = [chunk[chunk >= 0] for chunk, _ in found]
        assert torch.equal(*chunks) and torch.equal(*(weight[chunk >= 0] for chunk, weight in found))
        return selected

    monkeypatch.setattr(ByRule, "select", checked)
    monkeypatch.setitem(parts.REGISTERED["index"], "by-rule", ByRule)  # for this test alone
    with tiny_model() as path:
        loaded = load_from_config(
            EngineConfig(model=str(path), max_model_len=640, load_format="dummy", dtype="float32")
        )
    prompt = torch.randint(5, 128, (544,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = list(Follower(loaded, 560).follow(prompt, 4, set(), math.inf))
    assert [row["amount"] for row in rows] == [f"{rule.amount:g}" for rule in RULES]
    tokens = {(row["draw"], row["scores"], row["number"], row["amount"]): float(row["tokens"]) for row in rows}
    assert 200 < tokens["halves", "sketch", "fixed", "240"] <= 240
    assert tokens["halves", "sketch", "error", "0.04"] < tokens["halves", "sketch", "error", "0.01"]
    assert tokens["halves", "sketch", "mean", "0.02"] == pytest.approx(
        tokens["halves", "sketch", "error", "0.02"], rel=0.3
    )
    for scores in ("sketch", "exact"):
        assert 230 < tokens["shares", scores, "fixed", "240"] < 241
    all_read = [row for row in rows if float(row["tokens"]) == tokens["halves", "sketch", "fixed", "3840"]]
    assert all_read and all(float(row["kl"]) < 1e-6 for row in all_read)
    file = tmp_path / "rows.csv"
    about = {"length": "544", "text": "random", "prompt": "0"}
    lines = [",".join((about | row).values()) for row in rows]
    file.write_text("\n".join([",".join(about | rows[0]), *lines]) + "\n")
    summarise(file)
    assert capsys.readouterr().out.count("| halves | sketch | error | 0.04 |") == 2
