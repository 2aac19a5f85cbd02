"""What ``run`` decodes, how it samples, and what it puts out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Where prompts come from: both None is standard input."""

    PANEL: ClassVar[str] = "Prompts"

    prompt: Annotated[str | None, Described("The prompt.", "TEXT")] = None
    prompts: Annotated[Path | None, Described("One prompt a line, as JSON.", "FILE.jsonl")] = None
    raw: Annotated[bool, Described("Feed text as it is, without the chat template.")] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """Where an output ends, and what is said of it."""

    PANEL: ClassVar[str] = "Output"

    max_new_tokens: Annotated[
        int | None,
        Described("Tokens to emit at most.", "N", least=1, shown="the model's, else 128"),
    ] = None
    min_tokens: Annotated[int, Described("No end before so many.", "N", least=0)] = 0
    logprobs: Annotated[bool, Described("Add each token's log-probability to --json.")] = False
    top_logprobs: Annotated[int, Described("Those of the N likeliest too.", "N", least=0)] = 0
    stop: Annotated[
        tuple[str, ...],
        Described("End before this text; repeatable.", "TEXT", typed=list[str], read=repeated),
    ] = ()
    guide: Annotated[
        str | None,
        Described("The output's form: an object with json, regex, choice or grammar.", "JSON"),
    ] = None
    raw_terminal: Annotated[
        bool, Described("Write control characters of the text to a terminal as they are.")
    ] = False
    ignore_eos: Annotated[bool, Described("Go on after an end-of-sequence token.")] = False


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """The fields of ``SamplingParams``; ``seed`` is that of the first prompt."""

    PANEL: ClassVar[str] = "Sampling"

    temperature: Annotated[
        float | None,
        Described("0 takes the likeliest token.", "T", least=0.0, shown="the model's, else 0"),
    ] = None
    top_p: Annotated[
        float | None,
        Described("Sample from this much probability.", "P", shown="the model's, else 1"),
    ] = None
    top_k: Annotated[
        int | None,
        Described("Sample from the K best; 0 is all.", "K", least=0, shown="the model's, else 0"),
    ] = None
    min_p: Annotated[
        float | None,
        Described(
            "Drop what is less likely than P times the best.", "P", shown="the model's, else 0"
        ),
    ] = None
    presence_penalty: Annotated[float, Described("Off each token of the output.", "X")] = 0.0
    frequency_penalty: Annotated[float, Described("The same, times its number there.", "X")] = 0.0
    repetition_penalty: Annotated[
        float | None,
        Described("Divides what was said before.", "X", shown="the model's, else 1"),
    ] = None
    seed: Annotated[int, Described("Prompt i (from 0) samples with S + i.", "S")] = 0
