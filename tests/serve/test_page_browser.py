"""The page in Chromium: everything that a person does with it. Without playwright or a Chromium it is skipped.

make .venv/.installed-browser && apt-get install chromium
PAGE_SCREENSHOTS=docs/page python -m pytest tests/serve/test_page_browser.py
"""

from __future__ import annotations

import re

import pytest
from fake_engine import FakeEngine
from http_server import http_server
from page_browser import Server, axe, chromium, shot
from page_files import FACT, QUESTION, log, pdf

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives a browser")
expect = sync_api.expect
expect.set_options(timeout=120_000)  # a prompt of 1,000 tokens takes a while on a busy CPU

STORY = "Write a very long story about a ship that is lost at sea, with many chapters."
DESKTOP, PHONE = {"width": 1120, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium() as found:
            yield found
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    disk = tmp_path_factory.mktemp("prefixes")
    flags = "--kv-dense-below=0", "--max-model-len=4096", "--compare=full", "--kv-offload-gib=0.25", "--kv-disk-gib=0.5"
    server = Server(*flags, f"--kv-disk-dir={disk}")
    yield server
    server.kill()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    yield page
    context.close()
    assert not errors


def upload(page, name="lighthouse.pdf", content=None):
    content = pdf(log(24)) if content is None else content
    page.set_input_files("#file", {"name": name, "mimeType": "application/octet-stream", "buffer": content})


def question(page, text):
    page.fill("#question", text)
    page.press("#question", "Control+Enter")


def test_upload_ask_compare_and_look_at_places(browser, server, tmp_path_factory):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce", bypass_csp=True)
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("turbo · 4,096 tokens")
    upload(page)
    expect(page.locator("#size")).to_have_text(re.compile(r"2 pages, [\d,]+ tokens"))
    page.check("#compare")
    question(page, QUESTION)
    expect(page.locator("#send")).to_be_enabled()
    served, full = page.locator(".answer-text").all()
    expect(served).to_contain_text("third stair")
    expect(full).to_have_attribute("aria-busy", "false")
    expect(page.locator("#divergence")).to_be_visible()

    # The fact is among the places that were attended to most, and is read there.
    places = page.locator("#places button")
    found = places.filter(has_text=re.compile("keeper hid|brass key|third stair")).first
    found.click()
    expect(found).to_have_attribute("aria-current", "")
    here = page.locator("#reader .here")
    expect(here).to_be_in_viewport()
    assert any(word in FACT for word in here.text_content().split())
    shot(page, "answer", full_page=True)

    # By keyboard: along the strip, and through the tokens of the answer.
    strip = page.locator("#strip")
    before = int(strip.get_attribute("aria-valuenow"))
    strip.press("ArrowRight")
    expect(strip).to_have_attribute("aria-valuenow", str(before + 1))
    assert "of attention, tokens" in strip.get_attribute("aria-valuetext")
    strip.press("Home")
    expect(strip).to_have_attribute("aria-valuenow", "0")
    page.locator("#token").press("ArrowRight")
    expect(page.locator("#token-text")).to_have_text("“The”, chosen by prefill")
    served.locator(".told").nth(3).click()
    expect(page.locator("#token-text")).to_contain_text("“")
    expect(served.locator(".chosen")).to_have_count(1)
    box = strip.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert int(strip.get_attribute("aria-valuenow")) > 10

    # What was computed is kept, and moves down the tiers.
    for tier in ("device", "host", "disk"):
        expect(page.locator(f"[data-tier={tier}] .blocks li").first).to_be_visible()
    expect(page.locator("#figures")).to_contain_text("First token after")

    script = axe(tmp_path_factory.mktemp("axe"))
    for name, scheme, size in (("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        if name != "light":
            shot(page, name, full_page=name == "dark")
        if script is not None:
            page.evaluate(script)
            report = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']})")
            found = [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in report["violations"]]
            assert not found, f"{name}: {found}"
    context.close()


def test_stop_keeps_what_has_come(page, server):
    page.goto(server.url)
    expect(page.locator("#model")).not_to_be_empty()
    question(page, STORY)
    expect(page.locator(".answer-text span").nth(8)).to_be_visible()
    expect(page.locator("#attended-note")).to_contain_text("Everything")  # as short as that it is dense
    page.keyboard.press("Escape")
    expect(page.locator(".meta")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#figures dd").first).to_have_text("0")  # the server has let go of it
    expect(page.locator("#ask-error")).to_be_hidden()
    assert len(page.locator(".answer-text").text_content()) > 8


def test_a_reload_in_mid_answer(page, server):
    page.goto(server.url)
    expect(page.locator("#model")).not_to_be_empty()
    question(page, STORY)
    expect(page.locator(".answer-text span").first).to_be_visible()
    page.reload()
    expect(page.locator("#status")).to_contain_text("loaded anew in the middle of an answer")
    expect(page.locator("#figures dd").first).to_have_text("0")
    question(page, "What is the capital of France?")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".answer-text")).to_contain_text("Paris")
    page.reload()  # nothing was broken off this time
    expect(page.locator("#model")).not_to_be_empty()
    expect(page.locator("#status")).to_be_hidden()


def test_a_server_that_goes_and_comes_back(page, server):
    page.goto(server.url)
    expect(page.locator("#model")).not_to_be_empty()
    question(page, STORY)
    expect(page.locator(".answer-text span").nth(4)).to_be_visible()
    server.kill()
    expect(page.locator("#ask-error")).to_contain_text("went away in the middle of the answer")
    expect(page.locator("#status")).to_contain_text("The server is gone")
    kept = page.locator(".answer-text").text_content()
    assert kept
    server.start()
    expect(page.locator("#status")).to_contain_text("The server is back")
    question(page, "What is the capital of France?")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".answer-text")).to_contain_text("Paris")
    expect(page.locator("#ask-error")).to_be_hidden()


def test_where_two_answers_part_is_marked(page):
    engine, other = FakeEngine(), FakeEngine()
    engine.max_model_len, other.kv, other.reply = 1000, "full", "Hello there, wörld."
    other.max_model_len = 1000
    with http_server(build_app(engine, "fake", None, other)) as url:
        page.goto(url)
        page.check("#compare")
        question(page, "Hi")
        expect(page.locator("#divergence")).to_have_text(
            "The answers agree for 1 word; the first token that differs is marked."
        )
        served, full = page.locator(".answer-text").all()
        expect(served.locator(".apart")).to_have_text("w")
        expect(full.locator(".apart")).to_have_text("t")
        other.reply = engine.reply
        question(page, "Hi")
        expect(page.locator("#divergence")).to_contain_text("are the same")
        page.uncheck("#compare")
        question(page, "Hi")
        expect(page.locator(".answer-text")).to_have_count(1)
        expect(page.locator("#divergence")).to_be_hidden()


def test_the_key_is_asked_for_and_stored_nowhere(page):
    engine = FakeEngine()
    engine.max_model_len = 1000
    with http_server(build_app(engine, "fake", ServerSettings(api_key=("other", "secret")))) as url:
        page.goto(url)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("does not take this key")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_contain_text("fake")
        expect(page.locator("#figures")).to_contain_text("Waiting")
        question(page, "Hi")
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
        assert page.context.storage_state() == {"cookies": [], "origins": []}
        page.reload()
        expect(dialog).to_be_visible()


def test_documents_that_cannot_be_taken_get_one_clear_line(page):
    engine = FakeEngine()
    engine.max_model_len = 1000
    with http_server(build_app(engine, "fake")) as url:
        page.goto(url)
        expect(page.locator("#model")).not_to_be_empty()
        error = page.locator("#document-error")
        upload(page, "picture.png", b"\x89PNG\0\0")
        expect(error).to_have_text("picture.png: this file is neither a PDF nor text")
        expect(page.locator("#drop")).to_be_visible()
        upload(page, "big.pdf", b"%PDF-" + bytes(20 * 2**20))
        expect(error).to_have_text("big.pdf has 20 MB; documents of up to 20 MB can be read.")
        upload(page, "empty.txt", b" ")
        expect(error).to_have_text("empty.txt: this file has no text")
        page.get_by_text("Paste text").click()
        page.fill("#pasted", "A text that is short. " * 90)
        page.click("#take")
        expect(error).to_contain_text("too long: this model takes 1,000 tokens")
        page.click("#cut")
        expect(page.locator("#name")).to_have_text("Pasted text (the beginning)")
        expect(page.locator("#size")).to_have_text("680 tokens")
        expect(error).to_be_hidden()
        question(page, "What is short?")
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
        assert "A text that is short." in engine.prompts[-1] and engine.prompts[-1].count("What is short?") == 1
        page.click("#remove")
        expect(page.locator("#drop")).to_be_visible()
        expect(error).to_be_hidden()
        page.fill("#question", "")
        page.click("#send")
        expect(page.locator("#ask-error")).to_have_text("There is no question yet.")


def test_keys_and_theme(page):
    with http_server(build_app(FakeEngine(), "fake")) as url:
        page.goto(url)
        expect(page.locator("#model")).not_to_be_empty()
        order = []
        for _ in range(7):
            page.keyboard.press("Tab")
            order.append(page.evaluate_handle("document.activeElement").get_property("id").json_value())
        assert order[:3] == ["", "theme", "file"] and order.index("question") < order.index("send")
        page.focus("#theme")
        page.keyboard.press("Enter")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        expect(page.locator("#theme")).to_have_text("Light")
        page.emulate_media(color_scheme="dark")
        page.keyboard.press("Enter")
        expect(page.locator("html")).to_have_attribute("data-theme", "light")
