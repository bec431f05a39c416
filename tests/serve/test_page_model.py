"""The page in Chromium, before the small model: long documents, what answers attended to, servers that go and come
back. Without playwright or a Chromium it is skipped; ``test_page_browser.py`` says how to run it."""

from __future__ import annotations

import re

import pytest
from page_browser import Server, add, ask, look_at
from page_files import FACT, QUESTION, log

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives a browser")
expect = sync_api.expect

LONGER = 60_000
"""Milliseconds: a prompt of 1,000 tokens takes a while on a busy CPU."""

STORY = "Write a very long story about a ship that is lost at sea, with many chapters."


@pytest.fixture(scope="module", autouse=True)
def patience():
    expect.set_options(timeout=LONGER)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture
def page(page):
    page.set_default_timeout(LONGER)
    return page


def started(browser, *flags):
    server = Server(*flags)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    disk = tmp_path_factory.mktemp("prefixes")
    flags = "--kv-dense-below=0", "--max-model-len=4096", "--compare=full", "--kv-offload-gib=0.25", "--kv-disk-gib=0.5"
    yield from started(browser, *flags, f"--kv-disk-dir={disk}")


@pytest.fixture(scope="module", params=["full", "turbo"])
def dense_server(browser, request):
    """Of a policy that selects nothing, or nothing of so short a prompt; the flag's default decides on that."""
    yield from started(browser, f"--kv={request.param}", "--max-model-len=4096")


def opened(page, server):
    page.goto(server.url)
    expect(page.locator("#model")).not_to_be_empty()


def answered(page, turns=1):
    """The served model's answer to the newest question, which has ended."""
    expect(page.locator(".turn")).to_have_count(turns)
    for answer in page.locator(".turn").last.locator(".answer-text").all():
        expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.locator("#stop")).to_be_disabled()
    return page.locator(".turn").last.locator(".answer-text").first


def bare(text):
    """Without what Markdown makes something else of, once more has come."""
    return re.sub(r"[*#\s]", "", text)


def cached(page):
    """Tokens of the newest prompt, and those of it that were found in the cache."""
    told = page.locator(".turn").last.locator(".meta:visible").last.text_content()
    return [
        int(number.replace(",", "")) for number in re.search(r"([\d,]+) of the prompt, ([\d,]+) found", told).groups()
    ]


def test_upload_ask_compare_and_look_at_places(page, server):
    opened(page, server)
    expect(page.locator("#model")).to_contain_text("turbo (compressed cache) · reads up to 4,096 tokens")
    add(page)
    expect(page.locator("#documents li")).to_contain_text(re.compile(r"2 pages, [\d,]+ tokens"))
    page.check("#compare")
    ask(page, QUESTION)
    expect(page.locator(".reading").first).to_contain_text("reading the prompt: ")
    answer = answered(page)
    expect(answer).to_contain_text("third stair")
    expect(page.locator(".divergence")).to_be_visible()

    # The fact is among the places that were attended to most, and is read there.
    expect(page.locator("#attended-note")).to_contain_text("Grey: always read.")
    page.locator("#attended-more summary").click()
    expect(page.locator("#attended-words")).to_contain_text("it reads only those places")
    places = page.locator("#places button")
    for told in places.all_inner_texts():
        assert not re.search(r"<\||Hugging Face|SmolLM", told)  # the chat template's own
    found = places.filter(has_text=re.compile("keeper hid|brass key|third stair")).first
    found.click()
    expect(found).to_have_attribute("aria-current", "")
    here = page.locator("#reader .here")
    expect(here).to_be_in_viewport()
    assert any(word in FACT for word in here.text_content().split())
    page.locator("#attended-more summary").click()
    look_at(page, "answer", "light", "dark", "phone", "dark-phone")

    # By keyboard: along the strip, and through the tokens of the answer.
    strip = page.locator("#strip")
    before = int(strip.get_attribute("aria-valuenow"))
    strip.press("ArrowRight")
    expect(strip).to_have_attribute("aria-valuenow", str(before + 1))
    assert "of attention, tokens" in strip.get_attribute("aria-valuetext")
    strip.press("Home")
    expect(strip).to_have_attribute("aria-valuenow", "0")
    page.locator("#token").press("ArrowRight")
    expect(page.locator("#token-text")).to_have_text(re.compile("^“The"))  # or several that came together
    answer.locator(".told").nth(3).click()
    expect(page.locator("#token-text")).to_contain_text("“")
    expect(answer.locator(".chosen")).to_have_count(1)
    look_at(page, "word", "light")
    strip.click()
    assert int(strip.get_attribute("aria-valuenow")) > 10

    # What was computed is kept, and moves down the tiers.
    page.click("#server summary")
    for tier in ("device", "host", "disk"):
        expect(page.locator(f"[data-tier={tier}] .blocks li").first).to_be_visible()
    expect(page.locator("#figures")).to_contain_text("First token after")
    page.click("#server summary")

    # A later turn begins with the prompt and the answer of this one: only what is new is computed.
    page.uncheck("#compare")
    (prompt, _) = cached(page)
    ask(page, "What did he write to his sister?")
    answered(page, 2)
    later, found = cached(page)
    assert prompt < later and found > prompt - 64
    look_at(page, "second-turn", "light")


def test_places_where_all_is_attended_to(page, dense_server):
    opened(page, dense_server)
    add(page, "log.txt", log(12).encode())
    ask(page, QUESTION)
    expect(answered(page)).to_contain_text("third stair")
    expect(page.locator("#attended-note")).to_contain_text("All was read. Stronger colour: more attention.")
    expect(page.locator("#attended-words")).to_contain_text("reads the whole prompt for each token")
    found = page.locator("#places button").filter(has_text=re.compile("keeper hid|brass key|third stair")).first
    found.click()
    assert any(word in FACT for word in page.locator("#reader .here").text_content().split())
    policy = page.locator("#model").text_content().split(" · ")[1]
    expect(page.locator("#turns h3").filter(has_text=policy)).to_have_count(0)  # nothing of it was compressed
    look_at(page, "dense", *(("light", "phone") if "full" in policy else ()))


def test_stop_keeps_what_has_come_and_continue_goes_on(page, server):
    opened(page, server)
    ask(page, STORY)
    expect(page.locator(".answer-text span").nth(8)).to_be_visible()
    look_at(page, "writing", "light")
    expect(page.locator("#attended-note")).to_contain_text("All ")  # as short as that it is dense
    page.keyboard.press("Escape")
    expect(page.locator(".meta").last).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#figures dd").first).to_have_text("0")  # the server has let go of it
    expect(page.locator("#ask-error")).to_be_hidden()
    answer = page.locator(".answer-text")
    kept = answer.text_content()
    assert len(kept) > 8
    count = answer.locator("span").count()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#stop")).to_be_enabled()
    expect(answer.locator("span").nth(count + 8)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    assert bare(answer.text_content()).startswith(bare(kept))


def test_a_reload_in_mid_answer(page, server):
    opened(page, server)
    ask(page, STORY)
    expect(page.locator(".answer-text span").nth(8)).to_be_visible()
    page.wait_for_timeout(1500)
    page.reload()
    expect(page.locator("#status")).to_contain_text("loaded anew in the middle of an answer")
    expect(page.locator(".meta").last).to_have_text("stopped: the page was loaded anew")
    assert page.locator(".answer-text").text_content()
    expect(page.locator("#figures dd").first).to_have_text("0")
    look_at(page, "reloaded", "light")
    page.click("#new")
    ask(page, "What is the capital of France?")
    expect(answered(page)).to_contain_text("Paris")
    page.reload()  # nothing was broken off this time
    expect(page.locator(".answer-text")).to_contain_text("Paris")
    expect(page.locator("#status")).to_be_hidden()


def test_a_server_that_goes_and_comes_back(page, server):
    opened(page, server)
    ask(page, STORY)
    expect(page.locator(".answer-text span").nth(4)).to_be_visible()
    server.kill()
    expect(page.locator("#ask-error")).to_contain_text("went away in the middle of the answer")
    expect(page.locator("#status")).to_contain_text("The server is gone")
    expect(page.locator("#stale")).to_contain_text(
        re.compile(r"as it was at \d\d:\d\d:\d\d: the server does not answer")
    )
    expect(page.locator("#speed")).to_have_text("–")
    look_at(page, "gone", "light", "phone")
    kept = page.locator(".answer-text").text_content()
    assert kept
    server.start()
    expect(page.locator("#status")).to_contain_text("The server is back")
    expect(page.locator("#stale")).to_be_hidden()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer-text")).not_to_have_text(kept)
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#ask-error")).to_be_hidden()
