"""The report of ``bench sweep``: measurements and the bytes that must be read."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.runtime.measure.anatomy import StepAnatomy
from specbuild.runtime.measure.byte_floor import BytesByPart, Work

SWEEPS = ("decode", "verify", "draft", "profile", "anatomy", "prefill", "spec", "load", "specpv")


@dataclass(frozen=True)
class Phase:
    """One phase of one shape: its median time and the bytes that it must read.

    ``experts`` is the number of distinct experts per layer, read back from the step if
    ``experts_measured``, else that of random routing. ``share_of_ceiling`` is ``bytes_per_s``
    divided by that of a streaming read in the same process. Rates are None if a phase is too short
    to distinguish from noise. ``idle_s`` is the time between two queued steps.
    """

    sweep: str
    name: str
    batch: int
    context: float
    rows: int
    time_s: float
    bytes: BytesByPart
    bytes_total: float
    bytes_per_s: float | None
    share_of_ceiling: float | None
    operations: float
    operations_per_s: float | None
    experts: float
    experts_measured: bool
    tokens_per_s: float | None
    idle_s: float | None


@dataclass(frozen=True)
class KernelTime:
    """The time that the launches of one kernel add to a step, in total."""

    step: str
    batch: int
    kernel: str
    launches: int
    added_s: float


@dataclass(frozen=True)
class LayerLaunch:
    """One launch of one layer of a step, in order; ``layer`` counts from 0.

    ``added_s`` is the time that it adds to the step, as in a profile.
    """

    step: str
    batch: int
    layer: int
    op: str
    kernel: str
    added_s: float


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding of real prompts. Rates are of the full batch, medians over the rounds.

    ``tokens_per_s`` counts from the last sequence's first token; with prompts, from the start.
    ``ratio`` is relative to the rate without a draft. ``same_tokens``: the tokens equal those
    without a draft.
    """

    batch: int
    draft: str
    tokens_per_s: float
    with_prompts_tokens_per_s: float
    ttft_s: float
    mean_acceptance_length: float
    ratio: float
    same_tokens: bool


@dataclass(frozen=True)
class Load:
    """Loading, in seconds, and device memory, in bytes.

    ``first_token_s`` has consecutive fresh processes, from their start to a first token.
    ``beyond_bytes`` is the engine's memory besides weights and caches, after it has decoded.
    ``context_bytes`` was allocated before by the driver and other users of the GPU.
    """

    load_s: float
    first_token_s: tuple[float, ...]
    weights_bytes: int
    cache_bytes: int
    beyond_bytes: int
    context_bytes: int


@dataclass(frozen=True)
class SweepReport:
    """The output of ``bench sweep --json``; ``left_out`` has skipped measurements with reasons.

    ``timeline`` has the launches of one layer of every profiled step, ``anatomies`` all launches.
    """

    gpu: str
    engine: str
    ceiling_bytes_per_s: float | None
    phases: tuple[Phase, ...]
    kernels: tuple[KernelTime, ...]
    decoding: tuple[Decoding, ...]
    load: Load | None
    left_out: tuple[str, ...]
    timeline: tuple[LayerLaunch, ...] = ()
    anatomies: tuple[StepAnatomy, ...] = ()


def phase_of(
    sweep: str,
    name: str,
    work: Work,
    *,
    time_s: float,
    floor: BytesByPart,
    operations: float,
    experts: float,
    experts_measured: bool = False,
    ceiling_bytes_per_s: float | None,
) -> Phase:
    """Return a measured time with its floor."""
    # A difference of two medians: noise may exceed a short phase.
    long_enough = time_s > 0
    rate = floor.total / time_s if long_enough else None
    share = None
    if rate is not None and ceiling_bytes_per_s is not None:
        share = rate / ceiling_bytes_per_s
    return Phase(
        sweep=sweep,
        name=name,
        batch=work.batch,
        context=work.context,
        rows=work.rows,
        time_s=time_s,
        bytes=floor,
        bytes_total=floor.total,
        bytes_per_s=rate,
        share_of_ceiling=share,
        operations=operations,
        operations_per_s=operations / time_s if long_enough else None,
        experts=experts,
        experts_measured=experts_measured,
        tokens_per_s=None,
        idle_s=None,
    )
