"""The drafters of an engine on the host, their costs and their policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.decode.host.cost_file import load_or_measure
from specbuild.runtime.decode.host.costs import CannotMeasureError, CostMeasurement
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.draft.costs import ChainCosts, ChainsByModel, DraftCosts
from specbuild.runtime.draft.draft_models import DraftModels
from specbuild.runtime.draft.drafter import CachingDrafter, Drafter, DrafterParts, HostDrafter
from specbuild.runtime.draft.host_proposal import HostProposer
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    default_policy,
    no_draft_policy,
)
from specbuild.runtime.draft.proposal_policy import ProposalPolicy, ProposalTimes
from specbuild.runtime.draft.registry import kind_of, open_host_drafter, sources
from specbuild.runtime.draft.sequence_policy import LearnedPolicies
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord, ModelRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.manifest_check import TREE_ROLES
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import Executor


class HostDrafting:
    """Creates an engine's drafters on first use.

    The suffix drafter is created once, since it learns from all texts. Draft models are created for
    every loop. ``cost_file`` stores measured cost tables between runs.
    """

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        kv: KvPools,
        counter: SlotCounter,
        *,
        cost_file: Path | None,
    ) -> None:
        self._executor, self._manifest, self._kv = executor, manifest, kv
        self._counter = counter
        self._cost_file = cost_file
        self._tables: dict[str, tuple[CostTable, str]] = {}
        self._times: dict[str, ProposalTimes] = {}
        self._host_drafters: dict[str, HostDrafter] = {}

    @property
    def host_statistics(self) -> Mapping[str, Any]:
        """Return the counters of the host drafters in use, by kind."""
        return {kind: drafter.statistics for kind, drafter in self._host_drafters.items()}

    def drafter(self, name: str, *, fixed: bool = False) -> Drafter | None:
        """Return the drafter of this name, None without one, and load the graphs that verify.

        If the engine has several models, it combines all of them, or uses the first if every step
        has a ``fixed`` shape.
        """
        models, _ = sources(self._manifest, name)
        selected = models[:1] if fixed else models
        roles = [role for model in selected for role in model.roles]
        self._executor.prepare((*roles, *TREE_ROLES))
        if not selected:
            return self._host_drafter(name)
        drafters: dict[str, CachingDrafter] = {
            model.kind: self._create_drafter(model) for model in selected
        }
        return DraftModels(drafters) if len(drafters) > 1 else drafters[selected[0].kind]

    def proposer(self, name: str) -> HostProposer | None:
        """Return the drafter of this name that proposes tokens before each step, or None."""
        return self._host_drafter(name)

    def policy(self, learned: LearnedPolicies, name: str, *, full_logits: bool) -> DraftPolicy:
        """Create the policy that selects the fastest drafter of this name, by measured costs."""
        models, host_record = sources(self._manifest, name)
        records: tuple[DrafterRecord, ...] = models or ((host_record,) if host_record else ())
        if not records:
            # A step without a draft verifies the tokens that guides force, if the engine has the
            # roles for it.
            verifies = set(TREE_ROLES) <= self._manifest.roles.keys()
            return no_draft_policy(max_depth=self._manifest.limits.draft_depth if verifies else 0)
        try:
            tables = {record.kind: self._cost_table(record) for record in records}
        except CannotMeasureError as error:
            return default_policy(self._manifest, str(error))
        limits, kinds = self._manifest.limits, "+".join(tables)
        table, origin = tables[records[0].kind]
        costs: DraftCosts
        if len(models) > 1:
            depths = {m.kind: limits.levels_of(m.geometry) for m in models}
            costs = ChainsByModel({k: (tables[k][0], depths[k]) for k in depths}, origin=origin)
        else:
            depth = limits.levels_of(models[0].geometry) if models else 0
            costs = ChainCosts(table, max_depth=depth, origin=origin)
        policy = learned.next(costs, full_logits=full_logits, drafter=kinds)
        if host_record is None:
            return policy
        if kinds not in self._times:
            max_rows = limits.max_batch_size * (1 + host_record.max_tokens)
            self._times[kinds] = ProposalTimes(table, max_rows)
        return ProposalPolicy(policy, self._times[kinds], max_chain=host_record.max_tokens)

    def require(self, name: str, shape: DraftShape) -> None:
        """Raise RequestError if the drafter of this name cannot draft such a tree."""
        models, host_record = sources(self._manifest, name)
        model = next(iter(models), None)
        record = model or host_record
        if record is None:
            return
        max_levels = self._manifest.limits.levels_of(record.geometry)
        if shape.draft_top_k > 1 and not kind_of(record).capabilities.branches:
            raise RequestError(
                f"draft_top_k is {shape.draft_top_k}, but drafter {record.kind} proposes only "
                "chains; set it to 1"
            )
        if isinstance(shape, StaticTree) and model is not None:
            limits = self._manifest.limits
            inner, capacity = len(shape.inner), limits.draft_top_k * max(limits.draft_depth - 1, 0)
            if kind_of(model).capabilities.passes == "levels" and inner > capacity:
                raise RequestError(
                    f"the draft tree has {inner} nodes with children, the engine's draft supports "
                    f"{capacity}; use fewer, or build with a larger draft"
                )
        if model is not None and shape.draft_depth > max_levels:
            raise RequestError(
                f"draft_depth is {shape.draft_depth}, but drafter {model.kind} has {max_levels} "
                "levels; use a smaller depth"
            )

    def _create_drafter(self, record: ModelRecord) -> CachingDrafter:
        parts = DrafterParts(self._executor, self._manifest, self._counter, record)
        drafter = kind_of(record).make(parts)
        assert isinstance(drafter, CachingDrafter)
        return drafter

    def _host_drafter(self, name: str) -> HostDrafter | None:
        """Return the host drafter of this name. It is created once and keeps what it learned."""
        _, record = sources(self._manifest, name)
        if record is None:
            return None
        self._executor.prepare(TREE_ROLES)
        if record.kind not in self._host_drafters:
            self._host_drafters[record.kind] = open_host_drafter(record)
        return self._host_drafters[record.kind]

    def _cost_table(self, record: DrafterRecord) -> tuple[CostTable, str]:
        """Return the cost table of a drafter and its origin. It is measured on first use.

        Raises CannotMeasureError if there is no capacity now; a later call may succeed.
        """
        entry = self._tables.get(record.kind)
        if entry is None:
            file = self._cost_file
            if file is not None:
                file = file.with_stem(f"{file.stem}-{record.kind}")
            _, host_record = sources(self._manifest, "auto")
            measurement = CostMeasurement(
                self._executor,
                self._manifest,
                self._kv,
                record,
                max_rows=1 if host_record is None else 1 + host_record.max_tokens,
            )
            entry = self._tables[record.kind] = load_or_measure(file, measurement.run)
        return entry
