"""Creates loops whose steps run on the host, and measures what drafting costs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache, PrefixLookup
from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.decode.decoder import Decoder, DraftSetting
from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.host.drafting import HostDrafting
from specbuild.runtime.decode.host.scoring import score_on_host
from specbuild.runtime.decode.host.stepper import HostStepper
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.decode.scoring import ScoredRows
from specbuild.runtime.draft.choice import require_shape
from specbuild.runtime.draft.drafter import CachingDrafter, Drafter
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    FixedPolicy,
)
from specbuild.runtime.draft.registry import AUTO, NONE
from specbuild.runtime.draft.tree import check_shape
from specbuild.runtime.engine_dir.cache_groups import slots_per_sequence
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.manifest_check import DECODING_ROLES
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.request import Request
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings
from specbuild.runtime.statistics import StepClock


class HostDecoder(Decoder):
    """Creates loops over host steps. ``cost_file`` stores measured costs between runs."""

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        kv: KvPools,
        settings: RuntimeSettings,
        *,
        prefixes: PrefixCache | None = None,
        cost_file: Path | None = None,
    ) -> None:
        super().__init__(manifest, kv, settings, prefixes)
        self._executor = executor
        limits = manifest.limits
        self._counter = SlotCounter(slots_per_sequence(limits) + limits.max_rows + 1)
        self._drafting = HostDrafting(executor, manifest, kv, self._counter, cost_file=cost_file)
        self._last: DraftPolicy | None = None
        self._clock = StepClock()

    @property
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run with ``speculation="default"``."""
        if self._last is not None:
            return self._last
        with self.device_lock:
            return self._default_policy(AUTO, full_logits=False)

    @property
    def clock(self) -> StepClock:
        """Time spent drafting and verifying in all steps so far."""
        return self._clock

    @property
    def host_statistics(self) -> Mapping[str, Any]:
        """Return the counters of the host drafters in use, by kind."""
        return self._drafting.host_statistics

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:  # noqa: ARG002
        """Raise RequestError if this draft is not available."""
        if setting.speculation is None:
            return
        self._check_named(setting)
        if setting.custom_drafter is not None:
            self._check_drafter(setting.custom_drafter, setting.speculation)
        elif isinstance(setting.speculation, DraftShape):
            require_shape(setting.speculation, self._manifest)
            assert isinstance(setting.drafter, str)
            self._drafting.require(setting.drafter, setting.speculation)

    def loop(
        self,
        setting: DraftSetting,
        *,
        text_stream: TextStreams,
        prefill: PrefillSchedule | None = None,
    ) -> Loop:
        """Create a loop over host steps. The first loop with a default draft measures its costs."""
        self._executor.prepare(DECODING_ROLES)
        policy, drafter = self._policy(setting), setting.custom_drafter
        drafter_name = setting.drafter if isinstance(setting.drafter, str) else NONE
        proposer = None
        if setting.speculation == "default" and drafter_name != NONE:
            proposer = self._drafting.proposer(drafter_name)
        if policy.max_depth == 0:
            drafter = None
        elif drafter is None:
            drafter = self._drafting.drafter(drafter_name, fixed=setting.speculation != "default")
        prefixes = self._lookup(drafter)
        stepper = HostStepper(
            self._executor,
            self._manifest,
            self._counter,
            drafter=drafter,
            max_depth=policy.max_depth,
            proposer=proposer,
            clock=self._clock,
            snapshots=None if prefixes is None else prefixes.cache.snapshots,
        )
        scheduler = Scheduler(
            self._manifest.limits,
            self._kv,
            prefill=self._prefill if prefill is None else prefill,
            max_step_tokens=self._max_step_tokens(policy),
            invariant_rows=self._executor.capabilities.invariant_rows,
            prefixes=prefixes,
        )
        return self._loop(stepper, scheduler, policy, text_stream)

    def _lookup(self, drafter: Drafter | None) -> PrefixLookup | None:
        """The prefix cache for loops with this drafter; None if it must observe all tokens."""
        groups = drafter.cache_groups if isinstance(drafter, CachingDrafter) else ()
        needs_all = drafter is not None and drafter.capabilities.reads_aux_hidden and not groups
        if self._prefixes is None or needs_all:
            return None
        return PrefixLookup(self._prefixes, groups)

    def _score_rows(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        self._executor.prepare(DECODING_ROLES)
        return score_on_host(
            ids,
            self._executor,
            self._manifest,
            self._kv,
            self._counter,
            prompt_tokens=prompt_tokens,
        )

    def _default_policy(self, drafter: str, *, full_logits: bool) -> DraftPolicy:
        self._last = self._drafting.policy(self._learned, drafter, full_logits=full_logits)
        return self._last

    def _policy(self, setting: DraftSetting) -> DraftPolicy:
        speculation, drafter = setting.speculation, setting.custom_drafter
        if speculation is None or drafter is None:
            return self._engine_policy(setting)
        shape = self._check_drafter(drafter, speculation)
        depth, name = self._manifest.limits.draft_depth, drafter.capabilities.name
        return FixedPolicy(shape, max_depth=depth, reason=f"requested {name}")

    def _check_drafter(self, drafter: Drafter, speculation: DraftShape | str) -> DraftShape:
        """Return the custom drafter's shape; RequestError if it cannot serve this engine."""
        name = drafter.capabilities.name
        if "accept" not in self._manifest.roles:
            raise RequestError(f"drafter {name}: the engine was built without a draft's graphs")
        if drafter.capabilities.samples:
            raise RequestError(
                f"drafter {name} samples its drafts; only deterministic ones are supported"
            )
        shape = speculation if isinstance(speculation, DraftShape) else self._manifest.draft_default
        if shape is None:
            raise RequestError(f"drafter {name}: the engine has no default shape; pass one")
        check_shape(shape, self._manifest.limits)
        return shape
