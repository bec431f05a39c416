"""Checks the benchmark's client with another one: guidellm, the vLLM project's load generator, replays the same trace
against the same server.

guidellm's prompts are made-up texts with the trace's numbers of tokens, counted by a tokenizer that must be the
server's. guidellm's ITL is the TPOT of vLLM's benchmark, and guidellm's TPOT includes the first token. It has no figure
for the gaps between single tokens.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.cases import LIMITS


def replay_with_guidellm(
    program: str, base_url: str, trace: Path, tokenizer: Path, folder: Path, label: str
) -> dict[str, Any]:
    """Replays a trace with guidellm, started by the command ``program``. Returns the figures that ``result_of``
    returns, without those of gaps. Raises RuntimeError if guidellm or a request fails."""
    out = (folder / f"{label.replace(' ', '-')}.guidellm.json").resolve()
    target = base_url.removesuffix("/v1")
    data = {"kind": "trace_synthetic", "source": {"kind": "json_file", "path": str(trace.resolve())}}
    command = [
        *(
            *shlex.split(program),
            "run",
            "--backend",
            f"kind=openai_http,target={target},request_format=/v1/completions",
        ),
        *("--profile", "kind=replay", "--data", json.dumps(data)),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer.resolve()}"),
        *("--output", f"kind=json,path={out}", "--disable-progress"),
    ]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"guidellm ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    found = json.loads(out.read_text(encoding="utf-8"))
    (benchmark,) = found["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["errored"] or totals["incomplete"] or not totals["successful"]:
        raise RuntimeError(f"guidellm: of its requests, {totals}")
    return {"guidellm_version": found["metadata"]["guidellm_version"], **figures_of(benchmark)}


def figures_of(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Computes figures with vLLM's definitions and names from the single requests in guidellm's report of a
    benchmark."""
    requests = benchmark["requests"]["successful"]
    ttft = [request["time_to_first_token_ms"] for request in requests]
    tpot = [request["inter_token_latency_ms"] for request in requests]
    seconds = max(one["request_end_time"] for one in requests) - min(one["request_start_time"] for one in requests)
    good = sum(a <= LIMITS["ttft"] and b <= LIMITS["tpot"] for a, b in zip(ttft, tpot, strict=True))
    summary: dict[str, Any] = {"completed": len(requests), "duration": seconds, "p99_itl_ms": None, "goodput": LIMITS}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        summary |= {f"mean_{name}_ms": float(np.mean(values)), f"p99_{name}_ms": float(np.percentile(values, 99))}
    return {
        **summary,
        "output_throughput": sum(one["output_tokens"] for one in requests) / seconds,
        "request_goodput": good / seconds,
        "good_share": good / len(requests),
    }
