"""Command lines of ``vllm serve``: accepted, accepted with a line on what is moot, or refused with the way out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.vllm_flags import FLAGS, NO_EFFECT
from shadowkv.engine.vllm_flags import REFUSED as REFUSED_FLAGS
from shadowkv.serve.__main__ import parse
from shadowkv.serve.http.settings import ServerSettings

DOCS = Path(__file__).parents[2] / "docs/vllm.md"

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("org/model", {"model": "org/model"}),
    ("--max_model_len 8192", {"max_model_len": 8192}),
    ("--max-model-len 8k", {"max_model_len": 8000}),
    ("--max-model-len=8K", {"max_model_len": 8192}),
    ("-tp 2", {"tensor_parallel_size": 2}),
    ("-tp 2 --enable-expert-parallel", {"enable_expert_parallel": True}),
    ("-ep", {"enable_expert_parallel": True}),
    ("--disable-custom-all-reduce", {"disable_custom_all_reduce": True}),
    ("-q fp8", {"quantization": "fp8"}),
    ("--attention-backend FLASH_ATTN", {"attention_backend": "flash-attn"}),
    ("--attention-backend flashinfer", {"attention_backend": "flashinfer"}),
    ("--dtype half", {"dtype": "half"}),
    ("--served-model-name a b", {"served_model_name": ("a", "b")}),
    ("--chat-template chat.jinja", {"chat_template": "chat.jinja"}),
    ("--tokenizer org/other", {"tokenizer": "org/other"}),
    ("--revision v1", {"revision": "v1"}),
    ("--download-dir /models", {"download_dir": "/models"}),
    ("--seed 0", {"seed": 0}),
    ("--root-path /llm", {"root_path": "/llm"}),
    ("--ssl-certfile a.pem", {"ssl_certfile": "a.pem"}),
    ("--ssl-certfile a.pem --ssl-keyfile k.pem", {"ssl_keyfile": "k.pem"}),
    ("--ssl-certfile a.pem --ssl-ca-certs c.pem", {"ssl_ca_certs": "c.pem"}),
    ("--ssl-certfile a.pem --ssl-ca-certs c.pem --ssl-cert-reqs 2", {"ssl_cert_reqs": 2}),
    ("--uvicorn-log-level info", {"uvicorn_log_level": "info"}),
    ('--override-generation-config {"top_k":5}', {"override_generation_config": {"top_k": 5}}),
    ("--enable-prefix-caching", {"enable_prefix_caching": True}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--gpu-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
    ("--max-num-seqs 64", {"max_num_seqs": 64}),
    ("--max-num-batched-tokens 16k", {"max_num_batched_tokens": 16000}),
    ("--kv-cache-dtype fp8", {"kv": "fp8"}),
    ("--load-format auto", {"load_format": "auto"}),
    ("--load-format safetensors", {"load_format": "safetensors"}),
    ("--generation-config vllm", {"generation_config": "vllm"}),
    ('--hf-overrides {"rope_theta":5e6}', {"hf_overrides": {"rope_theta": 5e6}}),
    (
        "--hf-overrides.rope_scaling.factor 4 --hf-overrides.rope_scaling.rope_type=yarn --hf_overrides.rope_theta 5e6",
        {"hf_overrides": {"rope_scaling": {"factor": 4, "rope_type": "yarn"}, "rope_theta": 5e6}},
    ),
    ("--tool-call-parser hermes --enable-auto-tool-choice", {"tool_call_parser": "hermes"}),
    ("--reasoning-parser qwen3", {"reasoning_parser": "qwen3"}),
    ("--api-key one two", {"api_key": ("one", "two")}),
]
WITH_A_LINE = [
    "--trust-remote-code",
    "--enable-chunked-prefill",
    "--swap-space 4",
    "--block-size 16",
    "--enable-request-id-headers",
    "--distributed-executor-backend ray",
    "--response-role bot",
    "--disable-fastapi-docs",
    "--calculate-kv-scales",
    "--enable-reasoning",
    "--use-v2-block-manager",
    "--num-lookahead-slots 2",
    "--preemption-mode swap",
    "--disable-cascade-attn",
    "--stream-interval 4",
    "--worker-cls some.Worker",
    "--mm-processor-kwargs {}",
    "--mm-processor-cache-gb 0",
    "--enable-server-load-tracking",
    "--disable-hybrid-kv-cache-manager",
    "--exclude-tools-when-tool-choice-none",
    "--guided-decoding-disable-any-whitespace",
    "--optimization-level 3",
    "--h11-max-header-count 128",
    "--numa-bind",
    "--compilation-config.cudagraph_mode FULL",
    "--compilation-config.custom_ops+ +rms_norm",
]
REFUSED = [
    ("--enable-lora", "--adapter"),
    ("--lora-modules sql=/adapters/sql", "--adapter"),
    ("--pipeline-parallel-size 2", "--tensor-parallel-size"),
    ("--cpu-offload-gb 4", "--quantization fp8"),
    ("--kv-offloading-size 4", "--kv-offload-gib"),
    ("--convert embed", "no embeddings"),
    ("--disable-sliding-window", "--max-model-len"),
    ("--fully-sharded-loras", "--adapter"),
    ("--kv-events-config {}", "/metrics"),
    ("--logits-processors a.B c.D", "logit_bias"),
    ("--logprobs-mode processed_logprobs", "raw_logprobs"),
    ("--model-loader-extra-config {}", "--load-format"),
    ("--ignore-patterns a* b*", "a directory"),
    ("--enable-eplb", "--enable-expert-parallel"),
    ("--enable-dbo", "--enable-expert-parallel"),
    ("--headless", "shadowkv ray serve"),
    ("--node-rank 1", "shadowkv ray serve"),
    ("--master-addr 10.0.0.1", "shadowkv ray serve"),
    ("--data-parallel-size-local 2", "shadowkv ray serve"),
    ("--data-parallel-backend ray", "shadowkv ray serve"),
    ("--ssl-ciphers TLSv1.2", "proxy"),
    ("--enable-ssl-refresh", "restart"),
    ("--log-config-file log.json", "--uvicorn-log-level"),
    ("--enable-prompt-embeds", "token ids"),
    ("--allowed-local-media-path /media", "leave it out"),
]


def settings(*arguments: str) -> dict[str, Any]:
    args = parse([*arguments, "--port", "0"])
    return {**vars(EngineConfig.from_args(args)), **vars(ServerSettings.from_args(args))}


@pytest.mark.parametrize(("line", "wanted"), ACCEPTED, ids=[line for line, _ in ACCEPTED])
def test_accepted(line: str, wanted: dict[str, Any], capsys: Any) -> None:
    given = settings(*line.split())
    assert {name: given[name] for name in wanted} == wanted
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("line", WITH_A_LINE)
def test_accepted_with_a_line(line: str, capsys: Any) -> None:
    assert settings("org/model", *line.split())["model"] == "org/model"
    assert settings(*line.split(), "org/model")["model"] == "org/model"
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"(note: {re.split('[ .]', line)[0]} has no effect: .+\n){{2}}", err)


@pytest.mark.parametrize(("line", "way_out"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused_with_the_way_out(line: str, way_out: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"error: {line.split()[0]}") and " is not supported: " in err and way_out in err


def test_a_file_of_flags(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: org/model\nmax_model_len: 8k\nport: 8100\nserved-model-name: [a, b]\nenforce-eager: true\n"
        "enable-prefix-caching: false\ntrust-remote-code: true\nenable-lora: false\n"
        "hf-overrides: {rope_theta: 5000000.0}\napi-key: [one, two]\nkv-cache-dtype: fp8\nseed: null\n"
    )
    args = parse(["--config", str(file)])
    assert capsys.readouterr().err.startswith("note: --trust-remote-code has no effect")
    assert (args.model, args.max_model_len, args.port, args.served_model_name) == ("org/model", 8000, 8100, ("a", "b"))
    assert args.enforce_eager and not args.enable_prefix_caching and args.hf_overrides == {"rope_theta": 5e6}
    assert args.kv == "fp8" and args.seed is None
    more = "other --max_model_len 4096 --api-key three --kv full --enable-prefix-caching"
    args = parse([*more.split(), "--config", str(file)])
    assert (args.model, args.max_model_len, args.port) == ("other", 4096, 8100)
    assert ServerSettings.from_args(args).api_key == ("three",) and args.kv == "full" and args.enable_prefix_caching
    for text, words in (
        ("max-model-length: 5", "there is no flag 'max-model-length': did you mean --max-model-len?"),
        ("config: other.yaml", "there is no flag 'config'"),
        ("- a", "has no flags, as in 'max-model-len: 8192'"),
        ("a: [", "while parsing"),
        ("port: [1, 2]", "argument --port: '[1, 2]' is no whole number"),
        ("enable-lora: true", "--enable-lora is not supported"),
        ("[" * 100_000, "it is nested too deeply"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "an alias (*name): write out what it stands for"),
        ("a: &a [*a]", "an alias (*name)"),
        ("a: b\n" * 100_000, "it has more than 128 KiB"),
        ("model: 2024-01-01", "'model' has a value that JSON does not have; put it in quotes"),
        ("port: " + ":".join(["1"] * 5000), "'port' has a value that JSON does not have"),
        (f"allowed-origins: '{'[' * 100_000}'", "is not a JSON list of strings"),
    ):
        capsys.readouterr()
        file.write_text(text)
        with pytest.raises(SystemExit):
            parse(["--config", str(file)])
        assert words in (err := capsys.readouterr().err) and err.count("\n") == 1
    for path, words in ((tmp_path / "none.yaml", "No such file"), ("/dev/zero", "it has more than 128 KiB")):
        with pytest.raises(SystemExit):
            parse(["--config", str(path)])
        assert words in capsys.readouterr().err


def test_flags_from_a_pipe() -> None:
    reading, writing = os.pipe()  # as of a shell's <(...)
    with os.fdopen(writing, "w") as pipe:
        pipe.write("port: 8100")
    try:
        assert parse(["--config", f"/dev/fd/{reading}"]).port == 8100
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--max-model-lem 5", "did you mean --max-model-len?"),
        ("--enable-loras", "unrecognized arguments: --enable-loras (see"),
        ("--swap-spaces=4", "unrecognized arguments: --swap-spaces=4 (see"),
        ("--hf-overrides.a", "argument --hf-overrides.a: expected one argument"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "argument --hf-overrides.a.b: it conflicts with another argument"),
        (
            "--hf-overrides {} --hf-overrides.a 1",
            "argument --hf-overrides: pass either the whole object or its entries",
        ),
        ("--port.a 1", "unrecognized arguments: --port.a"),
        ("--max-model-len 8.5K", "'8.5K' is no whole number"),
        ("--max-model-len 0.0001k", "'0.0001k' is no whole number"),
        ("--max-num-seqs many", "'many' is no whole number"),
        ("--attention-backend TRITON_ATTN", "'TRITON_ATTN' is not one of auto, shadowkv, flashinfer, flash-attn"),
    ],
)
def test_mistakes(line: str, words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(line.split())
    assert words in capsys.readouterr().err


def test_the_processs_own_arguments_are_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["shadowkv", "org/model", "--max_model_len=8k"])
    args = parse(None)
    assert (args.model, args.max_model_len) == ("org/model", 8000)


@pytest.mark.parametrize(
    "line",
    ["--pipeline-parallel-size 1", "--scheduling-policy fcfs", "--task generate", "-pp 1 -dp 1", "--convert none"]
    + ["--logprobs-mode raw_logprobs -n 1 -r 0", "--worker-cls auto", "--response-role assistant", "--no-enable-eplb"],
)
def test_the_model_may_be_last(line: str, capsys: Any) -> None:
    assert settings(*line.split(), "org/model")["model"] == "org/model"
    assert settings("org/model", *line.split())["model"] == "org/model"
    assert capsys.readouterr() == ("", "")


def test_flags_with_many_values_take_them_all(capsys: Any) -> None:
    for flag in ("--cuda-graph-sizes 1 2 4", "--collect-detailed-traces model worker"):
        assert settings("org/model", *flag.split())["model"] == "org/model"
    assert settings("org/model", "-O3")["model"] == settings("-O", "3", "org/model")["model"] == "org/model"
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_what_asks_for_nothing_needs_no_words(capsys: Any) -> None:
    line = "-pp 1 --data_parallel_size=1 --cpu-offload-gb 0 --tokenizer-mode auto --no-enable-lora --max-model-len auto"
    assert settings(*line.split())["max_model_len"] is None
    assert settings("--max-model-len", "-1", "--max-num-seqs", "25.6k")["max_num_seqs"] == 25600
    assert capsys.readouterr() == ("", "")
    settings("--no-enable-chunked-prefill")
    assert capsys.readouterr().err.startswith("note: --no-enable-chunked-prefill has no effect: always on")


def test_the_flags_that_the_document_calls_the_same_are_there(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    here = {*re.findall(r"--?[a-z][a-z-]*", capsys.readouterr().out)}
    rows = [row.split("|") for row in DOCS.read_text(encoding="utf-8").splitlines() if "| the same" in row]
    named = {flag for row in rows for flag in re.findall(r"`(--?[a-z-]+)", row[1])}
    assert len(named) > 40 and named <= here, named - here


def test_the_document_has_every_flag_with_its_reason() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for table in (NO_EFFECT, REFUSED_FLAGS):
        names = {
            reason: [f"`{name}`" for flag in FLAGS if flag.reason == reason for name in flag.names] for reason in table
        }
        wanted = "".join(f"| {', '.join(names[reason])} | {reason} |\n" for reason in table)
        assert wanted in text, f"docs/vllm.md should have these rows:\n{wanted}"
