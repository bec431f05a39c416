"""Changes model files, chat templates and JSON bodies at random; whatever reads them must refuse in its documented way.

Starts from small valid ones, then flips, cuts, doubles and inserts bytes, inserts numbers at the bounds, and pieces of
other cases. Each case depends only on the seed, its target and its number. Reading must end within a few seconds and
little memory, either successfully or with the exception that its docstring names; for a model's file that is one line
that says where.

    python -m robustness.fuzz_files --cases 100000 --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import tokenizers
import torch
from safetensors.numpy import save_file

from robustness.tiny_model import CONFIG
from shadowkv.models import Decoder, load_model
from shadowkv.models.checkpoints.files import ModelFileError
from shadowkv.models.registry import config_from_hf, family
from shadowkv.models.tokenization.chat_template import ChatTemplate
from shadowkv.serve.bodies.body import parse_json

CASE_SECONDS, MEMORY = 20, 2 << 30
"""Limits of a case; hostile templates are stopped after two seconds of their own time."""

MAX_FAULTS = 100
TEMPLATES = (
    "{% for m in messages %}{{ '<|' ~ m.role + '|>' }}{{ m['content'] | trim }}\n{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{% for i in range(9) %}{% set ns.n = ns.n + i * 2 ** 3 %}{{ ns.n }}{% endfor %}",
    "{% macro f(x, n=2) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{{ x.upper().replace('A', 'bb') }}{% endmacro %}"
    "{{ f('a') }}{{ '%5d|%s' % (3, 'x') }}{{ '{:>4}'.format(7) }}{{ tools | tojson(indent=2) }}{{ 'a' | center(9) }}",
    "{% set x %}{{ bos_token }}{% endset %}{{ x.split('<')[0][::-1] }}{{ messages | map(attribute='role') | join }}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% else %}{{ strftime_now('%Y') }}{% endif %}{# #}",
)
PIECES = (
    *("{%", "%}", "{{", "}}", "{#", "#}", " recursive ", "loop(x)", "break", "**", "*", "~", "+", "|", "(", ")", "["),
    *("10**9", "range(99999)", "'x' * 9**9", "__class__", ".format", "{:>9999}", "|indent(99999)", "|list", "|string"),
    *("{% for x in range(9999) %}", "{% endfor %}", "{% set x = x ~ x %}", "{% include 'x' %}", "\\ud800", "|tojson"),
    *('"', ",", ":", "null", "true", "NaN", "-1", "1e999", "[" * 3000, '{"a":' * 3000, "9" * 5000, "\\u0000", "\ud7ff"),
    *('"eos_token_id":', '"rope_scaling":', '"added_tokens":', '"vocab":', '"merges":', '"data_offsets":', '"shape":'),
)  # fmt: skip
NUMBERS = (0, 1, 2, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
MESSAGES = ({"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"})


def read_json(raw: bytes) -> None:
    """Reads; the result can be written back."""
    value = parse_json(raw)
    assert parse_json(json.dumps(value, allow_nan=False).encode()) == value


def read_template(raw: bytes) -> None:
    """Renders."""
    ChatTemplate(raw.decode("utf-8", "replace")).render(MESSAGES, tools=[{"name": "f"}], bos_token="<s>")


def file_reader(folder: Path, name: str) -> Callable[[bytes], None]:
    """Loads the model of ``folder``, after the content of its file ``name`` was replaced."""

    def read(raw: bytes) -> None:
        path = folder / name
        good = path.read_bytes()
        path.write_bytes(raw)
        try:
            tokenizer = load_model(path if path.suffix == ".gguf" else folder).tokenizer
            ids = tokenizer.encode("Hi, abc <|im_end|>\n\u00e9")
            tokenizer.decode(ids)
        finally:
            path.write_bytes(good)

    return read


def write_folder(folder: Path) -> None:
    """A small model in both formats."""
    config = {**CONFIG, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    stated = {"eos_token": {"content": "#"}, "add_bos_token": False, "chat_template": TEMPLATES[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    vocab = {chr(ord(" ") + index): index for index in range(90)} | {"ab": 90, "abc": 91}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    tensors = {}
    outline = Decoder(config_from_hf(config), torch.float32, "meta")
    parameters = dict(outline.named_parameters())
    for name, target in family("llama").targets(outline.config).items():
        tensors[name] = np.ones((target.stop - target.start, *parameters[target.parameter].shape[1:]), np.float16)
    save_file(tensors, folder / "model.safetensors")
    _write_gguf(folder / "tiny.gguf", config, tensors, vocab)


def _write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], vocab: dict[str, int]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*vocab, *(f"[{index}]" for index in range(len(vocab), 96))])
    writer.add_token_types([1] * 95 + [3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATES[1])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in tensors.items():
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        read: takes bytes; raises ``documented``, or an exception that is a fault.
        seeds: valid inputs.
        documented: exceptions it may raise; for files, the message is a line that says where.
        folder: of the model, if the target is one of its files. Where two files disagree, either may be named.
    """

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    documented: type[Exception]
    folder: Path | None = None

    def fault(self, raw: bytes) -> str | None:
        """What is wrong with how ``raw`` is read, None if nothing; "" if it was refused as documented."""
        try:
            self.read(raw)
        except self.documented as error:
            text = str(error)
            if self.folder is not None and not (text.startswith(str(self.folder)) and text.isprintable()):
                return f"not a line that says where: {text[:200]!r}"
            return ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # all others are findings; a panic of the tokenizers library is not an Exception
            return f"{type(error).__name__}: {error}"[:300]
        return None


@contextlib.contextmanager
def all_targets() -> Iterator[dict[str, Target]]:
    """Targets by name."""
    bodies = [{"model": "m", "messages": MESSAGES}, {"prompt": [1, 2.5, -3e5, None, True], "a": {"b": "\u00e9\n"}}]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        write_folder(folder)
        files = ["tiny.gguf", "model.safetensors", "config.json", "generation_config.json", "tokenizer.json"]
        yield {
            "body": Target(read_json, tuple(json.dumps(body).encode() for body in bodies), JSONDecodeError),
            "template": Target(read_template, tuple(text.encode() for text in TEMPLATES), ValueError),
            **{
                file: Target(file_reader(folder, file), ((folder / file).read_bytes(),), ModelFileError, folder)
                for file in [*files, "tokenizer_config.json"]
            },
        }


def generator(seed: int, target: str, number: int) -> random.Random:
    """Random numbers for a case, from all that it depends on."""
    return random.Random(f"{seed} {target} {number}")


def changed(target: Target, rng: random.Random) -> bytes:
    """A seed of the target after a few changes, mostly near its start, where headers are."""
    raw = bytearray(rng.choice(target.seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(raw) + 1) if rng.random() < 0.5 else rng.randrange(min(len(raw), 4000) + 1)
        length, kind = rng.choice((1, 2, 8, 50)), rng.randrange(8)
        if kind == 0:
            raw[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in raw[at : at + 1])
        elif kind == 1:
            del raw[at : at + length]
        elif kind == 2:
            raw[at:at] = raw[at : at + length] * rng.choice((1, 2, 100))
        elif kind == 3:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 4:
            raw[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
        elif kind == 5:
            raw[at : at + rng.choice((0, length))] = rng.choice(PIECES).encode("utf-8", "surrogatepass")
        elif kind == 6:
            digits = [index for index, byte in enumerate(raw[:9999]) if chr(byte).isdigit()] or [0]
            place = rng.choice(digits)
            values = (str(rng.choice(NUMBERS)), "-1", "1.5", "null", '"x"', "[]", "{}")
            raw[place : place + 1] = rng.choice(values).encode()
        else:
            del raw[at : None if rng.random() < 0.3 else at + 1]
    return bytes(raw)


@dataclass
class Found:
    """Figures of one target."""

    cases: int = 0
    refused: int = 0
    slowest: tuple[float, int] = (0.0, -1)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


def confine() -> tuple[int, int]:
    """Limits this process to one thread and ``MEMORY`` more bytes; returns the previous limits of its memory."""
    torch.set_num_threads(1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, limits[1]))
    return limits


def fuzz(args: argparse.Namespace) -> dict[str, Found]:
    """Figures of all requested targets, which take turns."""
    limits = confine()
    end = time.monotonic() + args.seconds
    try:
        with all_targets() as targets:
            chosen = {name: targets[name] for name in args.targets or targets}
            figures = {name: Found() for name in chosen}
            for number in range(args.first, args.first + args.cases):
                for name, target in chosen.items():
                    _one(name, target, number, args.seed, figures[name])
                faults = sum(tally.faults.total() for tally in figures.values())
                if time.monotonic() > end or faults >= MAX_FAULTS:
                    break
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        faulthandler.cancel_dump_traceback_later()
    return figures


def _one(name: str, target: Target, number: int, seed: int, figures: Found) -> None:
    raw = changed(target, generator(seed, name, number))
    # Endless reads are only detected from outside: this prints where they are and ends the process with status 1.
    faulthandler.dump_traceback_later(10 * CASE_SECONDS, exit=True)
    start = time.monotonic()
    fault = target.fault(raw)
    seconds = time.monotonic() - start
    if seconds > CASE_SECONDS:
        fault = f"it took {seconds:.0f} s"
    figures.cases += 1
    figures.refused += fault == ""
    figures.slowest = max(figures.slowest, (seconds, number))
    if fault:
        figures.faults[fault] += 1
        figures.examples.append(f"{name} {number}: {fault}: {raw[:300]!r}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="of each target (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="stop after (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="start with that case, to see it again")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="only these (default: all)")
    return parser.parse_args(argv)


def main() -> int:
    """Command line; returns the exit status."""
    faulthandler.enable()  # a crash in native code reports its place
    figures = fuzz(parse())
    print(f"{'target':24}{'cases':>8}{'refused':>9}{'faults':>8}  slowest")
    for name, tally in figures.items():
        seconds, number = tally.slowest
        counts = f"{tally.cases:8}{tally.refused:9}{tally.faults.total():8}"
        print(f"{name:24}{counts}  {seconds:.2f} s, number {number}")
    for tally in figures.values():
        for example in tally.examples:
            print(example)
    return 1 if any(tally.faults for tally in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
