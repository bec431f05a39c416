"""Drafts of a layer of the checkpoint: they are what a plain loop drafts, and answers are those without drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from draft_heads import Theirs, build_with_head
from families import build
from folding_ops import fold

from shadowkv import LLM, SamplingParams
from shadowkv.engine import warmup
from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import Engine
from shadowkv.engine.execution import cuda_graphs, forward
from shadowkv.engine.execution.cuda_graphs import CudaGraphs
from shadowkv.engine.execution.runner import Runner
from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.scheduling.head_drafts import HeadDrafts
from shadowkv.engine.speculation.gate import Account
from shadowkv.engine.startup.sizing import head_bytes
from shadowkv.kvcache.decode import planning
from shadowkv.models import load_model
from shadowkv.wording import SettingsError

LONG = {"max_position_embeddings": 1024, "head_dim": 16}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
KINDS = [
    GREEDY,
    SEEDED,
    replace(GREEDY, max_tokens=2),
    replace(SEEDED, stop_token_ids=tuple(range(3, 6))),
    replace(GREEDY, repetition_penalty=1.3),
    replace(SEEDED, logprobs=2),
    replace(SEEDED, top_k=5, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Theirs]:
    """A model whose head knows nothing of it."""
    path = tmp_path_factory.mktemp("unlike")
    return path, build_with_head("glm4_moe", path, **LONG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Theirs]:
    """A model whose head is right about two times in five."""
    path = tmp_path_factory.mktemp("glm4_moe")
    return path, build_with_head("glm4_moe", path, adds=0.01, **LONG)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Theirs]:
    """A model with recurrent states, from which rejected tokens are removed."""
    path = tmp_path_factory.mktemp("qwen3_5")
    return path, build_with_head("qwen3_5", path, adds=0.01, max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that draft whatever it costs, and packs of prompts without a clock."""
    monkeypatch.setattr(Account, "length", lambda self, drafts, *others: max(most for _, most in drafts))
    for name in ("TOKEN_GAP", "QUEUED_TOKEN_GAP", "PACKED_TOKEN_GAP", "IDLE_PREFILL_SECONDS"):
        monkeypatch.setattr(f"shadowkv.engine.engine.{name}", 1e6)


OP_BY_OP = {"decode_layers": "reference"}
"""Backends with which a step of a hybrid calls the ops that are watched."""


def engine_of(
    path: Path, drafts: dict[str, Any] | None = MTP, backends: dict[str, str] | None = None, **options: Any
) -> Engine:
    settings = {"kv": "full", "max_num_seqs": 8, "max_model_len": 512, "dtype": "float32", **options}
    return Engine(EngineConfig(model=str(path), speculative_config=drafts, **settings), backends=backends)


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 90) for _ in range(length)]


def drain(engine: Engine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def counts(engine: Engine) -> tuple[int, int]:
    """Drafted tokens, and those that were accepted."""
    drafting = engine.decode_steps.speculation
    assert isinstance(drafting, HeadDrafts)
    return drafting.stats.num_draft_tokens, drafting.stats.num_accepted_tokens


class Seen(NamedTuple):
    """A draft, and what was known of its request."""

    prompt: list[int]
    cached: int
    answer: list[int]
    draft: list[int]

    def is_theirs(self, theirs: Theirs) -> bool:
        """Whether the draft is that of a plain loop, which computes everything anew for each draft. The loop begins at
        the first new token of the prompt, or, in a longer prompt, at the first one of the window."""
        known, first = [*self.prompt, *self.answer], max(self.cached, len(self.prompt) - theirs.window)
        return self.draft == theirs.draft(known[first:], theirs.hidden(known)[first:-1], len(self.draft))


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Returns a list to which all drafts will be added."""
    drafting, seen = engine.decode_steps.speculation, list[Seen]()
    assert isinstance(drafting, HeadDrafts)
    given = drafting.drafts

    def spy(requests: Any, *others: Any) -> list[list[int]]:
        drafts = given(requests, *others)
        for one, draft in zip(requests, drafts, strict=False):
            seen.append(Seen(one.prompt_token_ids, one.cached_tokens, list(one.output_token_ids), draft))
        return drafts

    monkeypatch.setattr(drafting, "drafts", spy)
    return seen


@pytest.mark.parametrize("kind", ["model", "unlike", "hybrid"])
def test_drafts_are_those_of_a_plain_loop(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind packed prompts, from their first tokens on."""
    path, theirs = request.getfixturevalue(kind)
    engine = engine_of(path)
    texts, seen = {"a": prompt(1, 70), "b": prompt(2, 9)}, watch(engine, monkeypatch)
    for name, text in texts.items():
        engine.add_request(name, text, replace(GREEDY, max_tokens=60))
    said = {tuple(texts[name]): tokens(outputs) for name, outputs in drain(engine).items()}
    assert len(seen) > 40 and all(len(one.draft) == 3 for one in seen if len(one.answer) < 56)
    assert min(len(one.answer) for one in seen) == 1, "the first token is drafted behind, too"
    right, wrong, accepted = 0, 0, list[int]()
    for one in seen:
        assert one.is_theirs(theirs), f"behind {len(one.answer)} tokens"
        following = said[tuple(one.prompt)][len(one.answer) : len(one.answer) + len(one.draft)]
        agree = next((at for at, pair in enumerate(zip(one.draft, following)) if pair[0] != pair[1]), len(following))
        right, wrong = right + agree, wrong + len(one.draft) - agree
        accepted.append(agree)
    assert counts(engine) == (right + wrong, right)
    if kind == "model":
        assert {0, 1, 2, 3} == set(accepted)


@pytest.mark.parametrize(("kind", "graphs"), [("unlike", False), ("unlike", True), ("hybrid", False)])
@pytest.mark.parametrize("window", [2048, 100, 40])
def test_prompts_are_read_however_they_are_computed(
    kind: str, graphs: bool, window: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, packed and in a step of others, also in a graph, and with log-probabilities. The window is longer than
    the prompts, or shorter, or shorter than the last queries that other policies learn from."""
    monkeypatch.setattr("shadowkv.models.configs.model_config.DRAFT_WINDOW", window)
    monkeypatch.setitem(forward.BLOCK_TOKENS, "cpu", 64)
    path, theirs = request.getfixturevalue(kind)
    engine = engine_of(path, device="cpu")
    of_model = give_graphs(engine, monkeypatch, 0)[0].graphs if graphs else {}
    seen, texts = watch(engine, monkeypatch), [prompt(1, 300), prompt(2, 50), prompt(3, 9), prompt(4, 1)]
    said = list[TokenOutput]()
    engine.add_request("blocks", texts[0], replace(GREEDY, max_tokens=30))
    while engine.has_work and not any(output.token_ids for output in said):
        said += engine.step()
    for name, text in zip(("joins", "packed", "one"), texts[1:], strict=True):
        engine.add_request(name, text, replace(GREEDY, max_tokens=20))
    while not engine.decode_steps.idle:
        engine.step()
    texts.append(prompt(5, 130))
    engine.add_request("scored", texts[-1], replace(GREEDY, max_tokens=20, prompt_logprobs=1))
    drain(engine)
    assert any(key[0] == cuda_graphs.PROMPT_ROWS[0] for key in of_model) == graphs
    for text in texts:
        of_text = [one for one in seen if one.prompt == text]
        assert of_text[0].cached == 0 and len(of_text) > 3
        assert all(one.is_theirs(theirs._replace(window=window)) for one in of_text), f"{len(text)} tokens"


@pytest.mark.parametrize("kind", ["unlike", "hybrid"])
def test_prompts_are_read_from_their_first_new_token_on(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat's second turn, and in a fork."""
    path, theirs = request.getfixturevalue(kind)
    engine = engine_of(path)
    seen, text = watch(engine, monkeypatch), prompt(1, 200)
    engine.add_request("first", text, replace(GREEDY, max_tokens=30))
    answer = tokens(drain(engine)["first"])
    later = [[*text, *answer, *prompt(2, 70)], [*text, *answer[:3], *prompt(3, 9)]]
    for number, of_turn in enumerate(later):
        engine.add_request(str(number), of_turn, replace(GREEDY, max_tokens=20))
        drain(engine)
    for of_turn in later:
        of_text = [one for one in seen if one.prompt == of_turn]
        assert of_text[0].cached > 100 and len(of_text) > 3
        assert all(one.is_theirs(theirs) for one in of_text)


def test_prompts_that_there_is_no_memory_to_read(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing, and the head reads their answers alone."""
    engine, wanted = engine_of(model[0]), engine_of(model[0], None)
    seen, head = watch(engine, monkeypatch), engine.head
    assert head is not None

    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(head.cache, "prefill_batch", failing)
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 70), GREEDY)
        one.add_request("b", prompt(2, 30), GREEDY)
    said = [{name: tokens(outputs) for name, outputs in drain(one).items()} for one in (engine, wanted)]
    assert said[0] == said[1] and counts(engine)[1] > 10
    assert all(one._replace(cached=len(one.prompt)).is_theirs(model[1]) for one in seen)


def test_prompts_that_are_aborted_are_read_and_forgotten(
    model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others of a pack, whose drafts are not those of the aborted one."""
    for name in ("TOKEN_GAP", "QUEUED_TOKEN_GAP", "PACKED_TOKEN_GAP", "IDLE_PREFILL_SECONDS"):
        monkeypatch.setattr(f"shadowkv.engine.engine.{name}", 1e-9)
    engine = engine_of(model[0], max_num_seqs=3)
    seen = watch(engine, monkeypatch)
    for round_ in range(3):
        for number in range(3):
            engine.add_request(f"{round_} {number}", prompt(3 * round_ + number, 40 + number), GREEDY)
        while not engine.prefill_queue.in_flight:
            engine.step()
        assert len(engine.prefill_queue.in_flight[0].rows) == 3
        engine.abort(f"{round_} 1")
        drain(engine)
    drafting = engine.decode_steps.speculation
    assert isinstance(drafting, HeadDrafts) and len(drafting._contexts) <= 3
    assert len({len(one.prompt) for one in seen}) == 2 and all(one.is_theirs(model[1]) for one in seen)


def answers(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
    """Of requests of all kinds, some of which are aborted. Prompts join steps, and more requests wait than run."""
    for number, params in enumerate(KINDS * 2):
        engine.add_request(str(number), prompt(number, (450, 30)[number % 2]), params)
        engine.add_request(f"aborted {number}", prompt(number, 20), GREEDY)
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            if output.request_id.startswith("aborted") and output.completion_tokens > 9:
                engine.abort(output.request_id)
    return {name: (tokens(of), of[-1].finish_reason) for name, of in outputs.items() if name.isdecimal()}


@pytest.mark.parametrize("kv", ["full", "turbo"])
def test_answers_are_those_without_drafts(kv: str, model: tuple[Path, Theirs]) -> None:
    """Also behind compressed prompts."""
    wanted = answers(engine_of(model[0], None, kv=kv, kv_dense_below=0))
    engine = engine_of(model[0], kv=kv, kv_dense_below=0)
    assert answers(engine) == wanted
    assert counts(engine)[0] > 500 and counts(engine)[1] > 100
    assert (engine.cache.groups[0].pool.tables.compressed > 0).any() == (kv == "turbo"), "of what stays cached"


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_pages_are_read_once_for_all_rows_of_a_sequence(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ops that can, in sequences of more than two pages."""
    monkeypatch.setattr(planning, "MIN_EXACT_PAGES", 2)
    path, _ = request.getfixturevalue(kind)
    wanted, engine = answers(engine_of(path, None)), engine_of(path, backends=OP_BY_OP)
    calls = fold(engine.cache.ops, monkeypatch)
    assert answers(engine) == wanted
    assert calls.count(("paged_attention", 4)) > 50 and counts(engine)[1] > 20


def test_drafts_of_a_good_head_are_accepted(tmp_path: Path) -> None:
    """Also sampled ones: a draft takes the random numbers of the places in which its tokens are."""
    build_with_head("glm4_moe", tmp_path, adds=0.0, **LONG)
    engine = engine_of(tmp_path)
    for number, params in enumerate((GREEDY, SEEDED, replace(SEEDED, temperature=0.6, top_p=0.9))):
        engine.add_request(str(number), prompt(number, 30), params)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    drafted, accepted = counts(engine)
    assert drafted == accepted > 120
    assert steps < 25, "four tokens in a step, after the first ones"


def test_windows_hold_long_answers(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tokens than the head attends to."""
    monkeypatch.setattr("shadowkv.models.configs.model_config.DRAFT_WINDOW", 70)
    params = replace(GREEDY, max_tokens=300)
    wanted, engine = engine_of(model[0], None), engine_of(model[0])
    for one in (wanted, engine):
        one.add_request("a", prompt(1, 30), params)
    assert tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])
    assert counts(engine)[0] > 300
    drafting = engine.decode_steps.speculation
    assert isinstance(drafting, HeadDrafts)
    assert drafting._head.cache.layout.main.window == 70
    (context,) = drafting._contexts.values()
    assert context.sequence.length == context.rows == 30 + context.read > 320, "with rows of the prompt"


def test_a_draft_step_that_fails_leaves_nothing(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next draft is what it would have been."""

    def said(fails: int) -> tuple[list[int], tuple[int, int]]:
        engine = engine_of(model[0])
        head = engine.head
        assert head is not None
        engine.add_request("a", prompt(1, 30), GREEDY)
        got = [token for _ in range(6) for token in tokens(engine.step())]
        decode, calls = Runner.decode, list[Any]()

        def failing(self: Any, *given: Any, **options: Any) -> Any:
            calls.append(given)
            if self is head and len(calls) == fails:
                raise RuntimeError("a broken step")
            return decode(self, *given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Runner, "decode", failing)
            if fails:
                with pytest.raises(RuntimeError, match="a broken step"):
                    engine.step()
        return got + tokens(drain(engine)["a"]), counts(engine)

    wanted = said(0)
    assert said(1) == said(2) == said(3) == wanted


def test_a_failed_step_is_drafted_again(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the model that fails behind a draft has left nothing, and the draft begins anew."""
    engine, wanted = engine_of(model[0]), engine_of(model[0])
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 30), GREEDY)
    got = [token for _ in range(6) for token in tokens(engine.step())]

    def failing(*given: Any) -> Any:
        raise RuntimeError("a broken step")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a broken step"):
        patch.setattr(engine.runner, "decode", failing)
        engine.step()
    assert got + tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])
    assert counts(engine) == counts(wanted)


def test_a_newcomer_beyond_the_limit_drafts_too(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step in which every sequence has as many rows for the head as it can have."""

    def said(drafts: dict[str, Any] | None) -> tuple[dict[str, list[int]], int, list[int]]:
        engine, rows, most = engine_of(model[0], drafts, max_num_seqs=2), list[int](), 0
        outputs: dict[str, list[TokenOutput]] = {}

        def add(name: str, tenant: str) -> None:
            engine.add(engine.requests.request(name, prompt(len(name), 20), GREEDY, tenant=tenant))

        for name in ("a", "aa"):
            add(name, "first")
        if drafts is not None:
            head = engine.head
            assert head is not None
            read = head.read
            monkeypatch.setattr(head, "read", lambda *given: rows.append(len(given[2])) or read(*given))
        for step in range(200):
            with monkeypatch.context() as patch:
                if drafts is not None and step % 8:  # most steps leave states behind
                    patch.setattr(engine.decode_steps.speculation, "drafts", lambda *given: [])
                for output in engine.step():
                    assert output.error is None
                    outputs.setdefault(output.request_id, []).append(output)
            most = max(most, engine.num_running)
            if step == 2:
                add("aaa", "second")
        assert not engine.has_work
        return {name: tokens(of) for name, of in outputs.items()}, most, rows

    wanted, (found, most, rows) = said(None)[0], said(MTP)
    assert found == wanted and len(found) == 3
    assert most == 3 and max(rows) == 3 * 4


def test_continued_chats_and_forks(model: tuple[Path, Theirs]) -> None:
    """Go on from cached tokens, and no wrong draft is among them."""

    def turn(engine: Engine, text: list[int]) -> tuple[list[int], int]:
        engine.add_request("turn", text, GREEDY)
        outputs = drain(engine)["turn"]
        return tokens(outputs), outputs[-1].cached_tokens

    engine = engine_of(model[0])
    first, _ = turn(engine, prompt(1, 200))
    assert first == turn(engine_of(model[0], None), prompt(1, 200))[0]
    for length, cached in ((60, 259), (10, 192)):  # all of it, and a fork
        later = [*prompt(1, 200), *first[:length], *prompt(length, 70)]
        wanted, _ = turn(engine_of(model[0], None), later)
        got, reused = turn(engine, later)
        assert got == wanted and cached - 64 <= reused <= cached
    assert counts(engine)[0] > 100


def test_stop_strings_end_answers(model: tuple[Path, Theirs]) -> None:
    """Also within an accepted draft."""
    make = partial(LLM, str(model[0]), kv="full", max_model_len=512, max_num_seqs=4)
    wanted, llm = make(), make(speculative_config=MTP)
    (text,) = (output.outputs[0].text for output in wanted.generate(["some text"], GREEDY))
    for start in (3, 10, 20):
        params = replace(GREEDY, stop=[text[start : start + 2]])
        (expected,), (found,) = (one.generate(["some text"], params) for one in (wanted, llm))
        assert found.outputs[0].text == expected.outputs[0].text and found.outputs[0].finish_reason == "stop"


class Graph:
    """What ``cuda_graphs._Captured`` is, on a machine without CUDA: it computes anew."""

    def __init__(self, numbers: Any, function: Any, dry_run: Any, *others: Any) -> None:
        self.function = function
        dry_run(torch.from_numpy(numbers))
        self.replay(numbers)

    def replay(self, numbers: Any) -> None:
        self.result = self.function(torch.from_numpy(numbers))


def give_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, eager_steps: int) -> tuple[CudaGraphs, CudaGraphs]:
    """Gives an engine graphs on a CPU. Returns those of the model and of its head."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "_Captured", Graph)
    monkeypatch.setattr(cuda_graphs, "EAGER_STEPS", eager_steps)
    runner, head, sizes = engine.runner, engine.head, (engine.config.max_rows, engine.model_config.vocab_size)
    assert head is not None
    runner.graphs = CudaGraphs(runner.cache, runner.step, *sizes)
    runner.model.graph_states = torch.zeros(cuda_graphs.PROMPT_ROWS[-1], engine.model_config.hidden_size)
    head.graphs = CudaGraphs(head.cache, head.step, *sizes, logits=runner.graphs.logits)
    engine.decode_steps.run_ahead = True
    return runner.graphs, head.graphs


def test_answers_with_graphs_are_those_without_drafts(
    model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows, and steps that are launched ahead."""
    wanted = answers(engine_of(model[0], None, device="cpu"))
    engine = engine_of(model[0], device="cpu")
    _, of_head = give_graphs(engine, monkeypatch, 0)
    assert answers(engine) == wanted
    assert counts(engine)[0] > 500 and len(of_head.graphs) > 3


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_drafts_have_graphs_from_the_start(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of the head, and those of the model that verify drafts, also in sequences of many pages."""
    for module in (planning, warmup):
        monkeypatch.setattr(module, "MIN_EXACT_PAGES", 2)
    monkeypatch.setattr("shadowkv.models.configs.model_config.DRAFT_WINDOW", 100)
    monkeypatch.setattr(warmup, "unreserved_bytes", lambda device: 2**33)
    path, _ = request.getfixturevalue(kind)
    texts = {str(number): (prompt(number, length), GREEDY) for number, length in enumerate((20, 60, 200, 400))}
    engine, wanted = engine_of(path, device="cpu", max_num_seqs=4), engine_of(path, None, max_num_seqs=4)
    graphs, of_head = give_graphs(engine, monkeypatch, 8)
    fold(engine.cache.ops, monkeypatch)
    warmup.GraphGrid(engine).capture(60.0)
    keys, captures = set(of_head.graphs), of_head.captures
    seen, plan_decode = list[tuple[int, int, bool, bool]](), engine.cache.plan_decode

    def spy(sequences: Any, counts: Any, *others: Any) -> Any:
        plan = plan_decode(sequences, counts, *others)
        if counts and len(set(counts)) == 1:
            of_rows = any(group.starts is not None for group in plan.groups)
            seen.append((len(sequences), counts[0], of_rows, graphs.has(plan)))
        return plan

    monkeypatch.setattr(engine.cache, "plan_decode", spy)
    said = []
    for one in (engine, wanted):
        for name, (text, params) in texts.items():
            one.add_request(name, text, params)
        said.append({name: tokens(outputs) for name, outputs in drain(one).items()})
    assert said[0] == said[1] and counts(engine)[0] > 60
    whole = [(count, of_rows, has) for count, rows, of_rows, has in seen if rows == 4]
    assert all(has for *_, has in whole) and True in {of_rows for _, of_rows, _ in whole}
    assert 4 in {count for count, *_ in whole}
    assert of_head.captures == captures and not of_head.eager and {key[3] for key in keys} == {2, 4}


def test_states_are_kept_while_nothing_is_drafted(model: tuple[Path, Theirs], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a step has rows. A draft behind more steps has a shorter context, and is still one."""
    engine, wanted = engine_of(model[0]), engine_of(model[0], None)
    for one in (engine, wanted):
        one.add_request("a", prompt(1, 30), GREEDY)
    drafting, got = engine.decode_steps.speculation, list[int]()
    assert isinstance(drafting, HeadDrafts)
    for steps in (2, 3, 9):
        with monkeypatch.context() as patch:
            patch.setattr(drafting, "drafts", lambda *given: [])
            got += [token for _ in range(steps) for token in tokens(engine.step())]
        (context,) = drafting._contexts.values()
        before = context.rows
        got += tokens(engine.step())
        known = {2: 3, 3: 4, 9: 4}[steps]  # at first also the state of the prompt's last token
        assert context.rows == before + known
    assert got + tokens(drain(engine)["a"]) == tokens(drain(wanted)["a"])


@pytest.mark.parametrize("synthetic", [False, True])
def test_ranks_draft_together(synthetic: bool, model: tuple[Path, Theirs]) -> None:
    """With a part of the head on each. Ranks also agree on tokens that are accepted at random."""
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.64, 0.512]}
    drafting = {**MTP, **rates} if synthetic else MTP
    sizes = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 2}

    def said(drafts: dict[str, Any] | None) -> tuple[dict[str, list[int]], tuple[int, int] | None]:
        engine = engine_of(model[0], drafts, **sizes, tensor_parallel_size=2)
        try:
            for number, params in enumerate((GREEDY, SEEDED, GREEDY)):
                engine.add_request(str(number), prompt(number, (30, 100, 8)[number]), params)
            said = {name: tokens(outputs) for name, outputs in drain(engine).items()}
            return said, None if drafts is None else counts(engine)
        finally:
            engine.close()

    plain, _ = said(None)
    found, made = said(drafting)
    alone = engine_of(model[0], drafting, **sizes)
    for number, params in enumerate((GREEDY, SEEDED, GREEDY)):
        alone.add_request(str(number), prompt(number, (30, 100, 8)[number]), params)
    wanted = {name: tokens(outputs) for name, outputs in drain(alone).items()}
    assert found == wanted and made == counts(alone)
    assert (found == plain) is not synthetic


def test_settings() -> None:
    config = EngineConfig(speculative_config={"method": "mtp"}, max_num_seqs=4)
    assert (config.drafted_tokens, config.drafted_rows, config.max_rows) == (1, 5, 10)
    with pytest.raises(SettingsError, match="method='glm4_moe_mtp' is not one of ngram, suffix, sparse, mtp"):
        EngineConfig(speculative_config={"method": "glm4_moe_mtp"})
    with pytest.raises(SettingsError, match="kv='full-speculative' has an index for drafts of method='sparse' alone"):
        EngineConfig(speculative_config={"method": "mtp"}, kv="full-speculative").spec()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_answers_of_hybrids_are_those_without_drafts(family: str, tmp_path: Path) -> None:
    build_with_head(family, tmp_path, adds=0.01)
    said = []
    for drafts in (None, MTP):
        engine = engine_of(tmp_path, drafts, max_model_len=256)
        for number, params in enumerate(KINDS):
            engine.add_request(str(number), prompt(number, (30, 100, 8, 70, 20, 33, 64)[number]), params)
        said.append({name: tokens(outputs) for name, outputs in drain(engine).items()})
    assert said[0] == said[1]
    drafted, accepted = counts(engine)
    assert drafted > 500 and accepted > 0


def test_what_cannot_draft_is_refused(model: tuple[Path, Theirs], tmp_path: Path) -> None:
    plain = load_model(model[0])
    with pytest.raises(SettingsError, match="method='mtp': the model was loaded without its layer"):
        Engine(EngineConfig(model=str(model[0]), kv="full", max_model_len=128, speculative_config=MTP), plain)
    build("glm4_moe", tmp_path / "lacking")
    with pytest.raises(SettingsError, match="lacking: the files lack the layer that drafts tokens"):
        engine_of(tmp_path / "lacking", max_model_len=128)


def test_the_cache_of_the_head_is_counted(model: tuple[Path, Theirs]) -> None:
    loaded = load_model(model[0], dtype=torch.float32, draft_head=True)
    few, many = (head_bytes(loaded.config, torch.float32, 512, sequences, 3) for sequences in (1, 9))
    page, window = 2 * 16 * 64 * 4, 512 // 64  # keys and values of one kv head, and pages of the longest sequence
    assert many - few >= 8 * window * page
    engine = engine_of(model[0], max_num_seqs=9)
    head = engine.head
    assert head is not None and sum(use.total_bytes for use in head.cache.use().values()) >= 9 * window * page
    (line,) = (note for note in engine.notes if note.startswith("drafts"))
    assert line.startswith("drafts  mtp, up to 3 tokens of a sequence in a step, by a layer of the files: ")
