"""Text of several requests comes out one after the other, draft tokens coloured on a terminal."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from specbuild.cli.terminal.token_stream import TokenStream

CYAN = "\x1b[36m"


class Terminal(io.StringIO):
    """A text buffer that says it is a terminal."""

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


def test_no_color_is_obeyed(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    TokenStream(["a"], file).write(0, "drafted", from_draft=True)
    assert file.getvalue() == "drafted"


def test_terminal_shows_control_characters_instead_of_obeying(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    TokenStream(["a"], file).write(0, "\x1b[2Jx\n\t\x7f", from_draft=False)
    assert file.getvalue() == "␛[2Jx\n\t␡"


def test_what_was_held_back_comes_at_the_end() -> None:
    file = io.StringIO()
    stream = TokenStream(["a"], file)
    stream.write(0, "so", from_draft=False)
    stream.finish(0, "so far")
    assert file.getvalue() == "so far\n"


@given(st.data())
def test_any_interleaving_reads_as_the_sequential_one(data: st.DataObject) -> None:
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
