"""Selects the program of a launch: the smallest one of the plan that is large enough."""

from __future__ import annotations

from collections.abc import Collection

from specbuild.runtime.draft.draft_models import (
    RaggedShape,
    shape_of,
    shape_text,
    sorted_by_model,
)
from specbuild.runtime.draft.static_tree import PlacedTree
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import Plan, ProgramEntry
from specbuild.runtime.errors import EngineFileError, RequestError

_NO_DRAFT = DraftShape(0, 0, 0)


class ProgramTable:
    """The programs of a plan by purpose."""

    def __init__(self, plan: Plan) -> None:
        self._programs = [
            p
            for p in plan.programs
            if not (p.changes_logits or p.host_proposal or p.kind == "adjust")
        ]
        self._host_chain_steps = [p for p in plan.programs if p.host_proposal]
        self._processor_steps = sorted(
            (p for p in plan.programs if p.changes_logits), key=lambda program: program.batch
        )
        self._first_token_processor = next((p for p in plan.programs if p.kind == "adjust"), None)
        self._steps: dict[
            tuple[DraftShape, int, bool, bool, int | None, bool, bool], ProgramEntry
        ] = {}
        self._max_sequences: dict[tuple[DraftShape, bool], int] = {}
        self._refresh_capacities: dict[tuple[DraftShape | None, int], int] = {}
        self._chain_lengths: dict[tuple[int, bool], tuple[int, ...]] = {}
        self.prefill_rows = max((p.rows for p in plan.programs if p.kind == "prefill"), default=0)

    def shapes(self) -> list[DraftShape]:
        """Return every draft shape that has step programs, by draft model, smallest first."""
        drafted = (p for p in self._programs if p.kind == "step" and p.draft_depth)
        steps = (_shape(p) for p in drafted if not p.is_ragged)
        return sorted_by_model(steps, lambda s: (s.draft_top_k, s.draft_depth, s.draft_tokens))

    def ragged_shapes(self) -> list[DraftShape]:
        """Return the shapes that have ragged step programs, by draft model."""
        ragged = (_shape(p) for p in self._programs if p.is_ragged)
        return sorted_by_model(ragged, lambda s: (s.draft_depth,))

    def step_batches(self) -> list[int]:
        """Return the batch sizes of steps without a draft, ascending."""
        return sorted({p.batch for p in self._programs if p.kind == "step" and not p.draft_depth})

    def check_shape(self, shape: DraftShape) -> None:
        """Raise RequestError with the available shapes if this one is not among them."""
        if shape in self.shapes():
            return
        available = ", ".join(map(shape_text, self.shapes())) or "none"
        raise RequestError(
            f"the engine has no steps for the draft {shape_text(shape)} (top-k x depth x tokens); "
            f"it has {available}; use one of these, or build the engine with this one"
        )

    def max_sequences(self, shape: DraftShape | None, *, full_logits: bool) -> int:
        """Return the largest batch of the steps of this shape; 0 if there are none."""
        key = (_program_shape(shape), full_logits)
        if key not in self._max_sequences:
            steps = (p for p in self._programs if p.kind == "step" and _shape(p) == key[0])
            batches = (p.batch for p in steps if p.full_logits >= full_logits)
            self._max_sequences[key] = max(batches, default=0)
        return self._max_sequences[key]

    def min_sequences(self, shape: DraftShape | None) -> int:
        """Return the smallest batch for the steps of this shape: 1 unless they are ragged."""
        if not isinstance(shape, RaggedShape):
            return 1
        steps = (p.batch for p in self._programs if p.kind == "step" and _shape(p) == shape)
        return min(steps, default=1) // 2 + 1

    def step(
        self,
        shape: DraftShape | None,
        *,
        batch: int,
        full_logits: bool,
        extends: bool = False,
        reverified: int | None = None,
        sparse: bool = False,
        checks: bool = False,
    ) -> ProgramEntry:
        """Return the step program for ``batch`` sequences; shape None decodes without a draft.

        - ``extends``: the draft ingests its pending tokens.
        - ``reverified``: the step is a SpecPV refresh. It selects views, and re-verifies up to
          this many rows.
        - ``sparse``: rows may attend to the tokens that indexers select (DSA).
        - ``checks``: the selection is also compared with full attention (DSA).

        If no program does exactly this, one that can do more is used. Values on the device then
        select what each sequence does, and the results are bit-identical.
        """
        requested = _program_shape(shape)
        key = (requested, batch, full_logits, extends, reverified, sparse, checks)
        if key not in self._steps:
            candidates = [
                p
                for p in self._steps_with(requested, batch)
                if p.sparse >= sparse and p.checks >= checks and p.full_logits >= full_logits
                if reverified is None or p.reverified >= max(reverified, 1)
            ]
            if not candidates:
                what = f"steps of {batch} sequences with the draft {shape_text(requested)}"
                raise _missing(what, full_logits=full_logits)
            self._steps[key] = min(
                candidates,
                key=lambda p: (
                    p.extends != extends,
                    p.checks != checks,
                    (p.reverified > 0) != (reverified is not None),
                    p.sparse != sparse,
                    p.full_logits,
                    p.rows,
                    p.batch,
                ),
            )
        return self._steps[key]

    def _steps_with(self, shape: DraftShape, batch: int) -> list[ProgramEntry]:
        """Return the steps with this draft for at least this many sequences."""
        steps = (p for p in self._programs if p.kind == "step" and _shape(p) == shape)
        return [p for p in steps if p.batch >= batch]

    def host_chain_lengths(self, *, batch: int, full_logits: bool) -> tuple[int, ...]:
        """Return the mean lengths of host chains for which steps have rows, ascending.

        In a step that is not ragged all chains may be that long.
        """
        key = (batch, full_logits)
        if key not in self._chain_lengths:
            matching = (
                p
                for p in self._host_chain_steps
                if p.batch >= batch and p.full_logits >= full_logits
            )
            self._chain_lengths[key] = tuple(sorted({p.rows // p.batch - 1 for p in matching}))
        return self._chain_lengths[key]

    def host_chain_step(
        self, lengths: Collection[int], *, batch: int, full_logits: bool
    ) -> ProgramEntry:
        """Return the step for ``batch`` sequences and host chains of these lengths."""
        longest, rows = max(lengths), batch + sum(lengths)
        matching = [
            p
            for p in self._host_chain_steps
            if p.batch >= batch and p.draft_tokens >= longest and p.rows >= rows
        ]
        what = f"steps of {batch} sequences with host chains of {longest} tokens"
        return _smallest(matching, full_logits=full_logits, what=what)

    def host_chain_limits(self, *, batch: int, full_logits: bool) -> tuple[int, int]:
        """Return the most tokens of one host chain, and of all chains of a step; 0 for no step."""
        matching = [
            p for p in self._host_chain_steps if p.batch >= batch and p.full_logits >= full_logits
        ]
        # The step with the most rows has the longest chains.
        largest = max(matching, key=lambda p: (p.rows, p.draft_tokens), default=None)
        return (0, 0) if largest is None else (largest.draft_tokens, largest.rows - batch)

    @property
    def max_host_chain(self) -> int:
        """The longest host chain that a step verifies; 0 if none does."""
        return max((p.draft_tokens for p in self._host_chain_steps), default=0)

    @property
    def has_processor_steps(self) -> bool:
        """Whether the plan has logit-processor steps."""
        return self._first_token_processor is not None and bool(self._processor_steps)

    @property
    def processor_steps_extend(self) -> bool:
        """Whether the draft can ingest pending tokens in logit-processor steps."""
        return any(p.extends for p in self._processor_steps)

    def processor_step(self, batch: int, *, extends: bool = False) -> ProgramEntry:
        """Return the logit-processor step for ``batch`` sequences."""
        candidates = [p for p in self._processor_steps if p.batch >= batch and p.extends == extends]
        return _smallest(
            candidates, full_logits=True, what=f"logit-processor steps of {batch} sequences"
        )

    @property
    def first_token_processor(self) -> ProgramEntry:
        """The program that applies logit processors to the first token after prefill."""
        assert self._first_token_processor is not None, "requests that need it are refused"
        return self._first_token_processor

    def refresh_capacity(self, shape: DraftShape | None, *, batch: int) -> int:
        """Return how many rows a step of ``batch`` sequences can re-verify (SpecPV)."""
        key = (shape, batch)
        if key not in self._refresh_capacities:
            matching = self._steps_with(shape or _NO_DRAFT, batch)
            checking = [p for p in matching if p.checks]
            self._refresh_capacities[key] = max(p.reverified for p in checking or matching)
        return self._refresh_capacities[key]

    def prefill(self, *, rows: int, batch: int, full_logits: bool) -> ProgramEntry:
        """Return the prefill program for this many rows, of sequences in rows below ``batch``."""
        candidates = [
            p for p in self._programs if p.kind == "prefill" and p.rows >= rows and p.batch >= batch
        ]
        what = f"prompt chunks of {rows} rows and {batch} sequences"
        return _smallest(candidates, full_logits=full_logits, what=what)

    def prefills(self) -> list[ProgramEntry]:
        """Return every prefill program, the smallest first."""
        return sorted((p for p in self._programs if p.kind == "prefill"), key=lambda p: p.rows)

    def score(self, *, rows: int) -> ProgramEntry | None:
        """Return the smallest scoring program for this many rows, or the largest; None for none."""
        programs = sorted((p for p in self._programs if p.kind == "score"), key=lambda p: p.rows)
        return next((p for p in programs if p.rows >= rows), programs[-1] if programs else None)


def _smallest(candidates: list[ProgramEntry], *, full_logits: bool, what: str) -> ProgramEntry:
    """Return the smallest program; one with full logits serves all requests, but is slower."""
    matching = [p for p in candidates if p.full_logits >= full_logits]
    if not matching:
        raise _missing(what, full_logits=full_logits)
    return min(matching, key=lambda p: (p.full_logits, p.rows, p.batch))


def _missing(what: str, *, full_logits: bool) -> EngineFileError:
    with_logits = " and full logits, which top-k and top-p need" if full_logits else ""
    return EngineFileError(
        f"the engine has no program for {what}{with_logits}; rebuild it with larger limits"
    )


def _program_shape(shape: DraftShape | None) -> DraftShape:
    """Return the shape of the step programs of a draft."""
    return shape.program if isinstance(shape, PlacedTree) else shape or _NO_DRAFT


def _shape(program: ProgramEntry) -> DraftShape:
    shape = DraftShape(program.draft_top_k, program.draft_depth, program.draft_tokens)
    return shape_of(program.drafter, shape, program.rows // program.batch * program.is_ragged)
