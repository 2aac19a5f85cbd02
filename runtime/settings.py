"""Settings of a loaded engine: one frozen object, validated when it is created."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from specbuild.runtime.engine_dir.cache_groups import (
    DEFAULT_SNAPSHOT_INTERVAL,
    SNAPSHOT_STEP,
    sequences_together,
)
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.parameters import refuses_unknown, whole_number

# vLLM's option: "auto" uses the sampling parameters that the checkpoint recommends, "none" does
# not.
GenerationConfig: TypeAlias = Literal["auto", "none"]
KvPolicy: TypeAlias = Literal["guaranteed-no-evict", "max-utilization"]
# A started request runs to its end: it is never paused or preempted.
DEFAULT_KV_POLICY: KvPolicy = "guaranteed-no-evict"
# "auto" caches prefixes if the engine's sequences can share pages; "on" fails if they cannot.
PrefixCaching: TypeAlias = Literal["off", "auto", "on"]


@refuses_unknown
@dataclass(frozen=True)
class PrefillSchedule:
    """How prefill launches alternate with decoding steps. The tokens do not depend on it.

    A prefill launch has at most ``max_rows`` rows. None uses the fastest size, and at most 2048
    rows while sequences decode. ``steps_between`` decoding steps run between two prefill launches;
    0 prefills all admitted prompts first. A launch of 2048 rows takes as long as about five steps.
    With two steps between launches, prefill keeps most of its speed, and no token waits for more
    than one prefill launch.
    """

    max_rows: int | None = None
    steps_between: int = 2

    def __post_init__(self) -> None:
        rows = self.max_rows
        if rows is not None and whole_number("prefill_rows_per_turn", rows) < 1:
            raise RequestError(f"prefill_rows_per_turn is {rows}, must be 1 or above")
        if whole_number("steps_between", self.steps_between) < 0:
            raise RequestError(f"steps_between is {self.steps_between}, must be 0 or above")


DEFAULT_PREFILL = PrefillSchedule()


@refuses_unknown
@dataclass(frozen=True)
class RuntimeSettings:
    """How an engine is loaded and run. Fixed while the engine is loaded.

    Loading:

    - ``device``: ``cpu``, ``cuda``, ``tensorrt`` or ``tensorrt-rtx``; None is the backend that the
      engine was built for. ``cuda:1`` is the second GPU, ``cuda:0,1`` are two for an engine that
      runs on as many.
    - ``threads``: compute threads of a CPU engine. None is the number of physical cores, up
      to 8, and one for engines with less than 64 MiB of weights.
    - ``cache_dir``: directory that stores measured step costs between runs; None stores none.
    - ``verify_key``: PEM file with the Ed25519 public key that must have signed the engine.
    - ``pin``: required SHA-256 of the engine's manifest.
    - ``generation_config``: ``none`` ignores the sampling parameters that the checkpoint recommends
      (:attr:`Engine.default_params`).
    - ``chat_template``: a Jinja template that replaces the engine's own.
    - ``experimental``: also load engines of more than two GPUs, which have not been measured.

    Running:

    - ``prefill``: how prefill launches alternate with decoding steps.
    - ``kv_policy``: ``guaranteed-no-evict`` reserves all pages of a request at admission;
      ``max-utilization`` allocates pages as sequences grow, and preempts sequences if none are
      free.
    - ``prefix_caching``: prompts reuse cached pages of the prefix that they share with earlier
      prompts. A prompt's last token is always computed.
    - ``publish_generated_pages``: also cache pages of generated tokens. Decoding may round them
      differently than prefill does.
    - ``state_snapshot_memory``: bytes of host memory for snapshots of recurrent states, without
      which prompts of such a model reuse no pages. None is 4 GiB on CUDA and 0 on the CPU.
    - ``state_snapshot_interval``: a snapshot is taken at multiples of so many tokens, itself a
      multiple of 64, and near the end of each prompt.

    Raises RequestError if a value is invalid. Values that only some engines support are checked
    when the engine is loaded.
    """

    device: str | None = None
    threads: int | None = None
    cache_dir: Path | None = None
    verify_key: str | Path | None = None
    pin: str | None = None
    generation_config: GenerationConfig = "auto"
    chat_template: str | None = None
    experimental: bool = False
    prefill: PrefillSchedule = DEFAULT_PREFILL
    kv_policy: KvPolicy = DEFAULT_KV_POLICY
    prefix_caching: PrefixCaching = "off"
    publish_generated_pages: bool = False
    state_snapshot_memory: int | None = None
    state_snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL

    def __post_init__(self) -> None:
        for name, values in (
            ("generation_config", get_args(GenerationConfig)),
            ("kv_policy", get_args(KvPolicy)),
            ("prefix_caching", get_args(PrefixCaching)),
        ):
            if (value := getattr(self, name)) not in values:
                raise RequestError(f"{name} is {value!r}, must be one of {', '.join(values)}")
        if (self.state_snapshot_memory or 0) < 0:
            raise RequestError(
                f"state_snapshot_memory is {self.state_snapshot_memory}, must be 0 or above"
            )
        interval = self.state_snapshot_interval
        if interval < SNAPSHOT_STEP or interval % SNAPSHOT_STEP:
            raise RequestError(
                f"state_snapshot_interval is {interval}, must be a multiple of {SNAPSHOT_STEP}"
            )
        if self.publish_generated_pages and self.prefix_caching == "off":
            raise RequestError(
                "publish_generated_pages needs the prefix cache: set prefix_caching to on"
            )

    def allocates_on_demand(self, manifest: Manifest) -> bool:
        """Return whether sequences of this engine get pages as they grow.

        They do not if the pages hold the worst case, so that nothing can run out. They also do not
        with a lossy mode, whose tokens depend on where steps begin: a preempted sequence would not
        give the same tokens again.
        """
        limits, groups = manifest.limits, manifest.cache_groups
        most = sequences_together(groups, limits, limits.max_seq_len)
        lossy = manifest.specpv is not None or manifest.dsa is not None
        always_fits = most == limits.max_batch_size
        return self.kv_policy == "max-utilization" and not (always_fits or lossy)


DEFAULT_SETTINGS = RuntimeSettings()
