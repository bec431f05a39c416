"""The suite ``fidelity``: it cuts prompts from texts, generates a continuation of each prompt with full attention, and
runs every policy over this continuation by teacher forcing."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from shadowkv.eval.fidelity.follow import follow, prompts_at_once
from shadowkv.eval.fidelity.measured import Measured, read_measured, write_measured
from shadowkv.eval.fidelity.plots import plot_fidelity
from shadowkv.eval.fidelity.prompts import Prompt, read_prompts
from shadowkv.eval.fidelity.report import write_tables
from shadowkv.eval.records.policies import Policy
from shadowkv.eval.reports.ablation import write_ablation
from shadowkv.models.loader import LoadedModel


def cut(args: argparse.Namespace, loaded: LoadedModel) -> list[Prompt]:
    """Returns the prompts that the command asks for. Raises ValueError if they are too long or too many."""
    need, max_position = args.prompt_tokens + args.new_tokens, loaded.config.max_position
    if need > max_position:
        raise ValueError(
            f"--prompt-tokens and --new-tokens make {need} tokens, but {loaded.name} takes at most {max_position}"
        )
    return read_prompts(args.text, loaded.tokenizer, args.prompts, args.prompt_tokens, args.own_texts)


def measure(
    args: argparse.Namespace,
    loaded: LoadedModel,
    policies: Sequence[Policy],
    prompts: Sequence[Prompt],
    model: str,
    leading: LoadedModel | None = None,
) -> list[Measured]:
    """Measures the policies and prompts that are missing in fidelity.json of ``--out``, a few prompts at a time. All
    output files are rewritten after each group of prompts.

    Args:
        leading: the model that generates the continuations with full attention; None if it is ``loaded``, the model
            that the policies run on.
    """
    path = args.out / "fidelity.json"
    measured = read_measured(path)
    done = {(one.prompt, one.policy) for one in measured}
    missing = [policy for policy in policies if any((one.name, policy.label) not in done for one in prompts)]
    left = [one for one in prompts if any((one.name, policy.label) not in done for policy in missing)]
    size = args.batch or (prompts_at_once(loaded, missing, args.prompt_tokens + args.new_tokens) if left else 1)
    groups = [left[start : start + size] for start in range(0, len(left), size)]
    with tqdm(total=len(groups) * args.new_tokens, unit="step", smoothing=0) as bar:
        for group in groups:
            bar.set_postfix_str(group[0].name)
            new = follow(loaded, missing, group, args.new_tokens, args.measure_every, bar.update, leading)
            replaced = {(one.prompt, one.policy) for one in new}
            measured = [one for one in measured if (one.prompt, one.policy) not in replaced] + new
            write_measured(path, measured)
            _write_outputs(measured, model, args.prompt_tokens, args.out)
    if not left:
        _write_outputs(measured, model, args.prompt_tokens, args.out)
    return measured


def _write_outputs(measured: Sequence[Measured], model: str, tokens: int, folder: Path) -> None:
    write_tables(measured, model, tokens, folder)
    if importlib.util.find_spec("matplotlib") is not None:
        plot_fidelity(measured, f"{model}, {tokens} tokens of context", folder)


def write_divergence_ablation(field: str, measured: Sequence[Measured], model: str, tokens: int, folder: Path) -> None:
    """Writes the table and the plot of an ablation: the mean KL over prompts of ``tokens`` tokens, for each value of
    ``field``."""
    samples: dict[tuple[int, str], list[list[float]]] = {}
    for result in measured:
        samples.setdefault((tokens, result.policy), [[]])[0].append(result.mean_kl)
    write_ablation(field, "mean_kl", "mean KL to full attention, nats per token", samples, model, folder)
