"""Stop strings in text that comes in pieces."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.engine.answer_text import Detokenizer


class Pieces:
    """A stream whose token i is the i-th piece, and which may have kept something back."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


def run(pieces: list[str], stop: tuple[str, ...], rest: str = "") -> tuple[list[str], bool]:
    """Text after each token, until a stop string or, with what ``finish`` adds, the end; and whether it stopped."""
    detokenizer = Detokenizer(Pieces(pieces, rest), stop)
    texts = []
    for token in range(len(pieces)):
        assert not detokenizer.stopped
        texts.append(detokenizer.push([token]))
        if detokenizer.stopped:
            return texts, True
    texts.append(detokenizer.finish())
    return texts, detokenizer.stopped


def test_without_stop_strings_text_passes_at_once():
    assert run(["Hel", "", "lo", " wörld"], ()) == (["Hel", "", "lo", " wörld", ""], False)


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["Hi STOP there"], ("STOP",), ["Hi "]),
        (["Hi S", "TO", "P there"], ("STOP",), ["Hi ", "", ""]),
        (["a", "\n", "\n", "b"], ("\n\n",), ["a", "", ""]),
        (["STOP"], ("STOP",), [""]),
        (["x", "S", "T", "O", "P"], ("STOP",), ["x", "", "", "", ""]),
        (["one END two STOP"], ("STOP", "END"), ["one "]),
        (["aab"], ("ab",), ["a"]),
        (["a", "a", "b"], ("ab",), ["", "a", ""]),
        (["x", "."], (".",), ["x", ""]),
    ],
)
def test_text_ends_before_the_first_stop_string(pieces, stop, texts):
    assert run(pieces, stop) == (texts, True)


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["Hi S", "U", "N"], ("STOP",), ["Hi ", "SU", "N", ""]),
        (["Hi ST"], ("STOP",), ["Hi ", "ST"]),
        (["SSTO", "STO", "x"], ("STOP",), ["S", "STO", "STOx", ""]),
        (["abab", "ab", "c"], ("ababb",), ["", "ab", "ababc", ""]),
        (["q</", "s", "t"], ("</s>", "<|end|>"), ["q", "", "</st", ""]),
        (["ab"], ("bcd", "abz"), ["", "ab"]),
    ],
)
def test_what_may_begin_a_stop_string_is_held_until_it_is_known_not_to(pieces, stop, texts):
    assert run(pieces, stop) == (texts, False)


def test_finish_gives_back_the_held_text_and_what_the_stream_kept():
    assert run(["ab", "S"], ("STOP",), rest="T�") == (["ab", "", "ST�"], False)


def test_a_stop_string_that_the_flush_completes_still_stops():
    texts, stopped = run(["ab", "ST"], ("STOP",), rest="OP tail")
    assert ("".join(texts), stopped) == ("ab", True)


def test_nothing_is_left_after_finish():
    detokenizer = Detokenizer(Pieces(["S"]), ("STOP",))
    assert detokenizer.push([0]) == ""
    assert detokenizer.finish() == "S"
    assert detokenizer.finish() == ""


def held(text: str, stop: tuple[str, ...]) -> int:
    """Characters at the end of ``text`` that could still become part of a stop string: the most of them."""
    return max(
        (n for one in stop for n in range(len(one)) if n <= len(text) and text[len(text) - n :] == one[:n]), default=0
    )


def check(pieces: list[str], stop: tuple[str, ...], rest: str) -> None:
    """Everything sent so far is right, and no more is held than has to be, after every token."""
    texts, stopped = run(pieces, stop, rest)
    seen = sent = ""
    for i, text in enumerate(texts):
        seen += pieces[i] if i < len(pieces) else rest
        sent += text
        places = [seen.find(one) for one in stop if one in seen]
        if places:
            assert i == len(texts) - 1
            assert stopped
            assert sent == seen[: min(places)]
            return
        expected = seen if i == len(pieces) else seen[: len(seen) - held(seen, stop)]
        assert sent == expected
    assert not stopped


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3).map(tuple),
    rest=st.text("ab", max_size=2),
)
def test_any_split_of_any_text_stops_at_its_first_stop_string(pieces, stop, rest):
    check(pieces, stop, rest)


def test_a_long_text_cut_anywhere_gives_the_same_result(drawn):
    draw = random.Random(drawn)
    text = "".join(draw.choice("abc<|>") for _ in range(3000)) + "<|end|>" + "abc" * 5
    wanted = text[: text.find("<|end|>")]
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(text)), 700))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        texts, stopped = run(pieces, ("<|end|>",))
        assert stopped
        assert "".join(texts) == wanted


def test_the_stop_string_that_comes_first_is_known():
    detokenizer = Detokenizer(Pieces(["ab", "xSTOP", "END"]), ("END", "STOP"))
    assert [detokenizer.push([token]) for token in range(2)] == ["ab", "x"]
    assert detokenizer.stop_string == "STOP"
