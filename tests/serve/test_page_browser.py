"""The page in Chromium, before an engine whose answers are known. Without playwright or a Chromium it is skipped.

make .venv/.installed-test-slow && apt-get install chromium
PAGE_SCREENSHOTS=docs/page python -m pytest tests/serve/test_page_*.py -m slow
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from http_server import http_server
from page_browser import add, ask, look_at, paste

from shadowkv.serve.app import build_app
from shadowkv.serve.http.settings import ServerSettings

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives a browser")
expect = sync_api.expect

ANSWER = """## What it says

The **key** is under the _third_ stair, see [the log](https://example.org/log) & `day 10`:

1. fog
2. frost

| day | seen |
| --- | --- |
| 10 | <b>nobody</b> |

```python
print("<i>")
```

- [x] read
![x](https://example.org/x.png)<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">
[out](javascript:window.hacked=1)"""


class SlowReader(FakeEngine):
    """Reads prompts slowly."""

    pause = 1.5

    async def answer(self, request):
        async for output in super().answer(request):
            yield output
            if output.is_progress:
                await asyncio.sleep(self.pause)


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.max_model_len, engine.kv = 4000, "turbo"
    return engine


def opened(page, url):
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("fake · turbo (compressed cache) · reads up to 4,000 tokens")


def test_at_first(page, url):
    opened(page, url)
    expect(page.locator("#figures")).to_contain_text("Waiting")
    page.wait_for_timeout(1200)
    look_at(page, "start", "light", "phone")


def test_a_chat_goes_on_and_is_kept(page, url, engine):
    opened(page, url)
    add(page, "one.txt", b"First text.")
    add(page, "two.txt", b"Second text.")
    expect(page.locator("#documents li")).to_contain_text(["one.txt11 tokens", "two.txt12 tokens"])
    look_at(page, "documents", "light")
    ask(page, "What is first?")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    expect(page.locator("#documents")).to_be_hidden()
    expect(page.locator("#question")).to_have_value("")
    ask(page, "And then?")
    expect(page.locator(".answer-text")).to_have_text(["Hello wörld."] * 2)
    expect(page.locator(".meta").last).to_contain_text("found in the cache")
    add(page, "three.txt", b"Third text.")
    ask(page, "And last?")
    expect(page.locator(".answer-text").nth(2)).to_have_text("Hello wörld.")
    first, second, third = engine.prompts
    # Each begins with the one before, token by token (a character is one), so that is found in the cache.
    assert first == "<user>one.txt:\n\nFirst text.\n\ntwo.txt:\n\nSecond text.\n\nWhat is first?<assistant>"
    assert second == f"{first}Hello wörld.<user>And then?<assistant>"
    assert third == f"{second}Hello wörld.<user>Third text.\n\nAnd last?<assistant>"
    look_at(page, "chat", "light", "phone")

    page.reload()
    expect(page.locator(".answer-text")).to_have_text(["Hello wörld."] * 3)
    expect(page.locator(".asked .documents li").first).to_contain_text("one.txt")
    ask(page, "Once more?")
    expect(page.locator(".answer-text")).to_have_text(["Hello wörld."] * 4)
    assert engine.prompts[-1] == f"{third}Hello wörld.<user>Once more?<assistant>"  # with the texts of all documents

    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Another one")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    assert engine.prompts[-1] == "<user>Another one<assistant>"
    expect(page.locator("#chats .title")).to_have_text(["Another one", "What is first?"])
    page.get_by_role("button", name="What is first?", exact=True).click()
    expect(page.locator(".turn")).to_have_count(4)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#chats .title")).to_have_text(["Another one"])
    page.reload()
    expect(page.locator("#chats .title")).to_have_text(["Another one"])
    assert page.evaluate(KEPT) == {"chats": 1, "documents": 0}


KEPT = """async () => {
  const opening = indexedDB.open("shadowkv");
  const done = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const database = await done(opening), counts = {};
  for (const name of database.objectStoreNames) {
    counts[name] = await done(database.transaction(name).objectStore(name).count());
  }
  return counts;
}"""


def test_settings_reach_the_engine(page, url, engine):
    opened(page, url)
    page.click("#settings summary")
    for field, value in (("length", "5"), ("temperature", "0.7"), ("system", "Be short.")):
        page.fill(f"#{field}", value)
        page.locator(f"#{field}").blur()
    expect(page.locator("#settings-words")).to_have_text("up to 5 tokens, temperature 0.7, with a system prompt")
    look_at(page, "settings", "light")
    ask(page, "Hi")
    expect(page.locator(".answer-text")).to_have_text("Hello")
    assert (engine.params[-1].max_tokens, engine.params[-1].temperature) == (5, 0.7)
    assert engine.prompts[-1] == "<system>Be short.<user>Hi<assistant>"

    expect(page.locator(".meta").last).to_contain_text("cut off after 5 tokens")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer-text")).to_have_text("HelloHello")
    assert engine.prompts[-1] == "<system>Be short.<user>Hi<assistant>Hello"
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer-text")).to_have_text("Hello")
    assert engine.prompts[-1] == engine.prompts[0]
    expect(page.locator("#stop")).to_be_disabled()
    page.reload()
    expect(page.locator("#settings-words")).to_have_text("up to 5 tokens, temperature 0.7, with a system prompt")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".answer-text")).to_have_text("HelloHello")


def test_models_without_a_chat_template(page, engine):
    engine.tokenizer.chat_template = None
    with http_server(build_app(engine, "fake")) as url:
        opened(page, url)
        page.click("#settings summary")
        page.fill("#system", "Be short.")
        add(page, "one.txt", b"First text.")
        ask(page, "What is first?")
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
        ask(page, "And then?")
        expect(page.locator(".answer-text")).to_have_count(2)
        expect(page.locator("#send")).to_be_enabled()
    first = "\x01Be short.\n\nFirst text.\n\nQuestion: What is first?\nAnswer:"
    assert engine.prompts == [first, f"{first}Hello wörld.\n\nQuestion: And then?\nAnswer:"]


def test_thoughts_are_apart_and_not_sent_again(page, engine):
    engine.reply = "<think>Hm, a key.</think>Under the stair."
    with http_server(build_app(engine, "fake", ServerSettings(reasoning_parser="qwen3"))) as url:
        opened(page, url)
        ask(page, "Where?")
        expect(page.locator(".answer-text")).to_have_text("Under the stair.")
        page.click(".thoughts summary")
        expect(page.locator(".thoughts > div")).to_have_text("Hm, a key.")
        look_at(page, "thoughts", "light")
        ask(page, "Why?")
        expect(page.locator(".answer-text")).to_have_count(2)
        expect(page.locator("#send")).to_be_enabled()
        assert engine.prompts[-1] == "<user>Where?<assistant>Under the stair.<user>Why?<assistant>"


def test_a_browser_that_keeps_nothing(page, url):
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('refused'); } })")
    opened(page, url)
    expect(page.locator("#kept-note")).to_contain_text("This browser keeps nothing for this page")
    add(page, "one.txt", b"First text.")
    ask(page, "What is first?")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    expect(page.locator("#send")).to_be_enabled()


def test_enter_asks_and_shift_enter_breaks_the_line(page, url, engine):
    opened(page, url)
    page.fill("#question", "One")
    page.press("#question", "Shift+Enter")
    page.type("#question", "Two")
    expect(page.locator(".turn")).to_have_count(0)
    page.press("#question", "Enter")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    assert engine.prompts[-1] == "<user>One\nTwo<assistant>"
    page.press("#question", "Enter")
    expect(page.locator("#ask-error")).to_have_text("There is no question yet.")


def test_copy_and_export(page, url, engine, tmp_path):
    engine.reply = ANSWER
    opened(page, url)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    add(page, "one.txt", b"First text.")
    ask(page, "What is: first?")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export").click()
    assert downloading.value.suggested_filename == "What is first.md"
    path = tmp_path / "chat.md"
    downloading.value.save_as(path)
    text = Path(path).read_text(encoding="utf-8")
    assert text.startswith("# What is: first?\n\n## What is: first?\n\n- one.txt\n\n### turbo (compressed cache)\n\n")
    assert ANSWER in text


def test_markdown_without_any_markup_of_the_models(page, url, engine):
    engine.reply = ANSWER
    opened(page, url)
    ask(page, "Hi")
    answer = page.locator(".answer-text")
    expect(answer.locator("h4")).to_have_text("What it says")
    expect(answer.locator("strong")).to_have_text("key")
    expect(answer.locator("ol li")).to_have_text(["fog", "frost"])
    expect(answer.locator("td").nth(1)).to_have_text("<b>nobody</b>")
    expect(answer.locator("pre")).to_have_text('print("<i>")\n')
    expect(answer).to_contain_text("☑ read")
    expect(answer).to_contain_text('<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">')
    for kind in ("script", "img", "b", "i", "input", "[onerror]", "[href^=javascript]"):
        expect(answer.locator(kind)).to_have_count(0)
    link = answer.get_by_role("link", name="the log")
    assert link.get_attribute("href") == "https://example.org/log" and "noopener" in link.get_attribute("rel")
    assert page.evaluate("window.hacked") is None

    # Every character that is shown is of the token that it came in.
    shown = answer.evaluate("node => [...node.querySelectorAll('span')].map(span => span.textContent)")
    assert all(len(one) == 1 for one in shown) and "".join(shown).startswith("What it saysThe key is under the third")
    answer.locator("strong span").nth(1).click()
    expect(page.locator("#token-text")).to_have_text("“e”")
    expect(answer.locator(".chosen")).to_have_text("e")

    # A word that is chosen stays readable under the pointer.
    answer.locator(".chosen").hover()
    style = answer.locator(".chosen").evaluate(
        "node => [getComputedStyle(node).backgroundColor, getComputedStyle(node).color]"
    )
    assert style == ["rgb(138, 69, 16)", "rgb(255, 255, 255)"]
    look_at(page, "markdown", "light", "dark")


@pytest.mark.parametrize("nested", ["> ", "- "])
def test_an_answer_nested_too_deeply_is_shown_as_text(page, url, nested):
    opened(page, url)
    shown = "text => import('/page/markdown.js').then(({ rendered }) => rendered(text).textContent)"
    text = nested * 20_000 + "deep"
    assert page.evaluate(shown, text) == text
    assert page.evaluate(shown, f"{nested * 3}deep").strip() == "deep"


def test_numbered_lists_keep_their_numbers(page, url, engine):
    engine.reply = "3. three\n4. four"
    opened(page, url)
    ask(page, "Hi")
    expect(page.locator(".answer-text ol")).to_have_attribute("start", "3")


def test_below_a_path_of_a_proxy(page, engine):
    app, outside = build_app(engine, "fake"), FastAPI()
    outside.state = app.state  # for the connections underneath
    outside.mount("/llm", app)
    with http_server(outside) as url:
        opened(page, f"{url}/llm/")
        ask(page, "Hi")
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")


def test_what_is_read_of_a_prompt_is_shown(page):
    engine = SlowReader()
    engine.max_model_len, engine.kv = 4000, "turbo"
    with http_server(build_app(engine, "fake")) as url:
        opened(page, url)
        add(page, "one.txt", b"x" * 2000)
        ask(page, "Hi")
        told = page.locator(".reading")
        expect(told).to_contain_text("reading the prompt: 1,010 of 2,021 tokens, 2 of them found in the cache")
        expect(told).to_contain_text("a second ·")
        expect(told).to_contain_text("s left")
        bar = told.locator("progress")
        assert bar.evaluate("node => [node.value, node.max]") == [1010, 2021]
        engine.pause = 15
        page.keyboard.press("Escape")
        expect(page.locator(".meta").last).to_have_text("stopped")
        page.get_by_role("button", name="Regenerate").click()
        expect(told).to_contain_text("reading the prompt: 2 of")
        look_at(page, "reading", "light")
        for control in ("#new", "#send"):  # the chat stays open while it is answered
            expect(page.locator(control)).to_be_disabled()
        expect(page.get_by_role("button", name="Delete")).to_be_disabled()
        page.keyboard.press("Escape")
        expect(told).to_be_hidden()
        expect(page.locator("#new")).to_be_enabled()


@pytest.fixture
def short_url(engine):
    engine.max_model_len = 1000
    with http_server(build_app(engine, "fake")) as url:
        yield url


def test_what_is_too_long_is_not_asked(page, short_url, engine):
    page.goto(short_url)
    paste(page, "A text that is short. " * 90)
    note = page.locator("#too-long")
    expect(note).to_contain_text(
        "Too long to ask: what is added 1,980 tokens, and this model takes 1,000 with the answer."
    )
    expect(page.locator("#send")).to_be_disabled()
    page.fill("#question", "What is short?")
    page.press("#question", "Enter")
    page.wait_for_timeout(300)
    assert not [prompt for prompt in engine.prompts if prompt.startswith("<user>")]
    look_at(page, "too-long", "light")
    page.get_by_role("button", name="Keep the beginning").click()
    expect(page.locator("#documents li")).to_contain_text("Pasted text (the beginning)872 tokens")
    expect(note).to_be_hidden()
    ask(page, "What is short?")
    expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
    assert engine.prompts[-1].count("What is short?") == 1
    assert engine.params[-1].max_tokens == 1000 - len(engine.prompts[-1])  # of the 512, as many as there is room for

    # Nor does a chat go on that is full, and a question that turns out to be too long is not lost.
    expect(note).to_have_text(
        re.compile(r"Too long to go on: the chat so far has 9\d\d tokens, and this model takes 1,000\.")
    )
    expect(page.locator("#send")).to_be_disabled()
    page.click("#new")
    page.fill("#question", "x" * 1200)
    page.press("#question", "Enter")
    expect(page.locator("#ask-error")).to_contain_text("That is too long: the prompt has 1,217 tokens, and this model")
    expect(page.locator("#question")).to_have_value("x" * 1200)
    expect(page.locator(".turn")).to_have_count(0)


def test_where_two_answers_part_is_marked(page, engine):
    other = FakeEngine()
    engine.reply, other.max_model_len, other.kv = "Hello there, wörld.", 4000, "full"
    with http_server(build_app(engine, "fake", None, other)) as url:
        opened(page, url)
        page.check("#compare")
        ask(page, "Hi")
        parted = page.locator(".divergence")
        expect(parted).to_have_text("The answers agree for 1 word; the first token that differs is marked.")
        expect(page.locator("h3").nth(1)).to_have_text("turbo (compressed cache)")
        served, full = page.locator(".answer-text").all()
        expect(served.locator(".apart")).to_have_text("t")
        expect(full.locator(".apart")).to_have_text("w")
        look_at(page, "compare", "light")
        other.reply = engine.reply
        ask(page, "Hi")
        expect(parted.nth(1)).to_contain_text("are the same")
        assert "<assistant>Hello there, wörld.<user>Hi" in engine.prompts[-1] == other.prompts[-1]
        page.uncheck("#compare")
        ask(page, "Hi")
        expect(page.locator(".turn").nth(2).locator(".answer-text")).to_have_count(1)
        expect(parted.nth(2)).to_be_hidden()
        page.reload()
        expect(parted.first).to_contain_text("agree for 1 word")


def test_the_key_is_asked_for_and_stored_nowhere(page, engine):
    with http_server(build_app(engine, "fake", ServerSettings(api_key=("other", "secret")))) as url:
        page.goto(url)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        look_at(page, "key", "light", whole=False)
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
        ask(page, "Hi")
        expect(page.locator(".answer-text")).to_have_text("Hello wörld.")
        assert "Hello" in str(state := page.context.storage_state(indexed_db=True)) and "secret" not in str(state)
        assert not state["cookies"] and all(not one["localStorage"] for one in state["origins"])
        page.reload()
        expect(dialog).to_be_visible()


def test_documents_that_cannot_be_taken_get_one_clear_line(page, url):
    opened(page, url)
    error = page.locator("#document-error")
    add(page, "picture.png", b"\x89PNG\0\0")
    expect(error).to_have_text("picture.png: this file is neither a PDF nor text")
    expect(page.locator("#documents")).to_be_hidden()
    look_at(page, "refused", "light", whole=False)
    add(page, "big.pdf", b"%PDF-" + bytes(20 * 2**20))
    expect(error).to_have_text("big.pdf has 20 MB; documents of up to 20 MB can be read.")
    add(page, "empty.txt", b" ")
    expect(error).to_have_text("empty.txt: this file has no text")
    add(page, "one.txt", b"First text.")
    expect(error).to_be_hidden()
    page.get_by_role("button", name="Remove one.txt").click()
    expect(page.locator("#documents")).to_be_hidden()


def test_keys_and_theme(page, url):
    opened(page, url)
    order = []
    for _ in range(8):
        page.keyboard.press("Tab")
        order.append(page.evaluate_handle("document.activeElement").get_property("id").json_value())
    assert order[:6] == ["", "theme", "search", "", "question", "send"] and "file" in order
    page.focus("#theme")
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(page.locator("#theme")).to_have_text("Light")
    page.emulate_media(color_scheme="dark")
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
