"""Asks a running server's web page three questions about each of five documents, and keeps the answers unchanged.

shadowkv serve --model smollm2-135m-64k-chat
apt-get download debian-history doc-debian texlive-base base-files
for package in *.deb; do dpkg -x $package unpacked; done
python -m benchmarks.serving.document_answers --root unpacked --out results/answers/smollm2-135m-64k-chat.json

Chromium acts as a user of the page: it adds the document, asks a question, and asks two more in the same chat.
Documents that the file already has are skipped. An answer counts as right if it matches all expected patterns. With
--summary, nothing is asked: the answers in the given files are printed as one Markdown text.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shadowkv.eval.provenance import command, commit
from shadowkv.eval.records.predictions import write_json

MAX_SECONDS = 1800
"""Time limit of an answer. On a CPU, a model of 1.5B parameters takes minutes for a prompt of 18,000 tokens."""


@dataclass(frozen=True)
class Document:
    """A file of a Debian package, and questions about it. Each question has patterns, all of which a right answer
    matches."""

    name: str
    package: str
    path: str
    questions: dict[str, tuple[str, ...]]


DOCUMENTS = (
    Document(
        "BibTeXing (PDF)",
        "texlive-base",
        "usr/share/doc/texlive-doc/bibtex/base/btxdoc.pdf",
        {
            "With which version of LaTeX should BibTeX 0.99b be used?": ("2\\.09\\b",),
            "Which command includes every entry of the database files in the reference list?": ("nocite\\{\\*\\}",),
            "Where in the database files must a cross-referenced entry stand?": (
                "later|after (every|all|the|any)|at the end",
            ),
        },
    ),
    Document(
        "DVI specials for PDF generation (PDF in two columns)",
        "texlive-base",
        "usr/share/doc/texlive-doc/dvipdfmx/dvipdfmx-special.pdf",
        {
            "Who designed DVI, and in which year?": ("Fuchs", "1979"),
            "Why did the navigation buttons of the beamer package not work?": ("empty",),
            "Since when has DVIPDFMx supported the full functionality of the PGF package?": ("June 2008",),
        },
    ),
    Document(
        "GNU General Public License, version 3",
        "base-files",
        "usr/share/common-licenses/GPL-3",
        {
            "For how many years must a written offer of the source code be valid?": ("three|\\b3\\b",),
            "I was told of a violation for the first time. "
            "Within how many days do I have to cure it to keep my license?": ("\\b30\\b|thirty",),
            "With works under which other license may I combine a work under this license by section 13?": ("Affero",),
        },
    ),
    Document(
        "Constitution of the Debian Project",
        "doc-debian",
        "usr/share/doc/debian/constitution.txt.gz",
        {
            "For how long does the Project Leader serve?": ("one year|\\b1 year|a year",),
            "Which majority is needed to amend this constitution?": ("3:1|three to one|three-to-one",),
            "How is Q defined?": ("half (of )?the square root|square root .{0,60}(half|divided by (2|two))",),
        },
    ),
    Document(
        "A Brief History of Debian (PDF)",
        "debian-history",
        "usr/share/doc/debian-history/docs/project-history.en.pdf",
        {
            "Who founded Debian, and where does its name come from?": ("Murdock", "Debra"),
            "Which release was the first with a code name, and which films are the code names from?": (
                "Buzz|1\\.1",
                "Toy Story",
            ),
            "What happened to a Debian server in November 2002?": ("fire|burn",),
        },
    ),
)

KEPT = """() => new Promise((resolve, reject) => {
  const opening = indexedDB.open("shadowkv");
  opening.onerror = () => reject(opening.error);
  opening.onsuccess = () => {
    const reading = opening.result.transaction("chats").objectStore("chats").getAll();
    reading.onsuccess = () => { opening.result.close(); resolve(reading.result); };
  };
})"""
"""JavaScript that returns the chats that the page keeps."""


@contextmanager
def opened_page(url: str) -> Iterator[Any]:
    """A context manager that yields the server's page, opened in a new browser without data of earlier visits."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(1000 * MAX_SECONDS)
        page.goto(url)
        page.locator("#send:enabled").wait_for()
        yield page
        browser.close()


def asked_about(document: Document, raw: bytes, url: str) -> dict[str, Any]:
    """Asks all questions about a document in one chat. Returns the chat as the page keeps it."""
    with opened_page(url) as page:
        name = Path(document.path).name.removesuffix(".gz")
        page.set_input_files("#file", {"name": name, "mimeType": "application/octet-stream", "buffer": raw})
        page.locator("#documents li", has_text="tokens").wait_for()
        for question in document.questions:
            page.fill("#question", question)
            page.locator("#send:enabled").wait_for()
            page.press("#question", "Enter")
            page.locator("#stop:enabled").wait_for()
            page.locator("#stop:disabled").wait_for(state="attached")
            if error := page.locator("#ask-error").text_content():
                raise SystemExit(f"{document.name}: {error}")
        [chat] = page.evaluate(KEPT)
        return chat


def record(document: Document, raw: bytes, chat: dict[str, Any]) -> dict[str, Any]:
    """Returns a document's entry in the file of answers."""
    answers = []
    for turn in chat["turns"]:
        [answer] = turn["answers"]
        answers.append({"question": turn["question"], **{name: answer[name] for name in ("text", "end", "meta")}})
    [asked] = chat["turns"][0]["documents"]
    about = {"name": document.name, "package": document.package, "path": document.path}
    digest = hashlib.sha256(raw).hexdigest()
    return {**about, "sha256": digest, "pages": asked["pages"], "tokens": asked["tokens"], "answers": answers}


def verdict(answer: dict[str, Any]) -> str:
    """Returns ``right`` if an answer matches all expected patterns, in upper or lower case, else ``wrong``."""
    expected = {question: words for document in DOCUMENTS for question, words in document.questions.items()}
    found = (re.search(words, answer["text"], re.IGNORECASE | re.DOTALL) for words in expected[answer["question"]])
    return "right" if all(found) else "wrong"


def in_numbers(answers: list[dict[str, Any]]) -> str:
    """Returns, as text, how many answers are right, and how many the page stopped because they repeated themselves."""
    right = sum(verdict(answer) == "right" for answer in answers)
    stopped = sum(answer["end"] == "repeated" for answer in answers)
    return f"{right} of {len(answers)} right, {stopped} stopped in a loop"


def summary(files: list[Path]) -> str:
    """Returns all answers in Markdown: a table of how many are right, then each question with the models' answers."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = [run["model"] for run in runs]
    chats = [{one["name"]: one for one in run["documents"]} for run in runs]
    lines = [f"| document | {' | '.join(f'`{model}`' for model in models)} |", "| --- |" + " --- |" * len(models)]
    for document in DOCUMENTS:
        of_models = [chat.get(document.name) for chat in chats]
        cells = [f"{one['tokens']:,} tokens: {in_numbers(one['answers'])}" if one else "–" for one in of_models]
        lines.append(f"| {document.name} | {' | '.join(cells)} |")
    totals = [in_numbers([answer for one in run["documents"] for answer in one["answers"]]) for run in runs]
    lines.append(f"| all | {' | '.join(totals)} |")
    for document in DOCUMENTS:
        lines += ["", f"## {document.name}"]
        for number, question in enumerate(document.questions):
            lines += ["", f"**{question}**"]
            for model, chat in zip(models, chats, strict=True):
                if document.name in chat:
                    answer = chat[document.name]["answers"][number]
                    lines += ["", f"`{model}`, {verdict(answer)} ({answer['meta']}):", ""]
                    lines += [f"    {line}".rstrip() for line in answer["text"].strip().splitlines()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Asks about all documents that the file does not have, or prints a summary of files. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.document_answers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages are unpacked")
    parser.add_argument("--out", type=Path, help="the file that answers are kept in")
    parser.add_argument("--documents", type=int, default=len(DOCUMENTS), help="most documents of this run")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="print these files' answers instead")
    options = parser.parse_args()
    if options.summary:
        print(summary(options.summary), end="")
        return 0
    if options.out is None:
        parser.error("--out is needed: the file that answers are kept in")
    model = httpx.get(f"{options.url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
    policy = httpx.get(f"{options.url}/page/stats", timeout=60).raise_for_status().json()["policy"]
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"model": model, "documents": []}
    if kept["model"] != model:
        raise SystemExit(f"{options.out} has answers of {kept['model']}; the server has {model}: give another --out")
    done = {one["name"]: one for one in kept["documents"]}
    missing = [one for one in DOCUMENTS if one.name not in done]
    for document in missing[: options.documents]:
        raw = (options.root / document.path).read_bytes()
        raw = gzip.decompress(raw) if document.path.endswith(".gz") else raw
        done[document.name] = record(document, raw, asked_about(document, raw, options.url))
        documents = [done[one.name] for one in DOCUMENTS if one.name in done]
        write_json(
            options.out,
            {"model": model, "policy": policy, "commit": commit(), "command": command(), "documents": documents},
        )
        for answer in done[document.name]["answers"]:
            print(f"{verdict(answer)}: {answer['question']}\n    {answer['text']}\n    {answer['meta']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
