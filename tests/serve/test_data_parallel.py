"""Several engines behind one port (``--data-parallel-size``): who gets a prompt, and what happens as they die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import torch
from replies import events
from server_processes import BODY, SECONDS, STOPPING, server
from several_engines import KILLED, LONG_ANSWER, LONGER, TWO, Stream, batch_now, batch_of, engines, samples, two_streams

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.engine import EngineStats
from shadowkv.engine.llm import LLM
from shadowkv.engine.outputs import CheckedTokens
from shadowkv.engine.process.client import Answers, ClientRequest
from shadowkv.engine.process.main import _with_own_memory
from shadowkv.engine.process.replicas import ReplicaClient, together
from shadowkv.engine.request import EngineStopped
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.speculation.speculation import SpeculationStats
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.kv_cache import TierUse
from shadowkv.kvcache.memory import free_memory
from shadowkv.prefix_cache.stats import TierStats
from shadowkv.ray.serve import parse as parse_ray
from shadowkv.serve import start
from shadowkv.serve.__main__ import main, parse
from shadowkv.serve.process import ENGINE_DIED
from shadowkv.wording import GIB
from tests.local_engine import LocalEngine
from tests.waiting import wait_until

PAGES = 4


def document(number: int) -> list[int]:
    return [2 + number] * (PAGES * 64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-dp", "0"], "--data-parallel-size 0 must be at least 1"),
        ([TWO, "--input=a", "--output=b"], "for a file of requests there is shadowkv ray batch --replicas N"),
        ([TWO, "--api-server-count=2"], "--data-parallel-size 2 takes --api-server-count 1"),
        ([TWO, "--compare=full"], "--data-parallel-size 2 does not go with --compare"),
        ([TWO, "--device=cuda:1"], "takes --device auto, cuda or cpu, not cuda:1"),
        ([TWO, "--device=gpu"], "takes --device auto, cuda or cpu, not gpu"),
        (["-dp=1.5"], "--data-parallel-size/-dp: '1.5' is no whole number"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(flags)
    assert message in capsys.readouterr().err


def test_more_engines_than_the_machine_has_cores_for(capsys: Any) -> None:
    assert main(["-dp=100000", "--port=0"]) == 2
    assert "--data-parallel-size 100000 is more than" in capsys.readouterr().err


def test_host_memory_that_all_would_take(capsys: Any) -> None:
    assert main([TWO, "--kv=turbo-host", "--port=0"]) == 2
    assert "--kv turbo-host needs --host-memory-gib: host memory of each engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("visible", "ranks", "chosen"),
    [(None, 1, ["0", "1", "2"]), (None, 2, ["0,1", "2,3"]), ("7,5,GPU-ab,2", 2, ["7,5", "GPU-ab,2"])],
)
def test_each_engine_has_gpus_of_its_own(monkeypatch: Any, visible: str | None, ranks: int, chosen: list[str]) -> None:
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    def count() -> int:
        return len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in os.environ else 4

    monkeypatch.setattr(torch.cuda, "device_count", count)
    for replica, wanted in enumerate(chosen):
        monkeypatch.setattr(os, "environ", dict(given))
        _with_own_memory(EngineConfig(tensor_parallel_size=ranks), replica, len(chosen))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted


def test_gpus_that_are_not_there(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    message = "--data-parallel-size 3 with --tensor-parallel-size 2 needs 6 GPUs, and this machine has 4"
    with pytest.raises(ValueError, match=message):
        _with_own_memory(EngineConfig(tensor_parallel_size=2), 0, 3)
    on_cpu = _with_own_memory(EngineConfig(tensor_parallel_size=2, device="cpu", gpu_memory_utilization=0.6), 0, 3)
    assert not os.environ and on_cpu.gpu_memory_utilization == pytest.approx(0.2)
    with pytest.raises(OSError, match="engine 1 cannot choose its GPUs"):  # as if CUDA were in use already
        _with_own_memory(EngineConfig(), 1, 2)


def test_host_memory_of_all_engines_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(free_memory, "free_host_bytes", lambda: 25 * GIB)
    config = EngineConfig(device="cpu", kv="turbo-host", kv_offload_gib=8, host_memory_gib=4)
    monkeypatch.setattr(start, "ReplicaProcesses", lambda config, count, table: count)
    assert start.start_replicas(config, 2) == 2
    with pytest.raises(ValueError) as refused:
        start.start_replicas(config, 3)
    assert str(refused.value) == (
        "3 engines with --kv-offload-gib 8 and --host-memory-gib 4 each need 36.00 GiB of host memory, 25.00 GiB is "
        "free. Lower --kv-offload-gib or --host-memory-gib, or --data-parallel-size"
    )


def test_memory_that_is_too_small_for_each_of_several(tiny_model: Path, capsys: Any) -> None:
    small = ["--device=cpu", "--kv=full", "--load-format=dummy", "--gpu-memory-utilization=1e-9", "--port=0"]
    assert main([TWO, f"--model={tiny_model}", *small]) == 2
    error = capsys.readouterr().err
    assert "2 engines share this machine's memory: a lower --data-parallel-size leaves more for each" in error


def test_what_has_no_several_engines_says_what_has(capsys: Any) -> None:
    reason = "use a server: shadowkv serve --data-parallel-size N, or shadowkv ray serve --replicas N"
    with pytest.raises(ValueError, match=reason):
        LLM("smollm2-135m-instruct", data_parallel_size=2)
    with pytest.raises(SystemExit):
        parse_ray(["-dp", "2"])
    assert reason in capsys.readouterr().err


def test_statistics_add_up() -> None:
    drafts = SpeculationStats(1, 2, 3, [1, 0])
    first = EngineStats(1, 2, {"device": TierUse(3, 4)}, FetchCounts(5), {}, speculation=drafts)
    second = EngineStats(1, 0, {"device": TierUse(1, 4), "host": TierUse(1, 1)}, FetchCounts(), {}, speculation=drafts)
    both = together([first, second])
    assert (both.running, both.waiting, both.fetches.selected, both.usage) == (2, 2, 5, None)
    assert both.tiers == {"device": TierUse(4, 8), "host": TierUse(1, 1)}
    assert both.speculation == SpeculationStats(2, 4, 6, [2, 0])
    checked = together([CheckedTokens(1, 0.5), None, CheckedTokens(2, 0.25)])
    assert (checked.tokens, checked.kl) == (3, 0.75)
    assert together([None, None]) is None


@pytest.fixture
def two_here(tiny_model: Path) -> Iterator[tuple[ReplicaClient, list[LocalEngine]]]:
    """The client of two engines on threads of this process."""
    config = EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", kv="full", max_num_seqs=2)
    local = [LocalEngine(config) for _ in range(2)]
    for one in local:
        one.start()
    yield ReplicaClient(local), local
    for one in local:
        one.shutdown()


def test_which_requests_of_an_engine_that_dies_are_moved(two_here: Any, monkeypatch: Any) -> None:
    client, local = two_here
    sent = list[LocalEngine]()

    def begin(one: LocalEngine, request: ClientRequest, answers: Answers, save: Any = None) -> None:
        request.engine = one
        sent.append(one)

    for one in local:
        monkeypatch.setattr(one, "begin", partial(begin, one))

    def served(save: Any = None) -> tuple[ClientRequest, Answers]:
        request = client.request([5] * 40, SamplingParams(max_tokens=4))
        answers = Answers([request], client.tokenizer)
        client.begin(request, answers, save)
        return request, answers

    one, answers = served()
    sent[0].stopping = True
    assert not sent[0].hand_on(one, answers), "the server is being stopped"
    sent[0].stopping = False
    assert sent[0].hand_on(one, answers) and len(sent) == 2
    assert not sent[1].hand_on(one, answers), "it is moved once"
    one, answers = served()
    answers.begun.add(one.request_id)
    assert not sent[-1].hand_on(one, answers), "it has a token"
    one, answers = served(save=(1, "name"))
    assert not sent[-1].hand_on(one, answers), "what was asked with it is lost"


def test_engines_that_are_stopped_are_not_called_dead_for_one_that_died_before(two_here: Any) -> None:
    client, (first, second) = two_here
    first.has_ended("engine 0 has died")
    second.stopping = True
    second.has_ended("engine 1 has died")
    assert not client.is_alive and isinstance(client.end(), EngineStopped)


def test_the_last_of_several_engines_to_die_is_a_death(two_here: Any) -> None:
    client, local = two_here
    for number, one in enumerate(local):
        one.has_ended(f"engine {number} has died")
    for one in local:
        one.stopping = True  # the server stops because none is left
    error = client.end()
    assert not isinstance(error, EngineStopped) and str(error) == "engine 0 has died"


def test_a_request_that_the_engine_has_ended_is_not_handed_on(two_here: Any) -> None:
    client, (first, _) = two_here
    ended, going = (client.request([5] * 40, SamplingParams(max_tokens=4)) for _ in range(2))
    answers = Answers([ended, going], client.tokenizer)
    answers.unfinished.discard(ended.request_id)
    handed = list[ClientRequest]()
    first.hand_on = lambda request, answers: handed.append(request) is None
    first._answers = {one.request_id: answers for one in (ended, going)}
    first._end_all("gone")
    assert handed == [going]


def test_ids_of_requests_differ_whoever_makes_them(two_here: Any) -> None:
    client, local = two_here
    made = [one.request([5] * 40, SamplingParams()).request_id for one in (client, *local)]  # a save makes one anew
    assert len(set(made)) == 3


def test_files_of_a_shared_directory_count_once(two_here: Any, monkeypatch: Any) -> None:
    client, local = two_here
    for one, seen in zip(local, (3, 2), strict=True):
        disk = TierStats(used_bytes=100 * seen, total_bytes=1000, files=seen, evictions=seen)
        stats = EngineStats(0, 0, {}, FetchCounts(), {"disk": disk})
        monkeypatch.setattr(one, "stats", AsyncMock(return_value=stats))
    wanted = TierStats(used_bytes=300, total_bytes=1000, files=3, evictions=5)
    assert asyncio.run(client.stats()).prefixes == {"disk": wanted}


def test_prompts_go_where_their_beginning_is_and_an_engine_that_dies_takes_no_other_along(tiny_model: Path) -> None:
    with server(tiny_model, TWO, "--shutdown-timeout=600", "--kv-offload-gib=0.1", LONGER) as one:
        family = one.family()

        # Documents spread, and later questions follow them.
        def cached(prompt: list[int], **more: Any) -> int:
            answer = one.ask(prompt=prompt, max_tokens=2, **more)[0].json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached([*document(number), 9]) for number in range(4)] == [0] * 4
        for number in (2, 0, 3, 1):
            assert cached([*document(number), 8, 7]) == PAGES * 64
        assert samples(one, "prefix_cache_hit_tokens_total", tier="device") == dict.fromkeys("01", 2.0 * PAGES * 64)
        assert cached([*document(0), 8, 7], cache_salt="another") == 0

        # What is of the server is once, and what is of an engine has its label.
        assert samples(one, "replicas") == {"": 2.0}
        assert samples(one, "generation_tokens_total") == {"": 18.0}
        assert samples(one, "cache_config_info") == {"0": 1.0, "1": 1.0}
        stats = httpx.get(f"{one.url}/page/stats", timeout=SECONDS).json()
        assert stats["segment_count"] >= 5 and stats["tiers"]["host"]["total_bytes"] > 2 * 0.09 * 2**30

        # A client that hangs up, and an engine that is killed in the middle of an answer.
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{one.url}/v1/completions", json=BODY, timeout=0.5)
        wait_until(lambda: samples(one, "num_requests_running") == {"0": 0.0, "1": 0.0})
        with two_streams(one, **LONG_ANSWER) as streams:
            batch = batch_of(one, *[BODY] * 4)
            wait_until(lambda: sum(samples(one, "num_requests_running").values()) == 6)
            engines(one)[1].kill()
            lasts = [stream.last() for stream in streams]
        errors = [last["error"] for last in lasts if "error" in last]
        assert [(error["code"], error["message"]) for error in errors] == [("engine_dead", KILLED.format(1))]
        assert [last["choices"][0]["finish_reason"] for last in lasts if "error" not in last] == ["length"]
        health = httpx.get(f"{one.url}/health", timeout=SECONDS)
        assert (health.status_code, health.json()) == (200, {"status": "ok", "engines": ["ok", "dead"]})
        wait_until(lambda: batch_now(one, batch)["status"] == "completed")  # its lines begin anew in the other engine
        assert batch_now(one, batch)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert samples(one, "replicas") == {"": 1.0} and [*samples(one, "num_requests_running")] == ["0"]
        for number in range(4):  # those of the dead engine are computed anew
            assert one.ask(prompt=[*document(number), 8], max_tokens=2)[0].status_code == 200

        # SIGTERM lets requests end.
        last = Stream(one, max_tokens=300).begun()
        for process in family:
            if process.is_running():
                process.send_signal(signal.SIGTERM)
        assert last.last()["choices"][0]["finish_reason"] == "length"
        assert one.http.wait(SECONDS) == 128 + signal.SIGTERM
        one.assert_nothing_is_left(family)
        log = one.log.read_text()
        assert log.count(f"ERROR shadowkv.engine.process.launch: {KILLED.format(1)}\n") == 1 and "Traceback" not in log
        assert "(40 tokens) is sent to another engine" not in log, "streams that have begun stay where they are"
        assert len(re.findall("(is sent to|begins anew in) another engine", log)) == 2, "the lines that the engine had"


def test_requests_without_a_token_go_to_another_engine_and_the_last_one_ends_the_server(tiny_model: Path) -> None:
    with server(tiny_model, TWO) as one, ThreadPoolExecutor(4) as clients:
        family = one.family()
        first, second = engines(one)
        alone = one.ask(prompt=[5] * 40, max_tokens=200)[0].json()["choices"][0]["text"]
        second.suspend()  # so that it has not made a token yet
        answers = [clients.submit(one.ask, number % 2 == 0, prompt=[5] * 40, max_tokens=200) for number in range(4)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 2)
        second.kill()
        replies = [answer.result()[0] for answer in answers]
        assert [reply.status_code for reply in replies] == [200] * 4
        texts = [reply.json()["choices"][0]["text"] for reply in replies[1::2]]
        texts += ["".join(event["choices"][0]["text"] for event in events(reply)) for reply in replies[::2]]
        assert texts == [alone] * 4
        moved = re.findall(r"request (\S+) \(40 tokens\) is sent to another engine\n", one.log.read_text())
        assert len(moved) == 2 and {*moved} < {reply.headers["x-request-id"] for reply in replies}

        stream = Stream(one).begun()
        first.kill()
        assert stream.last()["error"]["message"] == KILLED.format(0)
        assert one.http.wait(SECONDS) == ENGINE_DIED
        one.assert_nothing_is_left(family)


def test_a_line_whose_engines_die_is_begun_anew_once_and_the_batch_goes_on(tiny_model: Path) -> None:
    with server(tiny_model, "--data-parallel-size=3", LONGER) as one:
        batch = batch_of(one, {**BODY, **LONG_ANSWER}, {**BODY, "max_tokens": 2})
        for _ in range(2):
            wait_until(lambda: batch_now(one, batch)["request_counts"]["completed"] == 1)
            wait_until(lambda: [*samples(one, "num_requests_running").values()].count(1.0) == 1)
            running = samples(one, "num_requests_running")
            engines(one)[int(max(running, key=running.__getitem__))].kill()
            wait_until(lambda before=running: samples(one, "num_requests_running").keys() < before.keys())
        wait_until(lambda: batch_now(one, batch)["status"] == "completed")
        ended = batch_now(one, batch)
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [line] = httpx.get(f"{one.url}/v1/files/{ended['error_file_id']}/content", timeout=SECONDS).text.splitlines()
        failed = json.loads(line)
        assert failed["custom_id"] == "0" and failed["response"]["status_code"] == 503
        assert failed["response"]["body"]["error"]["code"] == "engine_dead"
        assert one.health() == one.ask(max_tokens=2)[0].status_code == 200, "an engine is left"
        assert one.log.read_text().count("begins anew in another engine") == 1


def test_ctrl_c_ends_all_of_them(tiny_model: Path) -> None:
    with server(tiny_model, TWO, "--shutdown-timeout=0.2", LONGER) as one:
        family = one.family()
        with two_streams(one, **LONG_ANSWER) as streams:
            for process in family:
                process.send_signal(signal.SIGINT)
            errors = [stream.last()["error"] for stream in streams]
        assert [(error["code"], error["message"]) for error in errors] == [STOPPING] * 2
        assert one.http.wait(SECONDS) == 128 + signal.SIGINT
        one.assert_nothing_is_left(family)
        log = one.log.read_text()
        assert "sent to another engine" not in log and "Traceback" not in log
