"""The texts of several requests are printed in order, with draft tokens coloured on a terminal."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.text import Text

from specbuild.cli.terminal.console import fact_table, plain_console, say
from specbuild.cli.terminal.token_stream import TokenStream
from specbuild.cli.terminal.visible_text import visible

# A title, clearing lines, an 8-bit CSI, right-to-left text, a bell.
CONTROLS = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x7f\r"
ESCAPED = "\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\u202e\\x7f\\r"
CYAN = "\x1b[36m"


class Terminal(io.StringIO):
    """A text buffer that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_file_gets_text_only() -> None:
    file = io.StringIO()
    stream = TokenStream(["a"], file)
    stream.write(0, "one ", from_draft=False)
    stream.write(0, "two", from_draft=True)
    stream.finish(0, "one two")
    assert file.getvalue() == "one two\n"


def test_terminal_colours_draft_tokens(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    stream = TokenStream(["a"], file)
    stream.write(0, "own", from_draft=False)
    stream.write(0, "drafted", from_draft=True)
    assert file.getvalue() == f"own{CYAN}drafted\x1b[0m"


def test_no_color_disables_colours(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    TokenStream(["a"], file).write(0, "drafted", from_draft=True)
    assert file.getvalue() == "drafted"


def test_control_characters_are_escaped_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    TokenStream(["a"], file).write(0, f"{CONTROLS}x\n\té", from_draft=False)
    assert file.getvalue() == f"{ESCAPED}x\n\té"
    raw = Terminal()
    TokenStream(["a"], raw, raw_terminal=True).write(0, CONTROLS, from_draft=False)
    assert raw.getvalue() == CONTROLS
    plain = io.StringIO()
    TokenStream(["a"], plain).write(0, CONTROLS, from_draft=False)
    assert plain.getvalue() == CONTROLS


def test_control_characters_are_escaped_in_titles() -> None:
    file = io.StringIO()
    TokenStream([f"a{CONTROLS}\n", "b"], file, raw_terminal=True)
    assert file.getvalue() == f"── a{ESCAPED}\\n ──\n"


def test_buffered_text_is_printed_at_the_end() -> None:
    file = io.StringIO()
    stream = TokenStream(["a"], file)
    stream.write(0, "so", from_draft=False)
    stream.finish(0, "so far")
    assert file.getvalue() == "so far\n"


@given(st.data())
def test_any_interleaving_prints_the_sequential_text(data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.lists(st.sampled_from("xyz"), max_size=4), min_size=1, max_size=4)
    )
    left = [list(text) for text in texts]
    running = set(range(len(texts)))
    file = io.StringIO()
    stream = TokenStream([str(i) for i in range(len(texts))], file)
    while running:
        request = data.draw(st.sampled_from(sorted(running)))
        if left[request]:
            stream.write(request, left[request].pop(0), from_draft=data.draw(st.booleans()))
        else:
            stream.finish(request, "".join(texts[request]))
            running.discard(request)
    titles = [f"── {i} ──\n" if len(texts) > 1 else "" for i in range(len(texts))]
    expected = [f"{t}{''.join(text)}\n" for t, text in zip(titles, texts, strict=True)]
    assert file.getvalue() == "".join(expected)


def test_consoles_escape_text_of_engines_and_checkpoints() -> None:
    file = io.StringIO()
    console = plain_console(file)
    table = fact_table("a\x1b[2J")
    table.add_row("b\x9b1A", "[bold]c\x1b]0;t")
    for text in (table, "d\x1b[2J", Text("e\u202e"), Group("f\x1bc", Text("g\x1bc"))):
        console.print(text)
    say("h\x1b[2J\nend", to=file)
    written = file.getvalue()
    assert not {c for c in written if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")}
    assert all(
        part in written for part in ("a\\x1b[2J", "b\\x9b1A", "[bold]c\\x1b]0;t", "e\\u202e")
    )
    assert all(part in written for part in ("f\\x1bc", "g\\x1bc", "h\\x1b[2J\nend"))


@given(st.text())
def test_printable_characters_are_unchanged(text: str) -> None:
    escaped = visible(text)
    assert not {c for c in escaped if unicodedata.category(c) in ("Cc", "Cf")} - set(
        "\n\t\u200c\u200d"
    )
    assert visible(escaped) == escaped
    if all(c.isprintable() or c in "\n\t" for c in text):
        assert escaped == text
