"""Reads prompts (an option, a JSON-lines file, standard input) and converts them to requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.cli.terminal.prompt_line import PlacedPrompt, prompt_of
from specbuild.runtime.engine_dir.strict_json import parsed
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.request import GenerateParams, Prompt, Request
from specbuild.runtime.text.codec import MAX_PROMPT_BYTES

if TYPE_CHECKING:
    from specbuild.runtime.engine import Engine

FIRST_ID = "0"


def checked_requests(
    engine: Engine, placed: Sequence[PlacedPrompt], params: Sequence[GenerateParams]
) -> list[Request]:
    """Return the prompts as requests; RequestError names the first that cannot be served."""
    requests = []
    for item, own_params in zip(placed, params, strict=True):
        try:
            requests += engine.check_prompts(item.prompt, own_params)
        except RequestError as error:
            raise RequestError(f"{item.place}: {error}") from error
    return requests


def tokenised(
    engine: Engine, placed: Sequence[PlacedPrompt], params: GenerateParams
) -> list[Prompt]:
    """Return the prompts by their token ids, checked, for repeated decoding."""
    for item in placed:
        if item.own_params:
            raise SpecbuildError(
                f"{item.place}: {', '.join(item.own_params)} cannot be of one prompt alone here; "
                "leave it out"
            )
    requests = checked_requests(engine, placed, [params] * len(placed))
    return [Prompt(request.id, prompt_ids=request.prompt_ids) for request in requests]


def read_prompts(text: str | None, file: Path | None) -> list[PlacedPrompt]:
    """Return the prompts of ``--prompt TEXT`` or ``--prompts FILE``, else standard input.

    Raises SpecbuildError if both are given, or a prompt is invalid.
    """
    if text is not None and file is not None:
        raise SpecbuildError("--prompt and --prompts were both given: give one of them")
    if file is not None:
        return read_prompt_file(file)
    place = "--prompt" if text is not None else "standard input"
    text = _standard_input() if text is None else text
    if not text:
        raise SpecbuildError(f"{place}: the prompt is empty, give it at least one token")
    return [PlacedPrompt(place, Prompt(FIRST_ID, prompt=text))]


def read_prompt_file(file: Path) -> list[PlacedPrompt]:
    """Return every line of a JSON-lines file, checked; SpecbuildError names the first bad line."""
    with file.open("rb") as opened:
        lines = iter(lambda: _bounded(opened.readline, f"{file}: a line"), b"")
        placed = [
            _prompt_of_line(line.removesuffix(b"\n"), f"{file} line {i}", str(i))
            for i, line in enumerate(lines, start=1)
        ]
    if not placed:
        raise SpecbuildError(f"{file} holds no prompts: write one JSON object a line")
    return placed


def _prompt_of_line(line: bytes, place: str, default_id: str) -> PlacedPrompt:
    try:
        data = parsed(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SpecbuildError(f"{place} is not UTF-8: byte {error.start} is wrong") from error
    except json.JSONDecodeError as error:
        raise SpecbuildError(
            f"{place} is not JSON ({error.msg}, column {error.colno}): "
            'expected {"id": "a", "prompt": "text"}'
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecbuildError(f"{place}: {error}") from error
    return prompt_of(data, place, default_id)


def _standard_input() -> str:
    if sys.stdin is None:
        raise SpecbuildError("there is no standard input: give --prompt or --prompts")
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D:", file=sys.stderr)
    try:
        return _bounded(sys.stdin.buffer.read, "standard input").decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SpecbuildError(f"standard input is not UTF-8: byte {error.start} is wrong") from error


def _bounded(read: Callable[[int], bytes], what: str) -> bytes:
    """Return the input, or raise SpecbuildError if it is longer than any engine's prompt."""
    data = read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise SpecbuildError(
            f"{what} has more than {MAX_PROMPT_BYTES} bytes, which is longer than any prompt: "
            "shorten it"
        )
    return data
