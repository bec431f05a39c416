"""Words that PDFs lose, counted against their texts."""

from __future__ import annotations

import sys

import pytest
from page_files import pdf

from robustness.pdf_words import lost, main, words


def test_what_counts_as_lost():
    known = words("The e\ufb03cient keeper trimmed the wick.")
    assert known == ["the", "efficient", "keeper", "trimmed", "the", "wick"]
    assert list(lost(known, words("1 The efficient keeper trimmed the wick 2"))) == []
    assert list(lost(known, words("The efficientkeeper trimmed the"))) == [
        (["efficient", "keeper"], ["efficientkeeper"]),
        (["wick"], []),
    ]


def test_it_fails_where_words_are_lost(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pypdfium2", reason="pypdfium2 reads PDFs")
    text = "The keeper trimmed the wick and wound the clockwork."
    (tmp_path / "text.txt").write_text(text)
    for name, raw, said, status in (
        ("whole.pdf", pdf(text), "whole.pdf: 1 page, 9 words, 0 lost (0.00%), 0 by a space", 0),
        ("part.pdf", pdf(text[:22] + text[23:]), "part.pdf: 1 page, 9 words, 2 lost (22.22%), 2 by a space", 1),
        ("scan.pdf", pdf(""), "scan.pdf: refused: this PDF has no text", 1),
    ):
        (tmp_path / name).write_bytes(raw)
        monkeypatch.setattr(sys, "argv", ["pdf_words", str(tmp_path / name), str(tmp_path / "text.txt")])
        assert main() == status
        assert said in capsys.readouterr().out
