"""Decodes with graphs that the host calls by role, and measures what drafting costs there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixLookup
from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.decode.cost_file import load_or_measure
from specbuild.runtime.decode.decoder import Decoder, DraftSetting
from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.host_costs import CannotMeasureError, CostMeasurement
from specbuild.runtime.decode.host_scoring import host_scored
from specbuild.runtime.decode.host_stepper import HostStepper
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler, Turns
from specbuild.runtime.decode.scoring import ScoredRows
from specbuild.runtime.draft.choice import require_shape
from specbuild.runtime.draft.costs import ChainCosts
from specbuild.runtime.draft.drafter import Drafter, DrafterParts
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    FixedPolicy,
    default_policy,
    undrafted,
)
from specbuild.runtime.draft.registry import AUTO, drafter_named, kind_of
from specbuild.runtime.draft.tree import check_shape
from specbuild.runtime.engine_dir.cache_groups import slots_per_sequence
from specbuild.runtime.engine_dir.manifest import Drafter as DrafterRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.manifest_check import DECODING_ROLES, TREE_ROLES
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.request import Request


class HostDecoder(Decoder):
    """``cost_file`` keeps the measured cost table between runs, if given."""

    def __init__(
        self, executor: Executor, manifest: Manifest, kv: KvPools, *, cost_file: Path | None = None
    ) -> None:
        super().__init__(manifest, kv)
        self._executor = executor
        self._cost_file = cost_file
        self._costs: dict[str, ChainCosts] = {}
        limits = manifest.limits
        self._counter = SlotCounter(slots_per_sequence(limits) + limits.max_rows + 1)

    @property
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run with ``speculation="default"``."""
        if self._measured.last is not None:
            return self._measured.last
        with self.machine:
            return self._default_policy(AUTO, sampled=False, full_logits=False)

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:  # noqa: ARG002
        """RequestError where a draft cannot be had."""
        if setting.speculation is None:
            return
        self._check_named(setting)
        if setting.foreign is not None:
            self._check_drafter(setting.foreign, setting.speculation)
        elif isinstance(setting.speculation, DraftShape):
            require_shape(setting.speculation, self._manifest)

    def loop(
        self, setting: DraftSetting, *, text_stream: TextStreams, turns: Turns | None = None
    ) -> Loop:
        """A loop over steps of the host; the first one with a default draft measures its costs."""
        self._executor.prepare(DECODING_ROLES)
        policy, drafter = self._policy(setting), setting.foreign
        if policy.max_depth == 0:
            drafter = None
        elif drafter is None:
            drafter = self._own_drafter(setting)
        stepper = HostStepper(
            self._executor,
            self._manifest,
            self._counter,
            drafter=drafter,
            max_depth=policy.max_depth,
        )
        scheduler = Scheduler(
            self._manifest.limits,
            self._kv,
            turns=self.turns if turns is None else turns,
            most_emitted=self._most_emitted(policy),
            invariant_rows=self._executor.capabilities.invariant_rows,
        )
        # Another drafter must see every token's features itself.
        drafted = drafter is not None and drafter.capabilities.uses_draft_caches
        if self.prefixes is not None and (
            drafter is None or drafted or not drafter.capabilities.reads_aux_hidden
        ):
            scheduler.prefixes = PrefixLookup(self.prefixes, drafted)
        return self._loop(stepper, scheduler, policy, text_stream)

    def _scored(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        self._executor.prepare(DECODING_ROLES)
        return host_scored(
            ids,
            self._executor,
            self._manifest,
            self._kv,
            self._counter,
            prompt_tokens=prompt_tokens,
        )

    def _default_policy(self, drafter: str, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        record = drafter_named(self._manifest, drafter)
        if record is None:
            return undrafted()
        try:
            costs = self._costs_of(record)
        except CannotMeasureError as error:
            return default_policy(self._manifest, str(error))
        return self._measured.next(
            costs, sampled=sampled, full_logits=full_logits, drafter=record.kind
        )

    def _costs_of(self, record: DrafterRecord) -> ChainCosts:
        """What a drafter's chains cost by its table, which is measured on first use.

        Raises CannotMeasureError where there is no capacity now; a later use tries again.
        """
        known = self._costs.get(record.kind)
        if known is None:
            limits, file = self._manifest.limits, self._cost_file
            if file is not None:
                file = file.with_stem(f"{file.stem}-{record.kind}")
            measurement = CostMeasurement(self._executor, self._manifest, self._kv, record)
            table, origin = load_or_measure(file, measurement.run)
            depth = min(limits.draft_depth, limits.draft_tokens)
            known = self._costs[record.kind] = ChainCosts(table, max_depth=depth, origin=origin)
        return known

    def _policy(self, setting: DraftSetting) -> DraftPolicy:
        speculation, drafter = setting.speculation, setting.foreign
        if speculation is None or drafter is None:
            return self._own_policy(setting)
        shape = self._check_drafter(drafter, speculation)
        depth, name = self._manifest.limits.draft_depth, drafter.capabilities.name
        return FixedPolicy(shape, max_depth=depth, reason=f"asked for {name}")

    def _own_drafter(self, setting: DraftSetting) -> Drafter:
        """The engine's drafter that requests ask for, its graphs made ready."""
        assert isinstance(setting.drafter, str)
        record = drafter_named(self._manifest, setting.drafter)
        assert record is not None, "a policy that drafts is an engine's with a drafter"
        self._executor.prepare((*record.roles, *TREE_ROLES))
        parts = DrafterParts(self._executor, self._manifest, self._counter, record)
        return kind_of(record).make(parts)

    def _check_drafter(self, drafter: Drafter, speculation: DraftShape | str) -> DraftShape:
        """The shape to ask a drafter for; RequestError where it cannot serve."""
        name = drafter.capabilities.name
        if "accept" not in self._manifest.roles:
            raise RequestError(f"drafter {name}: the engine was built without a draft's graphs")
        if drafter.capabilities.samples:
            raise RequestError(f"drafter {name} samples its drafts; only fixed drafts are accepted")
        shape = speculation if isinstance(speculation, DraftShape) else self._manifest.draft_default
        if shape is None:
            raise RequestError(f"drafter {name}: the engine names no default shape; give one")
        check_shape(shape, self._manifest.limits)
        return shape
