"""Options of single commands of ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated


@dataclass(frozen=True, kw_only=True)
class SweepOptions(OptionGroup):
    """The measurements of a sweep; the fields are those of ``SweepSettings``."""

    PANEL: ClassVar[str] = "Measurement"

    batches: Annotated[
        tuple[int, ...],
        Described(
            "Batch size to measure; repeatable.",
            "N",
            least=1,
            name="batch",
            shown="several",
            typed=list[int],
            read=repeated,
        ),
    ] = ()
    contexts: Annotated[
        tuple[int, ...],
        Described(
            "Context length to measure; repeatable.",
            "N",
            least=1,
            name="context",
            shown="several",
            typed=list[int],
            read=repeated,
        ),
    ] = ()
    retrieved: Annotated[
        tuple[int, ...],
        Described(
            "With specpv: retrieved tokens of a view; repeatable.",
            "N",
            least=1,
            shown="several",
            typed=list[int],
            read=repeated,
        ),
    ] = ()
    limit_s: Annotated[
        float | None,
        Described(
            "Time limit of each part in seconds.", "X", least=1, name="time_limit_s", shown="120"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServerLoadOptions(OptionGroup):
    """Load on a server."""

    PANEL: ClassVar[str] = "Load"

    clients: Annotated[int, Described("Number of concurrent clients.", "N", least=1)] = 1
    rate: Annotated[
        float | None,
        Described("Requests per second, independent of --clients.", "R", least=0.001),
    ] = None
    requests: Annotated[int, Described("Total number of requests.", "N", least=1)] = 32
    prompt_tokens: Annotated[
        int, Described("Random tokens per prompt, without --prompts.", "N", least=1)
    ] = 128
    model: Annotated[
        str | None,
        Described("Name of the model in the API.", "NAME", shown="the server's first model"),
    ] = None
    api_key: Annotated[str | None, Described("API key.", "KEY")] = None


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(OptionGroup):
    """Files of a suite."""

    PANEL: ClassVar[str] = "Report"

    junit: Annotated[Path | None, Described("Also write the results as JUnit XML.", "FILE.xml")] = (
        None
    )
    record: Annotated[
        Path | None,
        Described("Earlier report for the threshold over_record.", "FILE.json"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModeOptions(OptionGroup):
    """The checkpoint, the engines and the text of a comparison of modes."""

    PANEL: ClassVar[str] = "Modes"

    build: Annotated[
        Path, Described("Configuration file with model, draft and build options.", "FILE.yaml")
    ]
    engines: Annotated[Path, Described("Directory of the engines; missing ones are built.", "DIR")]
    text: Annotated[
        Path, Described("Text to evaluate and to continue, or token ids as .npy.", "FILE")
    ]
    judged: Annotated[int, Described("Evaluated tokens after each context.", "N", least=1)] = 256
