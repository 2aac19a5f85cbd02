"""What ``compare`` reads with both engines, and what it decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """The text, ``length`` tokens at a time; the first ``context`` of each are not judged."""

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
    tokens: Annotated[int, Described("Tokens to read.", "N", least=2)] = 4096
    length: Annotated[
        int | None,
        Described("Longest piece that is read whole.", "N", least=2, shown="2048, or the engines'"),
    ] = None
    context: Annotated[
        int,
        Described("Tokens at the start of each piece that are not judged.", "N", least=0),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(OptionGroup):
    """What is decoded, ``rounds`` times with each engine; 0 new tokens are no speeds."""

    PANEL: ClassVar[str] = "Speed"

    prompts: Annotated[
        Path | None,
        Described("Prompts to decode for speed.", "FILE.jsonl", shown="the text's beginnings"),
    ] = None
    max_new_tokens: Annotated[
        int, Described("Tokens of each output; 0 measures no speed.", "N", least=0)
    ] = 128
    rounds: Annotated[int, Described("Pairs measured for each prompt.", "N", least=1)] = 3
