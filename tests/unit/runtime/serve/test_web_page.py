"""The page at ``/`` in Chromium."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Browser, browser, needs_chromium
from serve.served import LETTERS, TEMPLATE, served, worded
from toy_model import decode_plainly

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.serve import web_page
from specbuild.runtime.serve.app import App

PAGE = Path(web_page.__file__).parent / web_page.FOLDER
PROMPT = "bb"  # its answer is long
MARKUP = "<img src=x onerror=\"document.title='owned'\">"
IDLE = "document.getElementById('log').ariaBusy === 'false'"
BUSY = "document.getElementById('log').ariaBusy === 'true'"
READY = "document.getElementById('state').textContent === 'ready'"


def shown(selector: str) -> str:
    return f"document.querySelector('{selector}')?.textContent"


@dataclass
class Served:
    """A server whose steps are slowed down, or fail."""

    url: str
    app: App
    pass_s: float = 0.0
    broken: bool = False


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = worded(TEMPLATE, max_seq_len=256)
    run = engine.executor.run

    def slowed(role: str, feeds: Mapping[str, Any]) -> Any:
        time.sleep(given.pass_s)
        if given.broken:
            raise RuntimeError("the device is gone")
        return run(role, feeds)

    engine.executor.run = slowed
    with served(engine, setting=DraftSetting(DraftShape(3, 4, 12))) as (url, app):
        given = Served(url, app)
        yield given


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(1000, 700, dark=False)
        yield opened


@pytest.fixture
def page(server: Served, chromium: Browser) -> Iterator[Browser]:
    """The page, with an empty conversation and greedy sampling."""
    server.pass_s, server.broken = 0.0, False
    chromium.errors.clear()
    chromium.open(server.url)
    chromium.until(READY)
    chromium.value("document.getElementById('new').click()")
    for name, value in (("temperature", 0), ("max_tokens", 40)):
        chromium.value(f"document.getElementById('{name}').value = {value}")
    chromium.value("document.getElementById('settings').dispatchEvent(new Event('input'))")
    yield chromium
    server.pass_s, server.broken = 0.0, False


def answer_to(prompt: str, count: int = 40) -> str:
    """Return the text of a greedy answer; the template ends with the first control token."""
    ids = decode_plainly([*map(LETTERS.index, prompt), len(LETTERS)], count, SamplingParams())
    return "".join(LETTERS[i] for i in ids if i < len(LETTERS))


def test_the_page_loads_no_external_file() -> None:
    for file in PAGE.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+", file.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org"}, file
        assert "innerHTML" not in file.read_text(encoding="utf-8")


def test_files_of_the_page(server: Served) -> None:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        answer = client.get("/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="([^"]+)"', answer.text):
            assert client.get(name).status_code == 200
        for name in ("other", "..%2fapp.py", "../app.py"):
            assert client.get(f"/page/{name}").status_code == 404
        assert client.get("/page/about.json").json() == {"chat": True, "draft": True, "key": False}


def test_a_server_without_a_page() -> None:
    with served(worded(TEMPLATE), page=False) as (url, _):
        assert httpx.get(url, timeout=300).status_code == 404
        assert httpx.get(f"{url}/v1/models", timeout=300).status_code == 200


@needs_chromium
def test_an_answer_is_streamed_coloured_and_restored_after_a_reload(page: Browser) -> None:
    page.type(PROMPT)
    page.press("Enter")
    page.until(f"{shown('.turn.assistant .note')} && {IDLE}")
    text = answer_to(PROMPT)
    assert page.value(shown(".turn.user .text")) == PROMPT
    assert page.value(shown(".turn.assistant .text")) == text
    tinted = page.value("[...document.querySelectorAll('.turn .draft')].map((e) => e.innerText)")
    assert tinted and len("".join(tinted)) < len(text)
    assert re.fullmatch(
        r"40 tokens · [\d.]+ tokens/s · [\d.]+ tokens/step · TTFT .+",
        page.value(shown(".turn.assistant .note")),
    )
    assert float(page.value(shown("#acceptance"))) > 1
    page.until("document.querySelector('.plot output').textContent === '0'")
    page.call("Page.reload")
    page.until(f"{READY} && {shown('.turn.assistant .text')}")
    assert page.value(shown(".turn.assistant .text")) == text
    assert page.value("document.getElementById('max_tokens').value") == "40"
    page.value("document.getElementById('new').click()")
    assert page.value("document.querySelectorAll('.turn').length") == 0
    assert page.errors == []


@needs_chromium
def test_escape_stops_an_answer(page: Browser, server: Served) -> None:
    server.pass_s = 0.03
    page.type(PROMPT)
    page.press("Enter")
    page.until(f"{BUSY} && {shown('.turn.assistant .text')}?.length > 2")
    assert page.value("document.getElementById('send').hidden")
    page.press("Escape")
    page.until(IDLE)
    assert page.value(shown(".turn.assistant .note")).startswith("stopped · ")
    assert answer_to(PROMPT).startswith(page.value(shown(".turn.assistant .text")))
    end_s = time.monotonic() + 120
    while server.app.service.open_requests:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert page.value("document.activeElement.id") == "prompt"


@needs_chromium
def test_shows_a_failure_of_the_engine(page: Browser, server: Served) -> None:
    server.broken = True
    page.type(PROMPT)
    page.press("Enter")
    page.until(shown("[role=alert]"))
    assert "the device is gone" in page.value(shown(".turn.assistant [role=alert]"))
    server.broken = False
    page.type("bd")
    page.press("Enter")
    page.until(f"{IDLE} && {shown('.turn:last-child .note')}")


@needs_chromium
def test_text_is_escaped_and_fits_into_a_narrow_window(page: Browser) -> None:
    page.look(400, 700, dark=True)
    page.type(MARKUP)
    page.press("Enter")
    page.until(f"{IDLE} && {shown('.turn.user .text')}")
    assert page.value(shown(".turn.user .text")) == MARKUP
    assert page.value("document.querySelectorAll('#log img').length") == 0
    assert page.value("document.title") == "specbuild"
    assert page.value("document.documentElement.scrollWidth") <= 400
    assert not page.value("document.getElementById('panel').checkVisibility()")
    page.value("document.getElementById('panel-toggle').click()")
    assert page.value("document.getElementById('panel').checkVisibility()")
    page.press("Escape")
    assert not page.value("document.getElementById('panel').checkVisibility()")
    page.look(1000, 700, dark=False)


@needs_chromium
def test_reasoning_is_collapsed_and_fences_are_code(page: Browser) -> None:
    fence = "```"
    pieces = [
        ["a\n``", False],
        ["`py\nx", True],
        [f" = 1\n{fence}", False],
        [f"\nb {fence} c", True],
    ]
    turn = {"reasoning": [["rea", False], ["son", True]], "content": pieces, "role": "assistant"}
    view = f"new TurnView({json.dumps(turn)}, {{ fences: true }}).element"
    page.value(
        "import('/page/turn.js').then(({ TurnView }) => "
        f"document.getElementById('log').append({view}))"
    )
    assert page.value("document.querySelector('.turn details').open") is False
    assert page.value(shown(".turn details .text")) == "reason"
    blocks = (
        "[...document.querySelectorAll('.turn > .text > *')].map((e) => [e.tagName, e.innerText])"
    )
    assert page.value(blocks) == [
        ["SPAN", "a\n"],
        ["DIV", "x = 1\n\nCopy"],
        ["SPAN", f"b {fence} c"],
    ]
    assert page.value(shown(".turn pre .draft")) == "x"
    colours = "[...CSS.highlights].map(([name, ranges]) => [name, [...ranges].map(String)])"
    assert page.value(colours) == [["code-number", ["1"]]]


@needs_chromium
def test_code_is_highlighted_across_draft_tokens(page: Browser) -> None:
    code = "```\ndef f(x):  # one\n    return 'a\\'b' + 0x1F\n```\n"
    pieces = [[letter, i % 3 == 0] for i, letter in enumerate(code)]
    turn = {"reasoning": [], "content": pieces, "role": "assistant"}
    page.value(
        "import('/page/turn.js').then(({ TurnView }) => document.getElementById('log')"
        f".append(new TurnView({json.dumps(turn)}, {{ fences: true }}).element))"
    )
    found = page.value(
        "Object.fromEntries([...CSS.highlights].map(([name, ranges]) => "
        "[name.slice(5), [...ranges].map(String)]))"
    )
    assert found == {
        "keyword": ["def", "return"],
        "comment": ["# one"],
        "string": [r"'a\'b'"],
        "number": ["0x1F"],
    }


@needs_chromium
def test_the_last_answer_can_be_retried_and_copied(page: Browser) -> None:
    # A headless browser has no clipboard.
    page.value(
        "Object.defineProperty(navigator, 'clipboard', { configurable: true, value: "
        "{ writeText: async (text) => { window.copied = text; } } }) && 0"
    )
    for prompt in ("bd", PROMPT):
        page.type(prompt)
        page.press("Enter")
        page.until(f"{IDLE} && {shown('.turn:last-child .note')}")
    retries = "[...document.querySelectorAll('.retry')].map((e) => e.checkVisibility())"
    assert page.value(retries) == [False, True]
    whole = page.value(shown(".turn:last-child .text"))
    page.value("document.getElementById('max_tokens').value = 7")
    page.value("document.querySelector('.turn:last-child .retry').click()")
    page.until(f"{IDLE} && {shown('.turn:last-child .note')}?.startsWith('7 tokens')")
    assert page.value("document.querySelectorAll('.turn').length") == 4
    text = page.value(shown(".turn:last-child .text"))
    assert text and len(text) < len(whole) and whole.startswith(text)
    page.value("document.querySelector('.turn:last-child .copy').click()")
    page.until(f"{shown('.turn:last-child .copy')} === 'Copied'")
    assert page.value("window.copied") == text


@needs_chromium
def test_without_a_draft_the_page_does_not_mention_one(chromium: Browser) -> None:
    with served(worded(TEMPLATE, drafted=False)) as (url, _):
        chromium.open(url)
        chromium.until(READY)
        seen = "[...document.querySelectorAll('.for-draft')].map((e) => e.checkVisibility())"
        assert chromium.value(seen) == [False, False, False]


@needs_chromium
def test_the_page_requests_a_key_and_stores_it_in_the_tab(chromium: Browser) -> None:
    with served(worded(TEMPLATE), keys=("secret",)) as (url, _):
        chromium.open(url)
        chromium.until("!document.getElementById('key-form').hidden")
        for key, question in (("wrong", "rejects this key"), ("secret", "")):
            chromium.until("document.activeElement.id === 'key'")
            chromium.type(key)
            chromium.press("Enter")
            if question:
                chromium.until(f"{shown('#key-form label')}.includes('{question}')")
        chromium.until(READY)
        assert chromium.value("document.getElementById('key-form').hidden")
        chromium.type("bd")
        chromium.press("Enter")
        chromium.until(shown(".turn.assistant .note"))
        assert chromium.value("localStorage.length") == 0
        chromium.call("Page.reload")
        chromium.until(READY)
