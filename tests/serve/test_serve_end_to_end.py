"""The real engine and a small real model behind the API, on the CPU."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from http_server import http_server
from prometheus_client.parser import text_string_to_metric_families

from shadowkv.engine.config import DEFAULT_MODEL, EngineConfig
from shadowkv.serve.app import build_app
from shadowkv.serve.batch.answers import run_batch
from shadowkv.serve.batch.files import BatchFiles
from tests.local_engine import LocalEngine

SMALL = {"max_model_len": 1024, "max_num_seqs": 4, "max_cached_seqs": 2, "device": "cpu"}
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(EngineConfig(**SMALL))
    engine.start()
    yield engine
    engine.shutdown(120)


@pytest.fixture(scope="module")
def client(engine: LocalEngine) -> Iterator[openai.OpenAI]:
    with (
        http_server(build_app(engine, engine.model_name)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, messages=FRANCE, **options):
    options = {"max_tokens": 16, "temperature": 0, **options}
    return client.chat.completions.create(model="smollm2-135m-instruct", messages=messages, **options)


def test_chat_and_its_next_turn(client):
    first = ask(client)
    assert "Paris" in first.choices[0].message.content and first.choices[0].finish_reason == "stop"
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    further = [*FRANCE, first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    second = ask(client, further)
    assert "Rome" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_stream_equals_answer_with_stop_string_and_logprobs(client):
    messages = [{"role": "user", "content": "Tell me a story about a café."}]
    options = {"max_tokens": 40, "stop": [" the "], "logprobs": True, "top_logprobs": 2}
    whole = ask(client, messages, **options).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, messages, stream=True, **options)]
    assert whole.finish_reason == "stop" and " the " not in whole.message.content
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert "".join(entry.token for entry in streamed).startswith(whole.message.content)
    for entry in streamed:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_seeded_choices_repeat_and_differ(client):
    options = {"model": "smollm2-135m-instruct", "prompt": "Once upon a time", "max_tokens": 12, "n": 3, "seed": 8}
    # Logits are rounded otherwise in a step beside prompts, and of a whole vocabulary some draws are so near the border
    # of two rare tokens that this decides.
    options["extra_body"] = {"top_k": 10}
    texts = [[choice.text for choice in client.completions.create(**options).choices] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_scores_of_a_prompt_are_those_of_its_generation(client):
    ask = functools.partial(client.completions.create, model="smollm2-135m-instruct", temperature=0, logprobs=1)
    prompt = [504, 3575, 282, 4649, 314]
    generated = ask(prompt=prompt, max_tokens=6).choices[0]
    ids = prompt + client.post("/../tokenize", body={"prompt": generated.text}, cast_to=object)["tokens"]
    scored = ask(prompt=[ids, ids[:4]], max_tokens=0, echo=True)
    first, second = (choice.logprobs for choice in scored.choices)
    assert first.token_logprobs[0] is None and first.top_logprobs[0] is None
    assert first.tokens[5:] == generated.logprobs.tokens
    assert first.token_logprobs[5:] == pytest.approx(generated.logprobs.token_logprobs, abs=0.01)
    assert second.token_logprobs[1:] == pytest.approx(first.token_logprobs[1:4], abs=0.01)
    for score, top in list(zip(first.token_logprobs, first.top_logprobs, strict=True))[5:]:
        assert score == max(top.values())
    assert scored.choices[0].text.endswith(generated.text) and scored.usage.completion_tokens == 0


def test_json_schema(client):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    answer = ask(client, response_format=wanted, max_tokens=60).choices[0].message.content
    assert isinstance(json.loads(answer)["city"], str)


def test_a_salt_and_a_prompt_that_is_not_cached(client):
    messages = [{"role": "user", "content": "List the days of the week, please. " * 8}]

    def cached(**extra):
        usage = ask(client, messages, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached(cache_prompt=False) for _ in range(2)] == [0, 0]
    assert cached() == 0 < cached()
    assert cached(cache_salt="mine") == 0 < cached(cache_salt="mine")
    assert cached(cache_salt="other") == cached(cache_prompt=False) == 0 < cached()


@pytest.mark.parametrize("salt", ["", 7, "x" * 257])
def test_a_salt_that_cannot_be_is_named(client, salt):
    with pytest.raises(openai.BadRequestError, match="cache_salt") as caught:
        ask(client, extra_body={"cache_salt": salt})
    assert caught.value.param == "cache_salt"


def test_a_directory_that_cannot_be_used_is_an_error_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "shadowkv.serve", "--port", "0", "--kv-disk-dir", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout
    reason = f"--kv-disk-dir {tmp_path / 'file'} cannot be used: Not a directory"
    assert done.stderr == f"loading {DEFAULT_MODEL}\nerror: {reason}\n"


def test_too_long(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"role": "user", "content": "word " * 2000}])
    assert caught.value.code == "context_length_exceeded"
    assert "1024" in caught.value.message and "16" in caught.value.message


def test_a_token_that_does_not_exist(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2-135m-instruct", prompt=[1, 10**6])
    assert caught.value.param == "prompt"
    assert "Paris" in ask(client).choices[0].message.content


def test_abandoned_stream_frees_its_sequence(client, engine):
    for _ in range(2 * SMALL["max_num_seqs"]):
        stream = ask(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        stream.close()
    assert "Paris" in ask(client).choices[0].message.content
    assert engine.engine.num_running == 0


def test_the_use_of_the_cache_is_what_requests_in_flight_hold(client, engine):
    ask(client)
    stats = engine.engine.stats(usage=True)
    assert stats.usage == 0 and stats.tiers["device"].used_bytes > 0  # which is kept
    stream = ask(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert 0 < engine.engine.stats(usage=True).usage <= 1
    stream.close()
    ask(client)
    assert engine.engine.stats(usage=True).usage == 0
    assert engine.engine.stats().usage is None


def test_tokens_of_steps_are_counted(client):
    def counts():
        page = httpx.get(str(client.base_url.join("/metrics"))).text
        families = [
            one for one in text_string_to_metric_families(page) if one.name == "shadowkv:iteration_tokens_total"
        ]
        return {sample.name.rpartition("_")[2]: sample.value for one in families for sample in one.samples}

    before = counts()
    usage = ask(client, max_tokens=5, extra_body={"ignore_eos": True, "cache_prompt": False}).usage
    after = counts()
    assert after["sum"] - before["sum"] == usage.prompt_tokens + 5
    assert 1 < after["count"] - before["count"] <= 5  # the first token and the next one may be of one step


def test_batch_with_a_bad_line(engine, tmp_path):
    files = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    body = {"messages": FRANCE, "max_tokens": 16, "temperature": 0}
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(6)
    ]
    files.input.write_text("\n".join([*lines, "bad"]), encoding="utf-8")
    again = engine.another()
    assert run_batch(again, again.model_name, files, 8) == 0
    records = [json.loads(line) for line in files.output.read_text(encoding="utf-8").splitlines()]
    assert sum(record["error"] is not None for record in records) == 1
    answers = [record["response"]["body"] for record in records if record["error"] is None]
    assert len(answers) == 6
    assert all("Paris" in answer["choices"][0]["message"]["content"] for answer in answers)


@contextmanager
def server_process(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "shadowkv.serve", "--port", "0", "--served-model-name", "small", *flags, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("ready: "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        yield process, lines[-1].split()[1]
    finally:
        process.kill()
        process.communicate()


def begin(url: str, max_tokens: int) -> openai.Stream:
    """A stream of which the first chunk has come."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list().data] == ["small"]
    options = {"max_tokens": max_tokens, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(model="small", messages=FRANCE, **options)
    next(stream)
    return stream


@pytest.mark.parametrize(
    "number, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_server_process_stops_cleanly_with_a_request_in_flight(number, code):
    with server_process("--shutdown-timeout", "0.2") as (process, url):
        stream = begin(url, 900)
        process.send_signal(number)
        with pytest.raises(openai.APIError, match="the server is stopping") as cut:
            list(stream)
        assert cut.value.code == "server_stopping"
        _, errors = process.communicate(timeout=300)
        assert process.returncode == code
        assert "Traceback" not in errors and "ERROR" not in errors, errors
        (line,) = [line for line in errors.splitlines() if stream.response.headers["x-request-id"] in line]
        assert "/v1/chat/completions 200 id=" in line and line.endswith(" cut=server_stopping")


def test_a_server_in_the_background_of_a_script_stops_without_an_error():
    """It ignores SIGINT until it serves. That its engine ends because it was stopped is no fault."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits this
    try:
        with server_process() as (process, _):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
            assert process.returncode == 0
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_server_process_drains_and_a_second_signal_ends_it():
    with server_process("--shutdown-timeout", "100") as (process, url):
        stream = begin(url, 40)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 143 and stream.response.headers["x-request-id"] in errors and "cut=" not in errors
    with server_process("--shutdown-timeout", "100") as (process, url):
        stream = begin(url, 900)
        process.send_signal(signal.SIGTERM)
        next(stream)
        with pytest.raises(openai.APIConnectionError):
            while True:  # no new ones meanwhile
                openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode == 143
        with pytest.raises((openai.APIError, httpx.HTTPError)):  # draining, it would have waited for the stream
            list(stream)
