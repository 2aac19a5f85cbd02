"""What ``plan`` is asked: the traffic, where costs come from, and what clients want."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(OptionGroup):
    """Requests of one size; without ``rate``, of so many clients at once."""

    PANEL: ClassVar[str] = "Traffic"

    rate: Annotated[
        float | None, Described("Requests a second, at random times.", "R", least=0.001)
    ] = None
    clients: Annotated[
        int, Described("Without --rate: clients that ask again when served.", "N", least=1)
    ] = 1
    prompt_tokens: Annotated[int, Described("Tokens of a prompt.", "N", least=1)] = 512
    output_tokens: Annotated[int, Described("Tokens of an output.", "N", least=1)] = 128
    requests: Annotated[int, Described("Requests to simulate.", "N", least=1)] = 256
    request_ms: Annotated[
        float,
        Described("What server and network add to a request before the engine.", "MS", least=0),
    ] = 0.0
    seed: Annotated[int, Described("Seed of the arrivals.", "N", least=0)] = 1


@dataclass(frozen=True, kw_only=True)
class CostOptions(OptionGroup):
    """Where the times of launches come from."""

    PANEL: ClassVar[str] = "Costs"

    costs: Annotated[
        Path | None,
        Described(
            "Times that an earlier plan wrote; of a CUDA engine what bench --sweep prefill printed "
            "with --json, beside the steps that tune stored.",
            "FILE.json",
            shown="measured here (CPU)",
        ),
    ] = None
    save_costs: Annotated[
        Path | None, Described("Write the times for later plans.", "FILE.json")
    ] = None
    gpu: Annotated[
        str | None,
        Described("Refuse costs of another GPU: a part of its name, as h200.", "NAME"),
    ] = None
    acceptance: Annotated[
        float,
        Described(
            "Chance that a level of a draft is accepted; 0 decodes without a draft.",
            "P",
            least=0.0,
            most=1.0,
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class TargetOptions(OptionGroup):
    """What nine of ten requests must not exceed."""

    PANEL: ClassVar[str] = "Targets"

    target_ttft_ms: Annotated[
        float | None, Described("To the first token, of 9 in 10 requests.", "MS", least=0.001)
    ] = None
    target_tpot_ms: Annotated[
        float | None, Described("For a token behind it, of 9 in 10 requests.", "MS", least=0.001)
    ] = None
