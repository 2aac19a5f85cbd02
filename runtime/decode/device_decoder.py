"""Decodes with programs whose state stays on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixLookup
from specbuild.runtime.decode.decoder import Decoder, DraftSetting, Speculation
from specbuild.runtime.decode.device_stepper import DeviceStepper
from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.program_costs import ProgramCosts
from specbuild.runtime.decode.program_table import ProgramTable
from specbuild.runtime.decode.scheduler import Scheduler, Turns
from specbuild.runtime.decode.scoring import ScoredRows, scored
from specbuild.runtime.draft.choice import require_shape
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.draft.policy import DraftPolicy, default_policy
from specbuild.runtime.draft.registry import AUTO, drafter_named
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import Request


class DeviceDecoder(Decoder):
    """One loop at a time: the device keeps one set of sequences.

    ``step_costs`` are those of this GPU: by them the default draft is chosen before every step.
    Without them it is the engine's default shape, and ``without_costs`` is the reason.
    """

    # The table was measured on this kind of GPU: little is left to explore.
    explored_share = 0.005

    def __init__(
        self,
        executor: DeviceExecutor,
        manifest: Manifest,
        kv: KvPools,
        *,
        step_costs: StepCosts | None = None,
        without_costs: str = "no step costs were measured",
    ) -> None:
        super().__init__(manifest, kv)
        self._executor = executor
        self._programs = ProgramTable(executor.plan)
        self._step_costs = step_costs if manifest.draft is not None else None
        self._fixed = default_policy(manifest, without_costs)

    @property
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run by step costs, or the engine's default shape."""
        return self._measured.last or self._default_policy(AUTO, sampled=False, full_logits=False)

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """RequestError where a draft cannot be had, or there are no steps for what is asked."""
        self._check_sampling(requests)
        self._check_named(setting)
        if setting.foreign is not None:
            raise RequestError(
                f"drafter {setting.foreign.capabilities.name}: this engine drafts on the device, "
                "with its own draft only"
            )
        shape = self._only_shape(setting.speculation)
        if isinstance(shape, StaticTree):
            raise RequestError(
                "this engine's steps draft on the device, in shapes that it was built with: leave "
                "the draft tree out, or use an engine for cpu"
            )
        if shape is not None:
            self._check(shape)
        full_logits = self._full_logits(requests)
        if self._programs.most_sequences(shape, full_logits=full_logits) == 0:
            raise RequestError(
                "the engine has no steps with full logits, as top-k and top-p need them; leave "
                "them out, or build the engine with such steps"
            )

    def loop(
        self, setting: DraftSetting, *, text_stream: TextStreams, turns: Turns | None = None
    ) -> Loop:
        """A loop over the device's steps."""
        policy = self._own_policy(setting)
        stepper = DeviceStepper(
            self._executor, self._manifest, self._programs, drafts=policy.max_depth > 0
        )
        # A policy that may leave the draft out does so where only such steps are large enough.
        shape = self._only_shape(setting.speculation)
        scheduler = Scheduler(
            replace(self._manifest.limits, max_rows=self._programs.prefill_rows),
            self._kv,
            turns=self.turns if turns is None else turns,
            most_emitted=self._most_emitted(policy),
            most_sequences=lambda requests: self._programs.most_sequences(
                shape, full_logits=self._full_logits(requests)
            ),
        )
        if self.prefixes is not None:
            # Prompts enter the draft's cache too, whatever draft a step has.
            scheduler.prefixes = PrefixLookup(self.prefixes, self._manifest.draft is not None)
        return self._loop(stepper, scheduler, policy, text_stream)

    def _check_sampling(self, requests: Sequence[Request]) -> None:
        """RequestError names a parameter for which the engine has no programs."""
        lossy = self._manifest.specpv is not None or self._manifest.dsa is not None
        for params in (request.params for request in requests):
            name = None if self._programs.adjusts else params.adjusts_steps
            if params.sampling.floor < 0 and self._executor.port("floor") is None:
                name = "min_p"
            if name is not None:
                rest = "build one without SpecPV and DSA" if lossy else "build the engine again"
                raise RequestError(
                    f"{name} is not offered by this engine, which has no programs for it: leave it "
                    f"out, or {rest}",
                    field=name,
                )

    @staticmethod
    def _full_logits(requests: Sequence[Request]) -> bool:
        """Whether steps that these requests share need logits; those apart have their own."""
        together = [p for p in (r.params for r in requests) if not p.adjusts_steps or p.only_guided]
        return any(params.needs_full_logits for params in together)

    def _scored(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        if prompt_tokens < len(ids):
            raise RequestError(
                "this engine scores tokens as a prompt reads them: leave prompt_tokens out"
            )
        return scored(ids, self._executor, self._manifest, self._kv)

    def _default_policy(self, drafter: str, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        if self._step_costs is None:
            return self._fixed
        costs = ProgramCosts(self._step_costs, self._programs, full_logits=full_logits)
        record = drafter_named(self._manifest, drafter)
        return self._measured.next(
            costs,
            sampled=sampled,
            full_logits=full_logits,
            drafter="" if record is None else record.kind,
        )

    def _only_shape(self, speculation: Speculation) -> DraftShape | None:
        """The shape that every step will have; None also where steps may differ."""
        if speculation != "default":
            return speculation
        fixed = self._step_costs is None and self._manifest.draft is not None
        return self._manifest.draft_default if fixed else None

    def _check(self, shape: DraftShape) -> None:
        require_shape(shape, self._manifest)
        self._programs.check_shape(shape)
