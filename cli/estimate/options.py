"""Options of ``estimate``: traffic, sources of step times, and latency targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup


@dataclass(frozen=True, kw_only=True)
class TrafficOptions(OptionGroup):
    """Requests of one size; without ``rate``, from a number of concurrent clients."""

    PANEL: ClassVar[str] = "Traffic"

    rate: Annotated[
        float | None, Described("Requests per second, at random times.", "R", least=0.001)
    ] = None
    clients: Annotated[
        int, Described("Number of concurrent clients, without --rate.", "N", least=1)
    ] = 1
    prompt_tokens: Annotated[int, Described("Tokens per prompt.", "N", least=1)] = 512
    output_tokens: Annotated[int, Described("Tokens per output.", "N", least=1)] = 128
    requests: Annotated[int, Described("Number of simulated requests.", "N", least=1)] = 256
    request_ms: Annotated[
        float,
        Described("Time that server and network add to each request.", "MS", least=0),
    ] = 0.0
    seed: Annotated[int, Described("Random seed of the arrival times.", "N", least=0)] = 1


@dataclass(frozen=True, kw_only=True)
class CostOptions(OptionGroup):
    """The sources of launch times."""

    PANEL: ClassVar[str] = "Costs"

    costs: Annotated[
        Path | None,
        Described(
            "Measured times: a file of --save-costs, or for a CUDA engine the output "
            "of bench sweep ENGINE prefill --json.",
            "FILE.json",
            shown="measured now (CPU)",
        ),
    ] = None
    save_costs: Annotated[
        Path | None, Described("Write the measured times for later estimates.", "FILE.json")
    ] = None
    gpu: Annotated[
        str | None,
        Described("Require times of this GPU: a part of its name, for example h200.", "NAME"),
    ] = None
    acceptance: Annotated[
        float,
        Described(
            "Probability that a draft level is accepted; 0 means no draft.",
            "P",
            least=0.0,
            most=1.0,
        ),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class TargetOptions(OptionGroup):
    """Limits of the 90th percentiles."""

    PANEL: ClassVar[str] = "Targets"

    target_ttft_ms: Annotated[
        float | None, Described("Target TTFT, 90th percentile.", "MS", least=0.001)
    ] = None
    target_tpot_ms: Annotated[
        float | None, Described("Target TPOT, 90th percentile.", "MS", least=0.001)
    ] = None
