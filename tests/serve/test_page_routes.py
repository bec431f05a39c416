"""The page without a browser: its files and headers, documents, what the server says of itself, answers compared."""

from __future__ import annotations

import hashlib
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_engine import REPLY, SELECTIONS, FakeEngine
from page_files import FACT, log, pdf
from replies import events
from test_serve_errors import error_of

from shadowkv.engine.config import EngineConfig
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.process.facts import Launch
from shadowkv.engine.process.main import load_cores
from shadowkv.serve import __main__ as command
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.page import documents
from shadowkv.serve.page.documents import read_document
from shadowkv.serve.page.routes import PAGE_PATHS, DocumentText

BINARY = {"Content-Type": "application/octet-stream"}
PAGE = Path(__file__).resolve().parents[2] / "shadowkv" / "serve" / "page" / "static"
VENDORED = {
    "marked.esm.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "purify.min.js": "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
}
"""Files of libraries, and their SHA-256."""


def test_its_files_need_no_key_and_everything_else_does(engine, client_of):
    ask = client_of(engine, api_key=("secret", "other"))
    files = [file for file in PAGE.rglob("*") if file.suffix in (".html", ".css", ".js")]
    assert {"/", "/page/page.js", "/page/attended/strip.js"} < PAGE_PATHS and len(PAGE_PATHS) == len(files)
    for path in PAGE_PATHS:
        answer = ask("GET", path)
        assert answer.status_code == 200 and answer.content, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    assert ask("GET", "/page/api.js").headers["content-type"].startswith("text/javascript")
    for path in ("/page/stats", "/page/", "/page/none.js", "/page/../page/stats"):
        assert ask("GET", path).status_code == 401, path
    assert ask("POST", "/page/document", content=b"a", headers=BINARY).status_code == 401
    for header in ({"Authorization": "Bearer secret"}, {"Authorization": "Bearer other"}, {"X-API-Key": "other"}):
        assert ask("GET", "/page/stats", headers=header).status_code == 200, header


def test_what_others_have_written_is_as_they_published_it():
    """From npm: marked 18.2.1 and dompurify 3.5.0, with their licences beside them."""
    for name, digest in VENDORED.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest, name
        assert (PAGE / "vendor" / f"{name.split('.')[0]}.LICENSE.txt").stat().st_size > 1000


def test_nothing_comes_from_elsewhere_and_the_key_is_not_stored():
    for file in [*PAGE.glob("*.*"), *PAGE.glob("attended/*")]:  # vendor/ has what others have written
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 300, file.name
        for word in (
            "http:",
            "https:",
            "//cdn",
            "localStorage",
            "sessionStorage",
            "document.cookie",
            "innerHTML",
            "onclick=",
        ):
            assert word not in text, (file.name, word)


def test_what_the_server_says_of_itself(call, post, engine):
    post("completions", prompt="Hi")
    stats = call("GET", "/page/stats").json()
    assert stats["policy"] == "fake" and stats["compared"] is None and stats["waiting"] == 3
    assert stats["advice"] is None
    engine.advice = "a very small model"
    assert call("GET", "/page/stats").json()["advice"] == "a very small model"
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["hit_tokens"]) == (3, len(REPLY), 2)
    assert stats["first_tokens"] == 1 and stats["first_token_seconds"] == pytest.approx(3, rel=0.01)
    sizes = {name: (tier["used_bytes"], tier["total_bytes"]) for name, tier in stats["tiers"].items()}
    assert sizes == {"device": (10, 100), "host": (20, 200), "states": (3, 30), "disk": (9, 90)}
    (segment,) = stats["segments"]
    assert segment["tokens"] == 640 and segment["tiers"] == ["device", "disk"] and stats["segment_count"] == 1
    engine.is_alive = False
    assert error_of(call("GET", "/page/stats"), 503)["code"] == "engine_dead"


def test_answers_are_compared_by_the_name_of_the_model(engine, client_of):
    other = FakeEngine()
    other.kv, other.reply = "full", "Another."
    ask = client_of(engine, other)
    assert [one["id"] for one in ask("GET", "/v1/models").json()["data"]] == ["fake", "fake@full"]
    assert ask("GET", "/v1/models/fake@full").json()["max_model_len"] == 200
    assert ask("GET", "/page/stats").json()["compared"] == "fake@full"
    for name, reply in ((None, REPLY), ("fake", REPLY), ("fake@full", "Another.")):
        answer = ask("POST", "/v1/completions", json={"prompt": "Hi", "model": name}).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name or "fake", reply)
    answer = ask("POST", "/v1/responses", json={"input": "Hi", "model": "fake@full"}).json()
    assert (answer["model"], answer["output"][0]["content"][0]["text"]) == ("fake@full", "Another.")
    assert ask("POST", "/v1/completions", json={"prompt": "Hi", "model": "fake@quest"}).status_code == 404
    # Its answers are no part of what the served policy does.
    assert ask("GET", "/page/stats").json()["generated_tokens"] == 2 * len(REPLY)


def test_policies_that_are_compared_share_their_weights(tiny_model, client_of):
    options = {"kv": "quest:budget=64", "kv_dense_below": 0, "max_num_seqs": 2, "max_model_len": 512}
    config = EngineConfig(model=str(tiny_model), load_format="dummy", device="cpu", **options)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        cores = load_cores(Launch(config, "full", folder))
        for core in cores:
            stack.callback(core.shutdown, 20)
        served, other = (core.engine for core in cores)
        assert served.runner.model is other.runner.model and served.cache is not other.cache
        assert (other.config.kv, other.config.max_num_seqs) == ("full", 1)
        engines = [EngineClient(core.facts, core.engine.tokenizer, folder) for core in cores]
        for engine in engines:
            stack.callback(engine.disconnect)
        ask = client_of(*engines)
        body = {"prompt": [*range(2, 202)], "max_tokens": 3, "temperature": 0, "return_selections": True}
        for name, everything in (("fake", False), ("fake@full", True)):
            answer = ask("POST", "/v1/completions", json={**body, "model": name}).json()
            (first, *others) = answer["choices"][0]["selections"]
            assert first is None and others and all(one["everything"] is everything for one in others)


def test_a_batch_run_compares_nothing(capsys):
    with pytest.raises(SystemExit):
        command.main(["--compare", "full", "--input", "a.jsonl", "--output", "b.jsonl"])
    assert "--compare is for a server" in capsys.readouterr().err


def test_ranks_compare_nothing(capsys):
    with pytest.raises(SystemExit):
        command.main(["--compare", "full", "--tensor-parallel-size", "2"])
    assert "--compare takes --tensor-parallel-size 1" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_selections_come_with_each_token_where_asked_for(post, endpoint):
    wanted = [None, *[asdict(SELECTIONS) | {"exact": [[0, 8], [64, 100]]}] * (len(REPLY) - 1)]
    wanted = [one and one | {"groups": [one["groups"][0] | {"layers": [0, 2]}]} for one in wanted]
    assert post(endpoint, return_selections=True).json()["choices"][0]["selections"] == wanted
    streamed = events(post(endpoint, return_selections=True, stream=True))
    assert [one for event in streamed for one in event["choices"][0].get("selections", ())] == wanted
    assert "selections" not in post(endpoint).text
    assert error_of(post(endpoint, return_selections=1))["param"] == "return_selections"


def test_answers_that_have_no_room_for_selections_say_so(call):
    refused = call("POST", "/v1/responses", json={"input": "Hi", "return_selections": True})
    assert error_of(refused)["param"] == "return_selections"


def test_cached_prompts_are_told_with_their_tiers(serve):
    with serve(kv="full") as client:
        assert client.http.get("/page/stats").json()["segments"] == []
        client.cached([*range(2, 202)])
        tiers = ()
        for _ in range(200):
            (segment,) = (stats := client.http.get("/page/stats").json())["segments"]
            if len(tiers := segment["tiers"]) == 3:
                break
        assert tiers == ["device", "host", "disk"] and stats["segment_count"] == 1
        assert (segment["first"], segment["tokens"], segment["compressed"], segment["running"]) == (
            0,
            192,
            False,
            False,
        )
        assert stats["tiers"]["disk"]["used_bytes"] > 0
        client.forget_above_the_disk()
        assert client.http.get("/page/stats").json()["segments"][0] == {**segment, "tiers": ["disk"]}


# -- documents -----------------------------------------------------------------------------------------------------


def test_texts():
    assert read_document("Käse\r\nund\nBrot".encode()).text == "Käse\nund\nBrot"
    assert read_document("Käse".encode("utf-8-sig")).text == read_document("Käse".encode("utf-16")).text == "Käse"
    assert read_document("Käse".encode("latin-1")).text == "Käse"
    for raw, reason in ((b"", "no text"), (b" \n", "no text"), (b"\x89PNG\0\0", "neither")):
        with pytest.raises(ApiError, match=reason):
            read_document(raw)


def test_pdfs(monkeypatch):
    pytest.importorskip("pypdfium2", reason="pypdfium2 reads PDFs")
    found = read_document(pdf(log(30)))
    assert found.pages == 2 and FACT in found.text.replace("\n", " ")
    assert read_document(pdf("Hello", password="")).text == "Hello"  # as with a password for changes alone
    for raw, reason in (
        (pdf("Hello", password="x"), "encrypted"),
        (pdf(""), "only pictures"),
        (pdf("Hello")[:200], "cannot be read"),
        (b"%PDF-1.4 nonsense", "cannot be read"),
    ):
        with pytest.raises(ApiError, match=reason) as caught:
            read_document(raw)
        assert caught.value.code == "unreadable_document"
    monkeypatch.setattr(documents, "MAX_TEXT_CHARS", 100)
    with pytest.raises(ApiError, match="more than 100 characters"):
        read_document(pdf(log(30)))


def test_words_that_lines_divide_are_put_together():
    """With the hyphen where they are written with it elsewhere."""
    pytest.importorskip("pypdfium2", reason="pypdfium2 reads PDFs")
    lines = [
        "A royalty-free lighthouse is royalty-",
        "free; the keep-",
        "er has a light-",
        "house.",
        "Day 3-",
        "4, x-",
        "y.",
    ]
    text = read_document(pdf("\n".join(lines))).text
    assert text == "A royalty-free lighthouse is royalty-free; the keeper has a lighthouse.\nDay 3-\n4, xy."


def test_a_pdf_without_what_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(ApiError, match="PDFs need pypdfium2, which the server lacks; install it"):
        read_document(pdf("Hello"))


def test_a_document_over_http(call, monkeypatch):
    answer = call("POST", "/page/document", content=FACT.encode(), headers=BINARY)
    DocumentText.model_validate(answer.json(), strict=True)
    assert answer.json() == {"text": FACT, "pages": 0}
    assert error_of(call("POST", "/page/document", content=b"\0", headers=BINARY))["code"] == "unreadable_document"
    for kind in ("text/plain", "application/json", "multipart/form-data"):  # what other sites may send unasked
        refused = call("POST", "/page/document", content=b"a", headers={"Content-Type": kind})
        assert "application/octet-stream" in error_of(refused)["message"]
    monkeypatch.setattr("shadowkv.serve.page.routes.MAX_DOCUMENT_BYTES", 10)
    assert error_of(call("POST", "/page/document", content=b"a" * 11, headers=BINARY), 413)["code"] == "body_too_large"


def test_a_document_that_takes_too_long_is_given_up(engine, client_of, monkeypatch):
    monkeypatch.setattr("shadowkv.serve.app.DOCUMENT_SECONDS", 0.0)
    answer = client_of(engine)("POST", "/page/document", content=b"a", headers=BINARY)
    assert "more than 0 seconds" in error_of(answer, 413)["message"]
