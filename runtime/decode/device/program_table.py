"""Which program of a plan runs what: the smallest that is large enough."""

from __future__ import annotations

from specbuild.runtime.draft.draft_models import by_models, shape_of, shape_text
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import Plan, ProgramEntry
from specbuild.runtime.errors import EngineFileError, RequestError

_NO_DRAFT = DraftShape(0, 0, 0)


class ProgramTable:
    """The programs of a plan by what they are for."""

    def __init__(self, plan: Plan) -> None:
        self._programs = [
            p for p in plan.programs if not (p.adjusts or p.offered or p.kind == "adjust")
        ]
        self._host_chain_steps = [p for p in plan.programs if p.offered]
        self._processor_steps = sorted(
            (p for p in plan.programs if p.adjusts), key=lambda program: program.batch
        )
        self._first_token_processor = next((p for p in plan.programs if p.kind == "adjust"), None)
        self._steps: dict[
            tuple[DraftShape, int, bool, bool, int | None, bool, bool], ProgramEntry
        ] = {}
        self._refresh_capacities: dict[tuple[DraftShape | None, int], int] = {}
        self._chain_lengths: dict[tuple[int, bool], tuple[int, ...]] = {}
        self.prefill_rows = max((p.rows for p in plan.programs if p.kind == "prefill"), default=0)

    def shapes(self) -> list[DraftShape]:
        """Every draft shape that steps are there for: by draft model, smallest first."""
        steps = (_shape(p) for p in self._programs if p.kind == "step" and p.draft_depth)
        return by_models(steps, lambda s: (s.draft_top_k, s.draft_depth, s.draft_tokens))

    def step_batches(self) -> list[int]:
        """The numbers of sequences that steps without a draft are made for, rising."""
        return sorted({p.batch for p in self._programs if p.kind == "step" and not p.draft_depth})

    def check_shape(self, shape: DraftShape) -> None:
        """RequestError with the shapes there are, if this one is not among them."""
        if shape in self.shapes():
            return
        available = ", ".join(map(shape_text, self.shapes())) or "none"
        raise RequestError(
            f"the engine has no steps for the draft {shape_text(shape)} (top-k x depth x tokens); "
            f"it has {available}; ask for one of these, or build the engine with this one"
        )

    def max_sequences(self, shape: DraftShape | None, *, full_logits: bool) -> int:
        """Sequences of the largest step of this shape; 0 where there is none."""
        requested = shape or _NO_DRAFT
        steps = (p for p in self._programs if p.kind == "step" and _shape(p) == requested)
        return max((p.batch for p in steps if p.full_logits >= full_logits), default=0)

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
        """A step of ``batch`` sequences; None decodes without a draft.

        ``extends`` asks for one in which the draft takes up what waits for it. ``reverified``: a
        refresh of SpecPV, which chooses views and has capacity for so many rows that full steps
        re-verify. ``sparse``: rows may attend to what indexers choose (DSA); ``checks``: and what
        they choose is compared. Where no program does just that, one that may do more serves: the
        device's values say what each sequence does, and rows have the same bits.
        """
        requested = shape or _NO_DRAFT
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
        """Steps with this draft, of so many sequences or more."""
        steps = (p for p in self._programs if p.kind == "step" and _shape(p) == shape)
        return [p for p in steps if p.batch >= batch]

    def host_chain_lengths(self, *, batch: int, full_logits: bool) -> tuple[int, ...]:
        """The chains of the host's that steps of ``batch`` sequences verify, rising."""
        key = (batch, full_logits)
        if key not in self._chain_lengths:
            matching = (
                p
                for p in self._host_chain_steps
                if p.batch >= batch and p.full_logits >= full_logits
            )
            self._chain_lengths[key] = tuple(sorted({p.draft_tokens for p in matching}))
        return self._chain_lengths[key]

    def host_chain_step(self, length: int, *, batch: int, full_logits: bool) -> ProgramEntry:
        """A step of ``batch`` sequences that verifies chains of up to ``length`` tokens."""
        matching = [
            p for p in self._host_chain_steps if p.batch >= batch and p.draft_tokens >= length
        ]
        what = f"steps of {batch} sequences with {length} tokens that the host proposes"
        return _smallest(matching, full_logits=full_logits, what=what)

    @property
    def max_host_chain(self) -> int:
        """The longest chain of the host's that a step verifies; 0 where none does."""
        return max((p.draft_tokens for p in self._host_chain_steps), default=0)

    @property
    def has_processor_steps(self) -> bool:
        """Whether there are programs that change logits as requests ask."""
        return self._first_token_processor is not None and bool(self._processor_steps)

    @property
    def processor_steps_extend(self) -> bool:
        """Whether the draft can take up in such programs what waits for it."""
        return any(p.extends for p in self._processor_steps)

    def processor_step(self, batch: int, *, extends: bool = False) -> ProgramEntry:
        """A step of ``batch`` sequences that change logits."""
        candidates = [p for p in self._processor_steps if p.batch >= batch and p.extends == extends]
        return _smallest(candidates, full_logits=True, what=f"adjusted steps of {batch} sequences")

    @property
    def first_token_processor(self) -> ProgramEntry:
        """What changes the logits that a launch of prompts kept."""
        assert self._first_token_processor is not None, "requests that need it are refused"
        return self._first_token_processor

    def refresh_capacity(self, shape: DraftShape | None, *, batch: int) -> int:
        """The most rows that a step of ``batch`` sequences can re-verify (SpecPV), in any form."""
        key = (shape, batch)
        if key not in self._refresh_capacities:
            matching = self._steps_with(shape or _NO_DRAFT, batch)
            checking = [p for p in matching if p.checks]
            self._refresh_capacities[key] = max(p.reverified for p in checking or matching)
        return self._refresh_capacities[key]

    def prefill(self, *, rows: int, batch: int, full_logits: bool) -> ProgramEntry:
        """Prompt rows of sequences in rows below ``batch``."""
        candidates = [
            p for p in self._programs if p.kind == "prefill" and p.rows >= rows and p.batch >= batch
        ]
        what = f"prompt chunks of {rows} rows and {batch} sequences"
        return _smallest(candidates, full_logits=full_logits, what=what)

    def score(self, *, rows: int) -> ProgramEntry | None:
        """The smallest scoring program for so many rows, else the largest; None: there is none."""
        programs = sorted((p for p in self._programs if p.kind == "score"), key=lambda p: p.rows)
        return next((p for p in programs if p.rows >= rows), programs[-1] if programs else None)


def _smallest(candidates: list[ProgramEntry], *, full_logits: bool, what: str) -> ProgramEntry:
    """Programs with full logits serve the others too, at a price."""
    matching = [p for p in candidates if p.full_logits >= full_logits]
    if not matching:
        raise _missing(what, full_logits=full_logits)
    return min(matching, key=lambda p: (p.full_logits, p.rows, p.batch))


def _missing(what: str, *, full_logits: bool) -> EngineFileError:
    with_logits = " and full logits, as top-k and top-p need them" if full_logits else ""
    return EngineFileError(
        f"the engine has no program for {what}{with_logits}; build it again with larger limits"
    )


def _shape(program: ProgramEntry) -> DraftShape:
    shape = DraftShape(program.draft_top_k, program.draft_depth, program.draft_tokens)
    return shape_of(program.drafter, shape)
