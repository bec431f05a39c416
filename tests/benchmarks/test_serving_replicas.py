"""The measurement of several engines behind one port, with a tiny model on a CPU."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from benchmarks.serving.replicas import draw_questions, main, parse
from benchmarks.serving.routed_server import RoutedTable
from robustness.tiny_model import tiny_model

SIZES = ["--document=128", "--question=16", "--answer=4", "--documents=2", "--rate=50", "--pause=0.05"]


def test_runs_with_one_seed_have_the_same_times_and_documents_of_their_own(tmp_path: Path) -> None:
    args = parse([f"--out={tmp_path}", *SIZES])
    first, second = (draw_questions(args, 4, 10.0, 3, run) for run in ("prefix", "random"))
    assert [one.timestamp for one in first] == [one.timestamp for one in second] == sorted(o.timestamp for o in first)
    assert not {one.document_seed for one in first} & {one.document_seed for one in second}
    prompts = [tuple(one.prompt(100)) for one in first]
    assert {len(prompt) for prompt in prompts} == {144}
    assert len({prompt[:128] for prompt in prompts}) == 4 and len(set(prompts)) == len(prompts) == 12


def test_a_routing_that_changes(tmp_path: Path) -> None:
    table, loads = RoutedTable(file := tmp_path / "routing", 1), {"0": 0, "1": 0}
    file.write_text("prefix")
    assert len({table.choose("ab", loads) for _ in range(20)}) == 1
    file.write_text("random")
    assert len({table.choose("ab", loads) for _ in range(20)}) == 2
    file.write_text("one")
    assert {table.choose("", loads) for _ in range(20)} == {"0"}


def test_four_runs(tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--load-format=dummy", "--device=cpu", "--kv=full"]
    with tiny_model() as model:
        sizes = [*SIZES, "--vocab-size=128", f"--port={port}", f"--out={tmp_path}"]
        assert main([*sizes, "--", f"--model={model}", *flags]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "replicas.json").read_text())
    runs = result["runs"]
    assert {name: run["completed"] for name, run in runs.items()} == {"one": 6, "two": 12, "prefix": 12, "random": 12}
    assert runs["prefix"]["rate"] == runs["random"]["rate"] and runs["prefix"]["cached_share"] > 0
    assert result["tokens_two_over_one"] > 0 and "times the tokens/s" in capsys.readouterr().out
