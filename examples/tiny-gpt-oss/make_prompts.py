"""Cut the example prompts out of held-out files of the standard library."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import Document, iter_documents
from tokenizers import Tokenizer

# Ordinary modules among the held-out files, and how many prompts each gives.
SOURCES = {
    "asyncio/taskgroups.py": 2,
    "distutils/_msvccompiler.py": 3,
    "idlelib/format.py": 3,
    "idlelib/stackviewer.py": 1,
    "lib2to3/btm_matcher.py": 1,
    "mailbox.py": 6,
    "selectors.py": 4,
    "tkinter/commondialog.py": 1,
    "wave.py": 5,
    "test/datetimetester.py": 1,
    "test/test_itertools.py": 3,
    "test/test_json/test_decode.py": 1,
    "test/test_named_expressions.py": 1,
    "test/test_poll.py": 1,
    "test/test_selectors.py": 2,
    "test/test_set.py": 2,
    "test/test_smtplib.py": 3,
}
SHORTEST, LONGEST = 60, 250
LENGTHS = (70, 110, 150, 190, 230)  # tokens aimed at, in turn


def cut(lines: list[str], start: int, aim: int, tokenizer: Tokenizer) -> str | None:
    """Return whole lines from `start` of about `aim` tokens, or None if none is within limits.

    The last line's end is left off: the tokenizer joins it to the indentation that follows, which
    is the model's to write.
    """
    best = None
    for stop in range(start + 1, len(lines) + 1):
        text = "".join(lines[start:stop]).rstrip("\n")
        count = len(tokenizer.encode(text).ids)
        if count > LONGEST:
            break
        if (
            count >= SHORTEST
            and lines[stop - 1].strip()
            and (best is None or abs(count - aim) < best[0])
        ):
            best = (abs(count - aim), text)
    return best[1] if best else None


def prompts_of(
    document: Document, count: int, first: int, tokenizer: Tokenizer
) -> list[dict[str, str]]:
    """Return `count` prompts from the file's start and evenly spread top-level definitions."""
    lines = document.text.splitlines(keepends=True)
    starts = [0, *(i for i, line in enumerate(lines) if i and line.startswith(("class ", "def ")))]
    cuts = [
        (start, cut(lines, start, LENGTHS[(first + i) % len(LENGTHS)], tokenizer))
        for i, start in enumerate(starts)
    ]
    usable = [(start, text) for start, text in cuts if text is not None]
    chosen = usable[:: max(1, len(usable) // count)][:count]
    name = document.path.removesuffix(".py").replace("/", ".")
    return [{"id": f"{name}:{start + 1}", "prompt": text} for start, text in chosen]


def main() -> None:
    """Write one JSON object per line: `id` (module and line) and `prompt`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    prompts: list[dict[str, str]] = []
    for document in iter_documents():
        if document.held_out and document.path in SOURCES:
            prompts += prompts_of(document, SOURCES[document.path], len(prompts), tokenizer)
    args.output.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
