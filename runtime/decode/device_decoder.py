"""Decodes with programs whose state stays on the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.decoder import DraftSetting, Speculation
from specbuild.runtime.decode.device_rows import DeviceRows
from specbuild.runtime.decode.device_stepper import DeviceStepper
from specbuild.runtime.decode.emission import Emission, TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.prefill_rows import PromptRows, launched_rows
from specbuild.runtime.decode.program_costs import ProgramCosts
from specbuild.runtime.decode.program_table import ProgramTable
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.draft.choice import PolicyByKind, asked_for, require_shape
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    LearnedPolicies,
    default_policy,
)
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import GenerateParams, Request, SequenceState
from specbuild.runtime.sampling import needs_full_logits
from specbuild.runtime.statistics import RunCounters

# The table was measured on this kind of GPU: rare steps without a draft suffice to check it.
PLAIN_INTERVAL = 256


@dataclass(frozen=True)
class ScoredRows:
    """What the target says behind tokens ``first …`` of a sequence.

    ``logits`` fp32 [n, V]; ``aux_hidden`` [n, C], the features that a draft reads, as bf16 bit
    patterns, None in an engine without a draft.
    """

    first: int
    logits: np.ndarray
    aux_hidden: np.ndarray | None


class DeviceDecoder:
    """One loop at a time: the device keeps one set of sequences.

    ``step_costs`` are those of this GPU: by them the default draft is chosen before every step.
    Without them it is the engine's default shape, and ``without_costs`` is the reason.
    """

    def __init__(
        self,
        executor: DeviceExecutor,
        manifest: Manifest,
        kv: KvPools,
        *,
        step_costs: StepCosts | None = None,
        without_costs: str = "no step costs were measured",
    ) -> None:
        self._executor = executor
        self._manifest = manifest
        self._kv = kv
        self._programs = ProgramTable(executor.plan)
        self._step_costs = step_costs if manifest.draft is not None else None
        self._fixed = default_policy(manifest, without_costs)
        self._measured = LearnedPolicies()
        self.machine = threading.Lock()

    @property
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run by step costs, or the engine's default shape."""
        return self._measured.last or self._default_policy(sampled=False, full_logits=False)

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """RequestError where a draft cannot be had, or there are no steps for what is asked."""
        if setting.drafter is not None:
            raise RequestError(
                f"drafter {setting.drafter.capabilities.name}: this engine drafts on the device, "
                "with its own draft only"
            )
        shape = self._only_shape(setting.speculation)
        if shape is not None:
            self._check(shape)
        full_logits = needs_full_logits(request.params.sampling for request in requests)
        if self._programs.most_sequences(shape, full_logits=full_logits) == 0:
            raise RequestError(
                "the engine has no steps with full logits, as top-k and top-p need them; leave "
                "them out, or build the engine with such steps"
            )

    def loop(self, setting: DraftSetting, *, text_stream: TextStreams) -> Loop:
        """A loop over the device's steps."""
        policy = self._policy(setting.speculation)
        stepper = DeviceStepper(
            self._executor, self._manifest, self._programs, drafts=policy.max_depth > 0
        )
        # A policy that may leave the draft out does so where only such steps are large enough.
        shape = self._only_shape(setting.speculation)
        scheduler = Scheduler(
            replace(self._manifest.limits, max_rows=self._programs.prefill_rows),
            self._kv,
            most_sequences=lambda requests: self._programs.most_sequences(
                shape, full_logits=needs_full_logits(r.params.sampling for r in requests)
            ),
        )
        emission = Emission(
            self._manifest.target.eos_token_ids,
            max_depth=policy.max_depth,
            text_stream=text_stream,
        )
        return Loop(stepper, scheduler, emission, policy)

    def score(self, ids: Sequence[int]) -> Iterator[ScoredRows]:
        """The target's logits behind every token of a sequence, with the kernels that decode.

        Raises RequestError where the sequence does not fit or the engine has no such program.
        """
        limit = self._manifest.limits.max_seq_len
        if not 1 <= len(ids) <= limit:
            raise RequestError(f"{len(ids)} tokens to score, the engine takes 1 to {limit}")
        return self._alone(self._score(ids))

    def _score(self, ids: Sequence[int]) -> Iterator[ScoredRows]:
        executor, logits = self._executor, self._executor.port("score.logits")
        entry = self._programs.score(rows=0 if logits is None else logits.shape[0])
        if entry is None or logits is None:
            raise RequestError("the engine has no program that scores; build it with one")
        executor.use()
        device_rows = DeviceRows(executor, [group.name for group in self._manifest.cache_groups])
        device_rows.clear(self._manifest.target.eos_token_ids)
        wanted = self._kv.pages_wanted(len(ids))
        if not self._kv.can_admit(wanted):
            raise RequestError(f"{len(ids)} tokens to score: no free cache pages")
        sequence = SequenceState(
            request=Request("score", tuple(ids), GenerateParams(), 1),
            index=0,
            ids=np.array([*ids, 0], np.int32),
            pages=self._kv.admit(wanted),
            counters=RunCounters(0),
            text=None,
            known=len(ids),
        )
        try:
            device_rows.admit(sequence)
            capacity = min(entry.rows, logits.shape[0])
            for start in range(0, len(ids), capacity):
                rows = PromptRows(0, sequence, start, min(capacity, len(ids) - start))
                yield self._scored(device_rows, rows)
        finally:
            self._kv.release(sequence.pages)

    def _scored(self, device_rows: DeviceRows, rows: PromptRows) -> ScoredRows:
        executor = self._executor
        entry = self._programs.score(rows=rows.count)
        port = executor.port("score.logit_rows")
        assert entry is not None and port is not None
        groups = [group.name for group in self._manifest.cache_groups]
        for name, values in launched_rows(
            [rows], entry, groups, drafted=device_rows.drafted
        ).items():
            executor.write(name, values)
        logit_rows = np.minimum(np.arange(port.shape[0], dtype=np.int32), rows.count - 1)
        executor.write(port.name, logit_rows)
        executor.start(entry)
        logits = executor.read("score.logits", rows=rows.count)
        drafted = executor.port("score.captured") is not None
        aux_hidden = executor.read("score.captured", rows=rows.count) if drafted else None
        return ScoredRows(rows.start, logits, aux_hidden)

    def _alone(self, rows: Iterator[ScoredRows]) -> Iterator[ScoredRows]:
        """Refuses while requests are being served; from then on they wait until this is read."""
        if not self.machine.acquire(blocking=False):
            raise RequestError("the engine is serving requests; score when they are done")
        try:
            yield from rows
        finally:
            self.machine.release()

    def _policy(self, speculation: Speculation) -> DraftPolicy:
        if speculation == "default":
            return PolicyByKind(
                lambda sampled, full_logits: self._default_policy(
                    sampled=sampled, full_logits=full_logits
                )
            )
        return asked_for(speculation)

    def _default_policy(self, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        if self._step_costs is None:
            return self._fixed
        costs = ProgramCosts(self._step_costs, self._programs, full_logits=full_logits)
        return self._measured.next(costs, sampled=sampled, plain_interval=PLAIN_INTERVAL)

    def _only_shape(self, speculation: Speculation) -> DraftShape | None:
        """The shape that every step will have; None also where steps may differ."""
        if speculation != "default":
            return speculation
        fixed = self._step_costs is None and self._manifest.draft is not None
        return self._manifest.draft_default if fixed else None

    def _check(self, shape: DraftShape) -> None:
        require_shape(shape, self._manifest)
        self._programs.check_shape(shape)
