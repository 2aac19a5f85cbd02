"""Creates loops over step programs, which keep their state on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache, PrefixLookup
from specbuild.runtime.decode.decoder import Decoder, DraftSetting
from specbuild.runtime.decode.device.preparation import likely_programs
from specbuild.runtime.decode.device.program_costs import ProgramCosts, ProposalCosts
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.proposals import DeviceProposals
from specbuild.runtime.decode.device.scoring import score_on_device
from specbuild.runtime.decode.device.stepper import DeviceStepper
from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.decode.scoring import ScoredRows
from specbuild.runtime.draft.choice import require_shape
from specbuild.runtime.draft.device_costs import StepCosts, prior_costs
from specbuild.runtime.draft.draft_models import ModelShape, model_of, shape_of, shape_text
from specbuild.runtime.draft.drafter import HostDrafter
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    no_draft_policy,
)
from specbuild.runtime.draft.proposal_policy import ProposalPolicy, UnmeasuredProposals
from specbuild.runtime.draft.registry import AUTO, kind_of, open_host_drafter, sources
from specbuild.runtime.draft.sequence_policy import LearnedPolicies
from specbuild.runtime.draft.static_tree import PlacedTree, StaticTree
from specbuild.runtime.engine_dir.cache_groups import SNAPSHOT_STEP
from specbuild.runtime.engine_dir.drafters.record import ModelRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import TREE_FORM
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import GenerateParams, Request
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

# Share of the time that exploration may cost, with step times that were measured on this kind of
# GPU, and without them for each draft model.
MEASURED_SHARE = 0.005
UNMEASURED_SHARE = 0.01


class DeviceDecoder(Decoder):
    """Creates loops over device steps, one at a time: the device keeps one set of sequences.

    ``step_costs`` were measured on this GPU. The default draft is selected by them before every
    step. Without them it is selected by the times of the run's own steps, and ``without_costs``
    states the reason.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        manifest: Manifest,
        kv: KvPools,
        settings: RuntimeSettings,
        *,
        prefixes: PrefixCache | None = None,
        step_costs: StepCosts | None = None,
        without_costs: str = "no step costs were measured",
    ) -> None:
        super().__init__(manifest, kv, settings, prefixes)
        self._executor = executor
        self._programs = ProgramTable(executor.plan)
        self._step_costs = step_costs if manifest.drafters else None
        self._learned_unmeasured = LearnedPolicies()
        self._without_costs = without_costs
        self._proposal_costs: dict[bool, ProposalCosts] = {}
        self._host_drafters: dict[str, HostDrafter] = {}
        self._last: DraftPolicy | None = None

    @property
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run with ``speculation="default"``."""
        return self._last or self._default_policy(AUTO, full_logits=False)

    @property
    def host_statistics(self) -> Mapping[str, Any]:
        """Return the counters of the host drafters in use, by kind."""
        return {kind: drafter.statistics for kind, drafter in self._host_drafters.items()}

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """Raise RequestError if the draft is not available, or no steps serve the requests."""
        self._check_sampling(requests)
        self._check_named(setting)
        if setting.custom_drafter is not None:
            raise RequestError(
                f"drafter {setting.custom_drafter.capabilities.name}: this engine drafts on the "
                "device and supports only its own drafts"
            )
        shape = self._fixed_shape(self._with_model(setting))
        if shape is not None and not isinstance(shape, PlacedTree):
            self._check_shape(shape)
        full_logits = self._full_logits([request.params for request in requests])
        if self._programs.max_sequences(shape, full_logits=full_logits) == 0:
            raise RequestError(
                "the engine has no steps with full logits, which top-k and top-p need; omit them, "
                "or build the engine with such steps"
            )

    def preparation(self, setting: DraftSetting, params: GenerateParams) -> Iterator[None]:
        """See :class:`Decoder`."""
        setting = self._with_model(setting)
        shapes: list[DraftShape | None] = [self._fixed_shape(setting)]
        host_record = None
        if setting.speculation == "default" and isinstance(setting.drafter, str):
            models, host_record = sources(self._manifest, setting.drafter)
            shapes += self._shapes_of(models)
        first, later = likely_programs(
            self._programs,
            shapes,
            full_logits=self._full_logits([params]),
            extends=len(shapes) > 1,
            host_chains=host_record is not None,
        )
        if params.adjusts_steps is not None and self._programs.has_processor_steps:
            first.append(self._programs.first_token_processor)
        self._executor.use()
        for entry in first:
            self._executor.prepare(entry)
        for entry in later:
            yield
            # The thread that continues may be another one, without a current GPU.
            self._executor.use()
            self._executor.prepare(entry)

    def loop(
        self,
        setting: DraftSetting,
        *,
        text_stream: TextStreams,
        prefill: PrefillSchedule | None = None,
    ) -> Loop:
        """Create a loop over device steps."""
        setting = self._with_model(setting)
        policy = self._engine_policy(setting)
        stepper = DeviceStepper(
            self._executor,
            self._manifest,
            self._programs,
            drafts=policy.max_depth > 0,
            proposals=self._device_proposals(setting),
            snapshots=None if self._prefixes is None else self._prefixes.snapshots,
        )
        if isinstance(setting.speculation, PlacedTree):
            stepper.tree = setting.speculation
        # If a policy can choose between shapes, the limit is that of steps without a draft.
        shape = self._fixed_shape(setting)
        scheduler = Scheduler(
            replace(self._manifest.limits, max_rows=self._programs.prefill_rows),
            self._kv,
            prefill=self._prefill if prefill is None else prefill,
            max_step_tokens=self._max_step_tokens(policy),
            max_sequences=lambda requests: self._programs.max_sequences(
                shape, full_logits=self._full_logits([request.params for request in requests])
            ),
            prefixes=self._lookup(),
            prompt_step=SNAPSHOT_STEP if self._manifest.state_groups else 1,
        )
        return self._loop(stepper, scheduler, policy, text_stream)

    def _lookup(self) -> PrefixLookup | None:
        """The prefix cache. Prompts enter the caches of all drafts, whichever draft steps use."""
        if self._prefixes is None:
            return None
        return PrefixLookup(self._prefixes, [model.cache_group for model in self._manifest.models])

    def _check_sampling(self, requests: Sequence[Request]) -> None:
        """Raise RequestError if the engine has no programs for a sampling parameter."""
        lossy = self._manifest.specpv is not None or self._manifest.dsa is not None
        for params in (request.params for request in requests):
            name = None if self._programs.has_processor_steps else params.adjusts_steps
            if params.sampling.floor < 0 and self._executor.port("floor") is None:
                name = "min_p"
            if name is not None:
                rest = "build one without SpecPV and DSA" if lossy else "rebuild the engine"
                raise RequestError(
                    f"this engine has no programs for {name}: omit it, or {rest}",
                    field=name,
                )

    def _full_logits(self, of_each: Sequence[GenerateParams]) -> bool:
        """Return whether the ordinary steps of requests with these parameters need full logits."""
        if self._manifest.drafted_logit_processors:
            return any(p.needs_full_logits or p.adjusts_steps is not None for p in of_each)
        ordinary = [p for p in of_each if not p.adjusts_steps or p.only_guided]
        return any(params.needs_full_logits for params in ordinary)

    def _score_rows(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        if prompt_tokens < len(ids):
            raise RequestError("this engine scores all tokens by prefill: omit prompt_tokens")
        return score_on_device(ids, self._executor, self._manifest, self._kv)

    def _device_proposals(self, setting: DraftSetting) -> DeviceProposals | None:
        """Return what proposes chains before each step: a host drafter, or guides alone."""
        if setting.speculation != "default" or not isinstance(setting.drafter, str):
            return None
        if not self._programs.max_host_chain:
            return None
        _, record = sources(self._manifest, setting.drafter)
        drafter = None
        if record is not None:
            if record.kind not in self._host_drafters:
                self._host_drafters[record.kind] = open_host_drafter(record)
            drafter = self._host_drafters[record.kind]
        return DeviceProposals(drafter, self._executor, self._programs)

    def _default_policy(self, drafter: str, *, full_logits: bool) -> DraftPolicy:
        models, host_record = sources(self._manifest, drafter)
        kinds = [record.kind for record in (models or (host_record,)) if record is not None]
        costs, max_chain = self._step_costs, self._programs.max_host_chain
        policy: DraftPolicy
        if costs is None or not kinds:
            policy = self._unmeasured(models, full_logits=full_logits)
            if max_chain:
                policy = UnmeasuredProposals(policy, max_chain=max_chain)
        else:
            names = [self._name_of(model) for model in models]
            policy = measured = self._learned.next(
                ProgramCosts(costs, self._programs, full_logits=full_logits, models=names),
                full_logits=full_logits,
                drafter="+".join(kinds),
                exploration_share=MEASURED_SHARE,
            )
            if max_chain:
                proposals = self._proposal_costs.setdefault(
                    full_logits, ProposalCosts(costs, self._programs, full_logits=full_logits)
                )
                policy = ProposalPolicy(measured, proposals, max_chain=max_chain)
        self._last = policy
        return policy

    def _unmeasured(self, models: Sequence[ModelRecord], *, full_logits: bool) -> DraftPolicy:
        """Create the default policy without measured costs: it learns from the run's own steps."""
        names = [self._name_of(model) for model in models]
        shapes = self._shapes_of(models)
        if not shapes:
            return no_draft_policy()
        costs = ProgramCosts(
            prior_costs(shapes, batch=self._manifest.limits.max_batch_size),
            self._programs,
            full_logits=full_logits,
            models=names,
            origin=f"measured while decoding ({self._without_costs})",
        )
        return self._learned_unmeasured.next(
            costs,
            full_logits=full_logits,
            drafter="+".join(names),
            exploration_share=UNMEASURED_SHARE * len(names),
        )

    def _shapes_of(self, models: Sequence[ModelRecord]) -> list[DraftShape]:
        """Return the shapes of these models that have step programs, ragged ones last."""
        names = [self._name_of(model) for model in models]
        every = (*self._programs.shapes(), *self._programs.ragged_shapes())
        return [shape for shape in every if model_of(shape) in names]

    def _name_of(self, model: ModelRecord) -> str:
        """Return the name of a draft model in shapes; empty if the engine has a single model."""
        return model.kind if len(self._manifest.models) > 1 else ""

    def _with_model(self, setting: DraftSetting) -> DraftSetting:
        """Add the draft model to a setting's shape: the named one, or the first for ``auto``.

        A tree of fixed form gets the shape of the programs that draft it.
        """
        shape, drafter = setting.speculation, setting.drafter
        if not isinstance(shape, DraftShape) or not isinstance(drafter, str):
            return setting
        if isinstance(shape, PlacedTree | ModelShape):
            return setting
        models, _ = sources(self._manifest, drafter)
        name = self._name_of(models[0]) if models else ""
        if isinstance(shape, StaticTree):
            require_shape(shape, self._manifest)
            return replace(setting, speculation=self._placed(shape, models[0] if models else None))
        return replace(setting, speculation=shape_of(name, shape))

    def _placed(self, tree: StaticTree, model: ModelRecord | None) -> DraftShape:
        """Return a tree of fixed form in the smallest programs that draft it.

        Raises RequestError if there are none.
        """
        name = "" if model is None else self._name_of(model)
        if tree.draft_top_k == 1:
            return shape_of(name, DraftShape(1, tree.draft_depth, tree.draft_tokens))
        by_levels = model is not None and kind_of(model).capabilities.passes == "levels"
        shapes: list[DraftShape] = []
        if by_levels and self._executor.port(TREE_FORM) is not None:
            shapes = [s for s in self._programs.shapes() if model_of(s) == name]
        placed = [p for s in shapes if s.draft_top_k > 1 and (p := tree.placed(s)) is not None]
        if not placed:
            available = ", ".join(shape_text(s) for s in shapes if s.draft_top_k > 1) or "none"
            raise RequestError(
                f"the engine has no steps for the draft tree {shape_text(tree)} (top-k x depth x "
                f"tokens); its draft grows trees of {available} level by level, with at most "
                "top-k nodes with children on a level; use a smaller tree, or build the engine "
                "with a larger draft"
            )
        return min(placed, key=lambda p: (p.program.draft_tokens, p.program.draft_depth))

    def _fixed_shape(self, setting: DraftSetting) -> DraftShape | None:
        """Return the shape of every step; None for no draft, or if shapes may differ."""
        return None if setting.speculation == "default" else setting.speculation

    def _check_shape(self, shape: DraftShape) -> None:
        require_shape(shape, self._manifest)
        self._programs.check_shape(shape)
