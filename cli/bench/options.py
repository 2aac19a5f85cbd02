"""What a sweep of ``bench`` measures; the fields but ``sweep`` are those of ``SweepPlan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated


@dataclass(frozen=True, kw_only=True)
class SweepOptions(OptionGroup):
    """``sweep`` None measures pairs with and without the draft instead."""

    PANEL: ClassVar[str] = "Sweep (CUDA)"

    sweep: Annotated[
        str | None,
        Described(
            "Time some of these phases instead: decode, verify, draft, profile, anatomy, "
            "prefill, spec, load, specpv.",
            "LIST",
        ),
    ] = None
    batches: Annotated[
        tuple[int, ...],
        Described(
            "Sweep this batch; repeatable.",
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
            "Sweep this context; repeatable.",
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
            "specpv: time views that retrieve N tokens; repeatable.",
            "N",
            least=1,
            shown="several",
            typed=list[int],
            read=repeated,
        ),
    ] = ()
    limit_s: Annotated[
        float | None,
        Described("Seconds for a part of a sweep.", "X", least=1, name="time_limit_s", shown="120"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServerLoadOptions(OptionGroup):
    """Load on a server instead of an engine."""

    PANEL: ClassVar[str] = "Server"

    server: Annotated[
        str | None, Described("Measure the server at this address instead.", "URL")
    ] = None
    clients: Annotated[
        int, Described("Clients at once; each asks again when served.", "N", least=1)
    ] = 1
    rate: Annotated[
        float | None,
        Described("Requests a second instead, however many are open.", "R", least=0.001),
    ] = None
    requests: Annotated[int, Described("Requests in all.", "N", least=1)] = 32
    prompt_tokens: Annotated[
        int, Described("Random ids of a prompt, without --prompts.", "N", least=1)
    ] = 128
    model: Annotated[
        str | None, Described("Name of the model.", "NAME", shown="the server's first")
    ] = None
    api_key: Annotated[str | None, Described("Key to send.", "KEY")] = None


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(OptionGroup):
    """Scenarios with thresholds instead of pairs."""

    PANEL: ClassVar[str] = "Suite"

    suite: Annotated[
        str | None,
        Described(
            "Judge the scenarios of this YAML file, or of a shipped suite: smoke, single-32k, "
            "large-context-16k-x4.",
            "FILE",
        ),
    ] = None
    junit: Annotated[
        Path | None, Described("Write what came of them as JUnit's XML too.", "FILE.xml")
    ] = None
    record: Annotated[
        Path | None,
        Described("Stored report that over_record is judged by.", "FILE.json"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModeOptions(OptionGroup):
    """One checkpoint's modes beside each other instead of pairs."""

    PANEL: ClassVar[str] = "Modes"

    modes: Annotated[
        str | None,
        Described(
            "Compare these modes of one checkpoint: base, eagle3, specpv, mla, dsa, or some "
            "joined by +.",
            "LIST",
        ),
    ] = None
    build: Annotated[
        Path | None,
        Described("Model, draft and options of their builds, as build reads them.", "FILE.yaml"),
    ] = None
    engines: Annotated[
        Path | None, Described("Where their engines lie; what lacks is built.", "DIR")
    ] = None
    text: Annotated[
        Path | None, Described("Text to read and to go on from, or ids as .npy.", "FILE")
    ] = None
    judged: Annotated[
        int, Described("Tokens behind each context that are judged.", "N", least=1)
    ] = 256
