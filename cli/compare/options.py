"""Options of ``compare``: the text and the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """The text, in pieces of ``length`` tokens; the first ``context`` of each are not evaluated."""

    PANEL: ClassVar[str] = "Text"

    files: Annotated[
        tuple[Path, ...],
        Described(
            "UTF-8 text, or token ids as .npy; repeatable.",
            "FILE",
            name="text",
            typed=list[Path],
            read=repeated,
        ),
    ]
    tokens: Annotated[int, Described("Number of tokens to evaluate.", "N", least=2)] = 4096
    length: Annotated[
        int | None,
        Described(
            "Maximum length of a piece of text.", "N", least=2, shown="2048, or the engines' limit"
        ),
    ] = None
    context: Annotated[
        int,
        Described("Tokens at the start of each piece that are not evaluated.", "N", least=0),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(OptionGroup):
    """The prompts, decoded ``rounds`` times with each engine; 0 new tokens measure no speed."""

    PANEL: ClassVar[str] = "Speed"

    prompts: Annotated[
        Path | None,
        Described(
            "Prompts for the speed measurement.", "FILE.jsonl", shown="the start of each piece"
        ),
    ] = None
    max_new_tokens: Annotated[
        int, Described("Tokens per output; 0 skips the speed measurement.", "N", least=0)
    ] = 128
    rounds: Annotated[int, Described("Measured pairs per prompt.", "N", least=1)] = 3
