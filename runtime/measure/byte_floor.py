"""The minimum bytes that a step must read, and its operations, from an engine's plan.

The plan states what each op call counts, and per which unit; a run states the number of rows,
tokens and experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from specbuild.runtime.engine_dir.plan import (
    TARGET,
    OpCall,
    Plan,
    Program,
    ProgramEntry,
    level_section,
)
from specbuild.runtime.engine_dir.traffic import Part, Per, Term

ReadProgram = Callable[[ProgramEntry], Program]


@dataclass(frozen=True)
class BytesByPart:
    """Bytes read, by purpose. ``draft`` includes all reads of the draft, also of its caches."""

    dense: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    kv_full: float = 0.0
    kv_sliding: float = 0.0
    draft: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def plus(self, other: BytesByPart) -> BytesByPart:
        """Return the sum with another one, part by part."""
        names = [part.name for part in fields(self)]
        return BytesByPart(*(getattr(self, name) + getattr(other, name) for name in names))

    def as_draft(self) -> BytesByPart:
        """Return the same bytes as bytes of the draft."""
        return BytesByPart(draft=self.total)


@dataclass(frozen=True)
class Work:
    """``rows`` of a pass, divided evenly among ``batch`` sequences of ``context`` tokens each.

    ``experts`` is the number of distinct experts that the rows select in a layer; None means the
    expectation of random routing. With ``logit_rows`` None, every row computes logits.
    """

    rows: int
    batch: int
    context: float
    experts: float | None = None
    logit_rows: int | None = None

    @property
    def rows_each(self) -> float:
        """The number of rows of one sequence."""
        return self.rows / self.batch


@dataclass(frozen=True)
class PassTraffic:
    """The bytes that a pass through some layers reads, and its operations: the sum of its calls.

    Each row selects ``experts_per_token`` of the ``experts`` of a layer that routes. A row with DSA
    attends to up to ``chosen_tokens``.
    """

    read: tuple[Term, ...] = ()
    operations: tuple[Term, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    chosen_tokens: int = 0

    def bytes_read(self, work: Work) -> BytesByPart:
        """Return the byte floor of one pass."""
        parts: dict[str, float] = defaultdict(int)
        for term in self.read:
            parts[term.part] += term.amount * self._times(term, work)
        return BytesByPart(**parts)

    def floating_operations(self, work: Work) -> float:
        """Return the number of multiplications and additions of one pass."""
        return sum(term.amount * self._times(term, work) for term in self.operations)

    def distinct_experts(self, work: Work) -> float:
        """Return the distinct experts of a layer that rows select, measured or expected."""
        if work.experts is not None:
            return work.experts
        return expected_experts(self.experts, self.experts_per_token, work.rows)

    def _times(self, term: Term, work: Work) -> float:
        """Return the number of times that a pass has the unit of a term."""
        attended = tokens_seen(work, term.window)
        counts: dict[Per, float] = {
            "pass": 1,
            "row": work.rows,
            "logit_row": work.rows if work.logit_rows is None else work.logit_rows,
            "chosen_expert": self.distinct_experts(work),
            "seen_token": work.batch * attended,
            "row_token_pair": work.batch * _pairs(work, term.window),
            "chosen_token": work.rows * min(self.chosen_tokens, attended),
        }
        return counts[term.per]


@dataclass(frozen=True)
class EngineTraffic:
    """The passes of an engine: of the target, and of the first and each further draft level.

    The first level also ingests the accepted tokens; ``taken_up`` is that part alone, keys and
    values only, as for prompts. It is None if no program has it. ``sparse`` is the target's pass
    with DSA. With several drafts these are of the first one, and ``by_model`` has each: in its
    first level the others ingest the accepted tokens too.
    """

    target: PassTraffic
    first_level: PassTraffic | None = None
    further_level: PassTraffic | None = None
    taken_up: PassTraffic | None = None
    sparse: PassTraffic | None = None
    by_model: Mapping[str, EngineTraffic] = field(default_factory=dict)

    def of(self, model: str) -> EngineTraffic:
        """Return the traffic of one draft model, by kind; with a single draft, this object."""
        return self.by_model.get(model, self)

    def level(self, level: int, work: Work) -> BytesByPart:
        """Return the byte floor of drafting one level, from 1; ``work.rows`` are the level's."""
        traffic = self.first_level if level == 1 else self.further_level or self.first_level
        return BytesByPart() if traffic is None else traffic.bytes_read(work).as_draft()

    def step(
        self,
        target: Work,
        *,
        top_k: int = 0,
        depth: int = 0,
        sparse: bool = False,
        draft_context: float | None = None,
    ) -> BytesByPart:
        """Return the byte floor of a complete step with ``depth`` levels of ``top_k`` nodes each.

        The draft attends to ``draft_context`` tokens, by default as many as the target.
        """
        context = target.context if draft_context is None else draft_context
        floor = self.verifying(sparse=sparse).bytes_read(target)
        for level in range(1, depth + 1):
            rows = target.batch * (1 if level == 1 else top_k)
            floor = floor.plus(self.level(level, Work(rows, target.batch, context)))
        return floor

    def verifying(self, *, sparse: bool) -> PassTraffic:
        """Return the target's pass of a sparse or non-sparse step."""
        return self.sparse if sparse and self.sparse is not None else self.target


def expected_experts(experts: int, experts_per_token: int, rows: int) -> float:
    """Return the expected number of distinct experts of random rows: E · (1 − (1 − k/E)^T)."""
    if experts == 0:
        return 0.0
    return float(experts * (1 - (1 - experts_per_token / experts) ** rows))


def tokens_seen(work: Work, window: int) -> float:
    """Return the tokens of one sequence, its own rows included, that some row attends to."""
    tokens = work.context + work.rows_each
    return min(tokens, window - 1 + work.rows_each) if window else tokens


def engine_traffic(plan: Plan, read: ReadProgram) -> EngineTraffic:
    """Read the smallest steps without a draft, and the deepest chain of one sequence."""
    steps = [
        e for e in plan.programs if e.kind == "step" and not (e.changes_logits or e.host_proposal)
    ]
    plain = [e for e in steps if not e.draft_depth and not e.extends and not e.reverified]
    target, sparse = (
        _section_traffic(read(min(floor, key=_size)), TARGET)
        if (floor := [e for e in plain if e.sparse == is_sparse and not e.checks])
        else None
        for is_sparse in (False, True)
    )
    assert target is not None
    steps = [e for e in steps if not e.sparse]
    drafted = [e for e in steps if e.draft_depth]
    if not drafted:
        return EngineTraffic(target, sparse=sparse)
    extending = min((e for e in steps if e.extends), key=_size, default=None)
    taken_up = None
    if extending is not None:
        taken_up = _section_traffic(read(extending), level_section(1))
    alone = EngineTraffic(target, taken_up=taken_up, sparse=sparse)
    by_model = {
        model: _with_levels(alone, [e for e in drafted if e.drafter == model], read)
        for model in dict.fromkeys(entry.drafter for entry in drafted)
    }
    first = next(iter(by_model.values()))
    return first if len(by_model) == 1 else replace(first, by_model=by_model)


def _with_levels(
    traffic: EngineTraffic, drafted: Sequence[ProgramEntry], read: ReadProgram
) -> EngineTraffic:
    """Return a copy with the levels of the deepest of these steps."""
    deepest = min(drafted, key=lambda e: (-e.draft_depth, e.batch, e.draft_top_k, *_size(e)))
    program = read(deepest)
    first = _section_traffic(program, level_section(1))
    if deepest.draft_depth == 1:
        return replace(traffic, first_level=first)
    further = _section_traffic(program, level_section(2))
    return replace(traffic, first_level=first, further_level=further)


def _size(step: ProgramEntry) -> tuple[int, bool, int]:
    """Return a sort key: fewest sequences first, then without logits, then fewest rows."""
    return step.batch, step.full_logits, step.rows


def pass_traffic(calls: Iterable[OpCall]) -> PassTraffic:
    """Return what these calls read and compute if each runs once."""
    some = [call.traffic for call in calls if call.traffic is not None]
    return PassTraffic(
        read=_summed(term for traffic in some for term in traffic.read),
        operations=_summed(term for traffic in some for term in traffic.operations),
        experts=max((traffic.experts for traffic in some), default=0),
        experts_per_token=max((traffic.experts_per_token for traffic in some), default=0),
        chosen_tokens=max((traffic.chosen_tokens for traffic in some), default=0),
    )


def _summed(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Return one term for each distinct unit."""
    amounts: dict[tuple[Part, Per, int], int] = defaultdict(int)
    for term in terms:
        amounts[term.part, term.per, term.window] += term.amount
    return tuple(Term(part, amount, per, window) for (part, per, window), amount in amounts.items())


def _section_traffic(program: Program, name: str) -> PassTraffic:
    return pass_traffic(call for call in program.ops if call.section == name)


def _pairs(work: Work, window: int) -> float:
    """Return the number of (row, attended token) pairs of one sequence with consecutive rows."""
    rows = work.rows_each
    if not window:
        return rows * work.context + rows * (rows + 1) / 2
    # Row i attends to min(context + i, window) tokens, i from 1.
    growing = min(max(window - work.context, 0.0), rows)
    return growing * work.context + growing * (growing + 1) / 2 + (rows - growing) * window
