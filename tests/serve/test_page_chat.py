"""The page's chat in Chromium: what is said before a question, answers that go round in circles, a reload, the list of
chats. Without playwright or a Chromium it is skipped; ``test_page_browser.py`` says how to run it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from fake_engine import FakeEngine
from page_browser import add, ask, look_at, paste

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives a browser")
expect = sync_api.expect

LOOP = "The keeper trimmed the wick and went to bed. "
LONG = "".join(f"On day {day} the keeper saw {day + 3} boats and wrote {day % 7} lines.\n\n" for day in range(40))


@pytest.fixture(scope="module", autouse=True)
def patience():
    """Answers are paced, and a busy machine is slower than that."""
    expect.set_options(timeout=60_000)
    yield
    expect.set_options(timeout=5_000)


class Paced(FakeEngine):
    """Takes its time to read a prompt, and to write each character of an answer."""

    reading, writing = 0.0, 0.01

    async def answer(self, request):
        async for output in super().answer(request):
            yield output
            await asyncio.sleep(self.reading if output.is_progress else self.writing)


@pytest.fixture
def engine():
    engine = Paced()
    engine.max_model_len, engine.kv = 9000, "turbo"
    return engine


def opened(page, url):
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("fake")


def at_length(page, tokens):
    page.click("#settings summary")
    page.fill("#length", str(tokens))
    page.locator("#length").blur()


def test_a_very_small_model_says_so(page, engine, url):
    engine.advice = "This is a very small model. For better answers: shadowkv serve --model larger (1.1 GB)"
    opened(page, url)
    expect(page.locator("#advice")).to_have_text(engine.advice)
    expect(page.locator("#advice code")).to_have_text("shadowkv serve --model larger")
    look_at(page, "advice")
    engine.advice = None
    opened(page, url)
    expect(page.locator("#advice")).to_be_hidden()


def test_an_answer_in_a_loop_is_stopped(page, engine, url):
    engine.reply = "It is here. " + 40 * LOOP
    opened(page, url)
    at_length(page, 1800)
    ask(page, "What did he do?")
    expect(page.locator(".meta").last).to_contain_text("stopped, because it repeats itself")
    assert 300 < len(page.locator(".answer-text").text_content()) < len(engine.reply)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    expect(page.locator("#send")).to_be_enabled()
    look_at(page, "repeated", "light")


@pytest.mark.parametrize("text", [LONG, 4 * "    nn.Linear(512, 512, bias=False),\n", "| --- " * 80])
def test_what_only_looks_like_a_loop_is_not_stopped(page, engine, url, text):
    engine.reply, engine.writing = text, 0.002
    opened(page, url)
    at_length(page, 4000)
    ask(page, "Which days?")
    expect(page.locator(".meta").last).to_contain_text(f"{len(text):,} tokens")
    expect(page.locator(".meta").last).not_to_contain_text("stopped")


def test_the_server_is_asked_to_stop_loops_and_its_reason_is_told(page, url):
    asked = []

    def answer(route):
        asked.append(route.request.post_data_json)
        pieces = (
            {"delta": {"content": "Round and round."}, "finish_reason": None},
            {"delta": {}, "finish_reason": "repetition"},
        )
        events = [f"data: {json.dumps({'choices': [{'index': 0, **piece}]})}\n\n" for piece in pieces]
        route.fulfill(content_type="text/event-stream", body="".join(events) + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    opened(page, url)
    ask(page, "Where?")
    expect(page.locator(".meta").last).to_have_text(re.compile("stopped, because it repeats itself"))
    (body,) = asked
    assert body["repetition_detection"] == {"min_pattern_size": 24, "max_pattern_size": 128, "min_count": 4}


def test_how_long_it_takes_is_said_before(page, engine, url):
    engine.reading = 1.0
    opened(page, url)
    wait = page.locator("#wait")
    expect(wait).to_be_hidden()
    add(page, "log.txt", LONG[:2000].encode())
    expect(wait).to_have_text(
        re.compile(r"The answer will begin after at least \d+ s: 2,000 tokens to read, [\d,]+ a second\.")
    )
    look_at(page, "wait", "light")
    page.get_by_role("button", name="Remove log.txt").click()
    expect(wait).to_be_hidden()
    timed = len(engine.prompts)
    add(page, "log.txt", LONG[:2000].encode())
    expect(wait).to_contain_text("2,000 tokens to read")
    assert len(engine.prompts) == timed == 1  # it is timed once

    # Once a long one was read, another is as long; and tokens of a longer one take longer still.
    engine.reading = 4.0
    ask(page, "Where is the key?")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    page.click("#new")
    speeds = []
    for length in (2000, 3500):
        add(page, "log.txt", LONG[:length].encode())
        expect(wait).to_contain_text("The answer will begin after about")
        speeds.append(int(re.search(r"([\d,]+) a second", wait.text_content()).group(1).replace(",", "")))
        page.get_by_role("button", name="Remove log.txt").click()
        expect(wait).to_be_hidden()
    assert speeds[1] < speeds[0]


def test_a_reload_while_the_prompt_is_read(page, engine, url):
    engine.reading = 20.0
    opened(page, url)
    ask(page, "Where is the key?")
    expect(page.locator(".reading")).to_contain_text("reading the prompt")
    page.reload()
    expect(page.locator("#status")).to_contain_text("Regenerate asks again")
    engine.reading = 0.0
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    assert engine.prompts[-1] == "<user>Where is the key?<assistant>"


def test_a_long_text_that_is_pasted_becomes_a_document(page, engine, url):
    opened(page, url)
    paste(page, "Where is the key?")
    expect(page.locator("#question")).to_have_value("Where is the key?")
    expect(page.locator("#documents")).to_be_hidden()
    paste(page, LONG[:1500])
    expect(page.locator("#documents li")).to_contain_text("Pasted text1,500 tokens")
    expect(page.locator("#question")).to_have_value("Where is the key?")
    page.press("#question", "Enter")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    assert engine.prompts[-1].startswith("<user>On day 0 the keeper")


def test_a_text_without_its_spaces(page, url):
    opened(page, url)
    add(page, "joined.txt", 20 * b"Thisdocumentgivesanswerstoquestionsthatareaskedmostoften.\n")
    expect(page.locator("#documents li")).to_contain_text("The words of this text look joined")
    look_at(page, "joined")
    add(page, "right.txt", LONG[:1000].encode())
    add(page, "chinese.txt", ("这是一份关于灯塔看守人的很长的文件" * 20).encode())
    expect(page.locator("#documents li")).to_have_count(3)
    expect(page.locator("#documents")).not_to_contain_text("is being read")
    expect(page.locator("#documents .joined")).to_have_count(1)


def test_chats_are_listed_renamed_and_found(page, engine, url):
    opened(page, url)
    for question in ("Where is the key?", "Who is the keeper?"):
        if page.locator("#new").is_enabled():  # in an empty chat it is not
            page.click("#new")
        ask(page, question)
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
        expect(page.locator("#send")).to_be_enabled()
    titles = page.locator("#chats .title")
    expect(titles).to_have_text(["Who is the keeper?", "Where is the key?"])
    page.get_by_role("button", name="Rename").click()
    field = page.get_by_label("Title of the chat")
    field.fill("People")
    field.press("Escape")
    expect(titles.first).to_have_text("Who is the keeper?")
    page.get_by_role("button", name="Rename").click()
    field.fill("People")
    field.press("Enter")
    expect(titles).to_have_text(["People", "Where is the key?"])
    look_at(page, "chats", "light")

    for words, found in (("KEY hello", ["Where is the key?"]), ("keeper", ["People"]), ("hello", 2), ("whale", 0)):
        page.fill("#search", words)
        if isinstance(found, int):
            expect(titles).to_have_count(found)
        else:
            expect(titles).to_have_text(found)
    expect(page.locator("#none-found")).to_be_visible()
    page.fill("#search", "")
    page.reload()
    expect(titles).to_have_text(["People", "Where is the key?"])
    titles.nth(1).click()
    expect(page.locator(".turn .question")).to_have_text("Where is the key?")
    expect(titles.nth(1)).to_have_attribute("aria-current", "true")


def test_the_view_follows_an_answer_until_the_reader_scrolls(page, engine, url):
    engine.reply, engine.writing = LONG, 0.003
    opened(page, url)
    at_length(page, 4000)
    ask(page, "Which days?")
    answer = page.locator(".answer-text")
    expect(answer).to_contain_text("On day 22")
    last = page.locator(".answer-text > :last-child")
    expect(last).to_be_in_viewport()
    page.evaluate("window.scrollTo(0, 0)")
    expect(answer).to_contain_text("On day 34")
    assert page.evaluate("window.scrollY") == 0
    page.keyboard.press("Escape")


def test_the_cache_is_named_where_it_was_compressed(page, engine, url):
    opened(page, url)
    ask(page, "Where?")
    expect(page.locator(".answer h3")).to_have_text("turbo (compressed cache)")
    expect(page.locator("#send")).to_be_enabled()
    page.reload()
    expect(page.locator(".answer h3")).to_have_text("turbo (compressed cache)")


def test_what_is_for_operators_is_folded(page, url):
    opened(page, url)
    expect(page.locator("#figures")).to_contain_text("Waiting")
    expect(page.locator("#figures")).to_be_hidden()
    page.click("#server summary")
    expect(page.locator("#figures")).to_be_visible()
    look_at(page, "server")
