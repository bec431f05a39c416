"""Prompts are filled and cut to their length whatever the units weigh, and framed for a chat without a second BOS."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
from benchmark_data import smollm2_tokenizer

from shadowkv.eval.prompts.fitter import PromptFitter, Question, TooShortError
from shadowkv.models.tokenization.tokenizer import Tokenizer


def with_bos() -> Tokenizer:
    """A tokeniser that begins every text with BOS, as its chat template does."""
    return Tokenizer(
        smollm2_tokenizer().backend,
        special_tokens={"bos_token": "<|endoftext|>"},
        chat_template="{{ bos_token }}USER {{ messages[0].content }}\nASSISTANT",
        add_bos=True,
    )


def lengths(weigh: str, units: int) -> Question:
    """Units of text that are all alike, grow, or are nothing but two heavy ones."""
    texts = {"even": " x" * 5 * units, "growing": " x" * units**2, "heavy": " x" * (700 * (units >= 3) + units)}
    return Question("Text:" + texts[weigh], " Answer:", ("x",))


@pytest.mark.parametrize("weigh", ["even", "growing", "heavy"])
@pytest.mark.parametrize("most", [None, 10, 10000])
def test_as_many_units_as_fit(weigh: str, most: int | None) -> None:
    fitter = PromptFitter(smollm2_tokenizer(), 1000, 100)
    framed = (fitter.frame(*astuple(lengths(weigh, units))[:2]) for units in range(1, (most or 2000) + 1))
    fitting = list(itertools.takewhile(lambda prompt: fitter.count(prompt) <= 900, framed))
    for _ in range(2):  # the second starts from the first
        prompt, question = fitter.fill(lambda units: lengths(weigh, units), 1, most)
        assert prompt == question.text + " Answer:"
        assert fitter.count(prompt) >= min(0.97 * 900, fitter.count(fitting[-1]))
        assert prompt in fitting


def test_what_cannot_fit_is_refused() -> None:
    fitter = PromptFitter(smollm2_tokenizer(), 200, 100)
    with pytest.raises(TooShortError, match="the shortest prompt has 2504 tokens, the length leaves 100"):
        fitter.fill(lambda units: lengths("even", units), 500)
    with pytest.raises(TooShortError, match="leaves no prompt"):
        PromptFitter(smollm2_tokenizer(), 100, 100)


@pytest.mark.parametrize("chat", [False, True])
def test_bos_comes_once(chat: bool) -> None:
    tokenizer = with_bos()
    fitter = PromptFitter(tokenizer, 500, 100, chat)
    prompt, _ = fitter.fill(lambda units: lengths("even", units), 1)
    ids = tokenizer.encode(prompt)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert 360 < len(ids) <= 400
    assert prompt.endswith("\nASSISTANT Answer:" if chat else " x Answer:")
    cut = tokenizer.encode(fitter.cut("begin" + " y" * 900 + " end"))
    assert cut.count(tokenizer.bos_token_id or 0) == 1
    assert 390 < len(cut) <= 400


def test_a_chat_needs_a_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        PromptFitter(Tokenizer(smollm2_tokenizer().backend, special_tokens={}), 500, 100, chat=True)
