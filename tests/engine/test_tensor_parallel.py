"""Tensor-parallel engines on CPUs: ranks are processes, what they exchange goes through gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from drafting import SUFFIX, counts, draft_by, mostly
from safetensors.torch import save_file
from test_engine import drain, prompt, tokens
from test_mixed_steps import never_joining, paced
from tiers import assert_all_returned
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from shadowkv import SamplingParams
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.parallel.calls import Writer
from shadowkv.engine.parallel.driver import DriverRunner
from shadowkv.engine.parallel.ranks import Ranks
from shadowkv.engine.parallel.worker import Worker
from shadowkv.engine.process.facts import Launch
from shadowkv.engine.process.main import load_cores
from shadowkv.engine.selections import SelectionRecord
from shadowkv.engine.speculation.gate import Account
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.layers.group import RankFailure
from shadowkv.models import load_config, load_model
from shadowkv.models.registry import family
from tests.local_engine import LocalEngine
from tests.models.families import build

SIZES = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 32}


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tiny, tmp_path_factory.mktemp("heads"))


def write_heads(tiny: Path, directory: Path) -> Path:
    """Files of a model with random weights and SmolLM2's 9 and 3 heads: what is made up for `dummy` each rank makes up
    for itself."""
    config = json.loads((tiny / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | SIZES))
    made = load_model(directory, load_format="dummy", dtype=torch.float32)
    parameters = made.model.state_dict()
    found = {
        name: parameters[target.parameter][target.start : target.stop].clone()
        for name, target in family("llama").targets(load_config(directory)).items()
    }
    save_file(found, directory / "model.safetensors")
    Tokenizer(WordLevel({f"t{n}": n for n in range(300)}, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


@contextmanager
def engine_of(model: Path, size: int, **options: Any) -> Iterator[Engine]:
    settings = {"max_num_seqs": 4, "max_cached_seqs": 2, "kv_dense_below": 0, "max_model_len": 2048, **options}
    engine = Engine(EngineConfig(model=str(model), tensor_parallel_size=size, **settings))
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: Engine) -> dict[str, list[TokenOutput]]:
    """Of prompts that share a start, one that is given up in the middle, sampled and greedy, one with its own
    scores."""
    shared = prompt(0, 925)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)  # a page is compressed: 96 > 93
    sampled = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True, logprobs=1)
    outputs: dict[str, list[TokenOutput]] = {}
    engine.add_request("long", shared, greedy)
    engine.add_request("short", prompt(1, 20), sampled)
    outputs |= drain(engine)
    engine.add_request("shares", shared + prompt(2, 30), greedy)
    engine.add_request("given up", prompt(3, 1000), greedy)
    began = engine.step()  # which may have tokens already
    engine.abort("given up")
    outputs |= drain(engine)
    outputs["shares"] = [one for one in began if one.request_id == "shares"] + outputs.get("shares", [])
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, cache_prompt=False)
    engine.add_request("scored", prompt(4, 40), scored)
    return outputs | drain(engine)


def chances(outputs: list[TokenOutput]) -> list[float]:
    return [one.logprob for output in outputs for one in output.logprobs or []]


@pytest.mark.parametrize(("size", "kv"), [(2, "full"), (3, "shadowkv:place=device")])
def test_ranks_answer_as_one(model: Path, size: int, kv: str) -> None:
    """What each rank has of a compressed cache, one device has in groups of keys."""
    alone = kv if kv == "full" else f"{kv},key_groups={size}"
    with engine_of(model, 1, kv=alone) as engine:
        expected = answers(engine)
    with engine_of(model, size, kv=kv) as engine:
        found = answers(engine)
        assert engine.cache.free.within(engine.cache.total)
        assert_all_returned(engine)
    assert found.keys() == expected.keys() == {"long", "short", "shares", "scored"}
    assert found["shares"][-1].cached_tokens >= 64
    for name, outputs in expected.items():
        assert tokens(found[name]) == tokens(outputs)
        assert chances(found[name]) == pytest.approx(chances(outputs), abs=1e-3)
    scores = [
        [one.logprob for one in output["scored"][0].prompt_logprobs or [] if one is not None]
        for output in (found, expected)
    ]
    assert len(scores[0]) == 39
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_ranks_compute_prompts_in_the_pass_of_a_step(model: Path) -> None:
    """Of which one is sampled, and one goes on where another's start is cached."""
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=1)
    sampled = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    found, shared = [], prompt(0, 300)
    for size in (1, 2):
        with engine_of(
            model, size, kv="shadowkv:place=device,key_groups=2" if size == 1 else "shadowkv:place=device"
        ) as engine:
            engine.add_request("first", shared, greedy)
            outputs = engine.step()
            while not engine.scheduler.running:
                outputs += engine.step()
            if size == 1:
                never_joining(engine)
            steps = paced(engine)
            engine.add_request("sampled", prompt(1, 90), sampled)
            engine.add_request("shares", shared[:256] + prompt(2, 30), greedy)
            while engine.has_work:
                outputs += engine.step()
            joined = [sorted(prompts) for _, prompts in steps if prompts]
            assert joined == ([] if size == 1 else [[30, 90]])
            assert_all_returned(engine)
        names = ("first", "sampled", "shares")
        found.append({name: [output for output in outputs if output.request_id == name] for name in names})
    for name in found[0]:
        assert tokens(found[0][name]) == tokens(found[1][name])
        assert chances(found[0][name]) == pytest.approx(chances(found[1][name]), abs=1e-3)


def note(runner: Runner, sequences: list[CachedSequence], folder: str) -> list[int]:
    """What a rank has, in a file of its own."""
    lengths = [sequence.length for sequence in sequences]
    Path(folder, str(runner.model.group.rank)).write_text(f"{runner.cache.shape.num_kv_heads} {lengths}")
    return lengths


def test_all_ranks_call_a_function(model: Path, tmp_path: Path) -> None:
    with engine_of(model, 2) as engine:
        engine.add_request("one", prompt(0, 70), SamplingParams(max_tokens=9, ignore_eos=True))
        while not engine.scheduler.running:
            engine.step()
        (sequence,) = (running.sequence for running in engine.scheduler.running)
        length = sequence.length
        assert engine.runner.collective_rpc(note, [sequence], str(tmp_path)) == [length]
        drain(engine)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"0": f"2 [{length}]", "1": f"1 [{length}]"}


def workers() -> list[int]:
    """Processes of other ranks that this one has started."""
    listed = subprocess.run(["pgrep", "-f", "-P", str(os.getpid()), "parallel.worker"], capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a request, with one clear error, and again where nothing is at work."""
    with engine_of(model, 2) as engine:
        engine.add_request("one", prompt(0, 900), SamplingParams(max_tokens=2000 - 900, ignore_eos=True))
        (rank,) = workers()
        os.kill(rank, signal.SIGTERM)  # which a service manager sends to all: rank 0 may still have to answer
        for _ in range(3):
            engine.step()
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankFailure, match=r"tensor-parallel rank 1 has ended \(SIGKILL: "):
            drain(engine)
        assert time.monotonic() - began < 300  # the group itself waits half an hour
        engine.abort("one")
    assert not workers()
    served = LocalEngine(EngineConfig(model=str(model), tensor_parallel_size=2, max_model_len=256, max_num_seqs=2))
    served.start()
    (rank,) = workers()
    os.kill(rank, signal.SIGKILL)
    end = time.monotonic() + 300
    while served.is_alive and time.monotonic() < end:
        time.sleep(0.01)
    assert not served.is_alive
    served.shutdown()
    assert not workers()
    assert [
        one for one in caplog.messages if one.startswith("the engine has died: tensor-parallel rank 1 has ended (S")
    ]
    assert not any(record.exc_info for record in caplog.records)


def test_a_rank_that_ends_before_the_meeting_is_not_waited_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    config = EngineConfig(model=str(model), tensor_parallel_size=2, device="cpu")
    with pytest.raises(ChildProcessError, match=r"tensor-parallel rank 1 has ended \(exit code 1\)"):
        load_cores(Launch(config, None, str(tmp_path)))


def test_a_group_of_somebody_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"already has a torch\.distributed group"):
            Engine(EngineConfig(model=str(model), tensor_parallel_size=2, device="cpu"))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_step_computed_without_a_rank_is_told_nobody(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a rank that is gone is noticed while a step is under way, which then ends with anything. And CUDA graphs
    go before the ranks: NCCL waits for those that have collectives."""
    done: list[str] = []
    ranks = Ranks.__new__(Ranks)
    ranks.failure, ranks._pending = None, []
    monkeypatch.setattr(ranks, "close", lambda: done.append("ranks"))
    with engine_of(model, 1) as engine:
        engine._ranks = ranks
        engine.add_request("one", prompt(0, 20), SamplingParams(max_tokens=8, ignore_eos=True))
        while not engine.step():  # a slow machine may take several for the prompt
            pass
        take = engine._take_tokens

        def noticed(*args: Any, **options: Any) -> list[TokenOutput]:
            ranks.failure = "tensor-parallel rank 1 has ended (SIGKILL)"
            return take(*args, **options)

        monkeypatch.setattr(engine, "_take_tokens", noticed)
        with pytest.raises(RankFailure, match=r"rank 1 has ended \(SIGKILL\)"):
            engine.step()
        monkeypatch.setattr(engine.runner, "graphs", SimpleNamespace(drop=lambda: done.append("graphs"), compress=None))
    assert done == ["graphs", "ranks"]


def test_a_recorded_step_has_no_graph_on_any_rank(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 runs it without: the sums of a graph are of more rows, and a dry run's are more sums."""
    with engine_of(model, 1) as engine:
        sent: list[bytes] = []
        ranks = SimpleNamespace(queue=sent.append, send=sent.append, together=nullcontext, writer=Writer())
        driver = DriverRunner(engine.runner.model, engine.cache, cast(Any, ranks))
        other = Runner(engine.runner.model, engine.cache)
        monkeypatch.setattr(other, "graphs", SimpleNamespace(compress=None))  # which can not run anything
        worker, sequence = Worker(other), engine.cache.allocate(3, 8)
        sequence.seed = 2**64 - 1
        sent.append(ranks.writer.write("cache", "allocate", (3, 8), sequence))
        with torch.inference_mode():
            for _ in driver.prefill([(sequence, [5, 6, 7])]):
                pass
            driver.decode([sequence], [8], None, SelectionRecord(engine.cache, [sequence], [0]))
        worker.run_commands(sent)
        ((number, own),) = worker.reader.made.items()
        assert own.length == sequence.length == 4 and own.seed == sequence.seed
        assert number == 0, "of the prefill, which has ended, nothing is left"
        worker.run_commands([ranks.writer.release("cache", sequence)])
        assert not worker.reader.made


@pytest.mark.slow
def test_ranks_end_with_the_process_they_belong_to(model: Path) -> None:
    script = (
        "import os, sys\n"
        "from shadowkv import LLM\n"
        f"llm = LLM({str(model)!r}, tensor_parallel_size=2, max_model_len=256, max_num_seqs=2)\n"
        "print(llm.engine._ranks._processes[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert ended.returncode == -signal.SIGKILL
    rank, end = int(ended.stdout.split()[-1]), time.monotonic() + 300
    while Path(f"/proc/{rank}/cmdline").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{rank}/cmdline").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        ({"device": "cuda:1"}, "device='cuda:1' is one GPU"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Engine(EngineConfig(**{"tensor_parallel_size": 2, **options}))


def test_what_a_rank_cannot_load_is_said_once(model: Path) -> None:
    with (
        pytest.raises(ValueError, match="place='host' needs equally many kv heads on every rank"),
        engine_of(model, 2, kv="shadowkv"),
    ):
        pass
    assert not workers()


def test_ranks_verify_drafts_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 drafts, and tells the other what to append and what to remove."""
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=5, ignore_eos=True)

    def said(engine: Engine) -> dict[str, list[int]]:
        for name, length in (("a", 60), ("b", 300)):
            engine.add_request(name, prompt(length, length), params)
        found = {name: tokens(outputs) for name, outputs in drain(engine).items()}
        assert_all_returned(engine)
        return found

    with engine_of(model, 2, kv="shadowkv:place=device") as engine:
        wanted = said(engine)
    draft_by(monkeypatch, mostly(wanted))
    with engine_of(model, 2, kv="shadowkv:place=device", speculative_config=SUFFIX) as engine:
        assert said(engine) == wanted
        assert min(counts(engine)) > 20


def test_ranks_verify_drafts_of_recurrent_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank keeps and removes the states of its own heads."""
    build("qwen3_5", tmp_path, {"max_position_embeddings": 2048, "head_dim": 16, "vocab_size": 300})
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)

    def said(engine: Engine) -> dict[str, list[int]]:
        for name, length in (("a", 60), ("b", 300)):
            engine.add_request(name, prompt(length, length), params)
        found = {name: tokens(outputs) for name, outputs in drain(engine).items()}
        engine.add_request("later", [*prompt(300, 300), *found["b"], *prompt(1, 20)], params)
        return found | {"later": tokens(drain(engine)["later"])}

    with engine_of(tmp_path, 2, kv="full") as engine:
        wanted = said(engine)
    draft_by(monkeypatch, mostly(wanted))
    with engine_of(tmp_path, 2, kv="full", speculative_config=SUFFIX) as engine:
        assert said(engine) == wanted
        assert min(counts(engine)) > 20


def test_ranks_draft_with_their_own_heads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses a draft's tokens. The other ranks read them for the next draft step."""
    monkeypatch.setattr(Account, "length", lambda self, drafts, *others: max(most for _, most in drafts))
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=5, ignore_eos=True)

    def said(engine: Engine) -> dict[str, list[int]]:
        for length in (450, 300):
            engine.add_request(str(length), prompt(length, length), params)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    with engine_of(model, 2, kv="full") as engine:
        wanted = said(engine)
    with engine_of(model, 2, kv="full-speculative:budget=2048") as engine:  # draft steps attend to everything
        assert said(engine) == wanted
        assert counts(engine)[0] > 100 and counts(engine)[1] == 0
        assert_all_returned(engine)


def test_ranks_compute_narrow_steps(model: Path) -> None:
    """Each rank searches its own heads, and removes the token of a narrow step."""
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=5, ignore_eos=True)

    def said(engine: Engine) -> dict[str, list[int]]:
        for length in (450, 300):
            engine.add_request(str(length), prompt(length, length), params)
        return {name: tokens(outputs) for name, outputs in drain(engine).items()}

    with engine_of(model, 2, kv="turbo:budget=32") as engine:
        wanted = said(engine)
    with engine_of(model, 2, kv="turbo:budget=32", quality_meter=0.5) as engine:
        assert said(engine) == wanted
        checked = engine.stats().checked
        assert checked is not None and checked.tokens > 50 and checked.kl > 0
