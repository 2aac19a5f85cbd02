"""The bytes that a step must read at least, from an engine's plan alone.

Counted is what lies in device memory as the kernels read it: every weight of a pass once however
many rows there are, the experts that some row chose, and the keys and values that some row sees.
Activations, the step's state and the rows that tables are looked up for stay in the L2 cache or
are too few to matter, but for the looked-up rows, which are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import prod

from specbuild.runtime.engine_dir.plan import (
    ITEM_BYTES,
    Binding,
    OpCall,
    Plan,
    Program,
    ProgramEntry,
)
from specbuild.runtime.measure.step_sections import HEADS, LEVEL, TARGET, step_sections

ReadProgram = Callable[[ProgramEntry], Program]

_MOE, _ATTENTION, _LATENT = "RmsMoe", "PagedTreeAttention", "MlaAttention"
_INDEXER = "DsaIndexer"
# What a row attends to, beside its ancestors in the tree.
_CHOSEN = ("top_k", "first_tokens", "recent_tokens")
_PER_EXPERT = ("gate_up", "gate_up_bias", "down", "down_bias")
_POOLS = ("k_pool", "v_pool")
# Looked up by token or position: one row for each row of the pass.
_TABLES = ("table", "cos", "sin", "d2t")
# Multiplied by the rows of ``x``; packed ones lie in tiles of 16 rows, whatever their form.
_PRODUCTS = ("weight", "gate_up", "router_weight")
_TILE_ROWS = 16


@dataclass(frozen=True)
class BytesByPart:
    """What is read, by what it is. ``draft`` is all that the draft reads, its caches included."""

    dense: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    kv_full: float = 0.0
    kv_sliding: float = 0.0
    draft: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def plus(self, other: BytesByPart) -> BytesByPart:
        """Part by part."""
        names = [part.name for part in fields(self)]
        return BytesByPart(*(getattr(self, name) + getattr(other, name) for name in names))

    def as_draft(self) -> BytesByPart:
        """The same bytes, read by the draft."""
        return BytesByPart(draft=self.total)


@dataclass(frozen=True)
class Work:
    """``rows`` of a pass, shared evenly by ``batch`` sequences that hold ``context`` tokens each.

    ``experts`` is how many distinct experts the rows choose in a layer; None takes what random
    routing would, on average. ``logit_rows`` None asks for the logits of every row.
    """

    rows: int
    batch: int
    context: float
    experts: float | None = None
    logit_rows: int | None = None

    @property
    def rows_each(self) -> float:
        """Rows of one sequence."""
        return self.rows / self.batch


@dataclass
class _CacheReads:
    """What caches hold of a token, over the layers of one window; 0 keeps every position.

    ``operations_per_token`` are those of a row, ``rebuilding_per_token`` those that the rows of a
    sequence share (keys of a latent).
    """

    bytes_per_token: int = 0
    operations_per_token: int = 0
    rebuilding_per_token: int = 0

    def add(self, bytes_per_token: int, operations: int, rebuilding: int = 0) -> None:
        self.bytes_per_token += bytes_per_token
        self.operations_per_token += operations
        self.rebuilding_per_token += rebuilding


@dataclass
class PassTraffic:
    """What one pass through some layers reads and computes, per call, row, expert and token.

    ``expert_bytes`` is one expert in every layer; ``operations`` are those of a row: products and
    sums with dense weights and with the ``experts_per_token`` experts, and of a row of logits.
    Where attention is narrowed a row gathers up to ``chosen`` tokens for itself, of
    ``chosen_bytes`` and ``chosen_operations`` each (DSA).
    """

    dense_bytes: int = 0
    head_bytes: int = 0
    looked_up_bytes: int = 0
    expert_bytes: int = 0
    experts: int = 0
    experts_per_token: int = 0
    operations: int = 0
    head_operations: int = 0
    caches: dict[int, _CacheReads] = field(default_factory=dict)
    chosen: int = 0
    chosen_bytes: int = 0
    chosen_operations: int = 0

    def bytes_read(self, work: Work) -> BytesByPart:
        """The floor of one pass."""
        distinct = work.experts
        if distinct is None:
            distinct = expected_experts(self.experts, self.experts_per_token, work.rows)
        sliding = sum(
            reads.bytes_per_token * tokens_seen(work, window)
            for window, reads in self.caches.items()
            if window
        )
        full = self.caches.get(0, _CacheReads()).bytes_per_token * tokens_seen(work, 0)
        return BytesByPart(
            dense=self.dense_bytes + work.rows * self.looked_up_bytes,
            experts=distinct * self.expert_bytes,
            head=self.head_bytes,
            kv_full=work.batch * full + self._gathered(work) * self.chosen_bytes,
            kv_sliding=work.batch * sliding,
        )

    def floating_operations(self, work: Work) -> float:
        """Multiplications and additions of one pass."""
        logit_rows = work.rows if work.logit_rows is None else work.logit_rows
        attention = sum(
            reads.operations_per_token * _pairs(work, window)
            + reads.rebuilding_per_token * tokens_seen(work, window)
            for window, reads in self.caches.items()
        )
        rows = work.rows * self.operations + logit_rows * self.head_operations
        gathered = self._gathered(work) * self.chosen_operations
        return rows + work.batch * attention + gathered

    def _gathered(self, work: Work) -> float:
        """Tokens that all rows gather."""
        return work.rows * min(self.chosen, tokens_seen(work, 0))


@dataclass(frozen=True)
class EngineTraffic:
    """The passes of an engine: the target, and of its draft the first level and each further one.

    The first level also takes up what was accepted; ``taken_up`` is that alone, keys and values
    only, as prompts are. None where there is none to read it from. ``narrowed`` is the target
    where it attends to what indexers choose.
    """

    target: PassTraffic
    first_level: PassTraffic | None = None
    further_level: PassTraffic | None = None
    taken_up: PassTraffic | None = None
    narrowed: PassTraffic | None = None

    def level(self, level: int, work: Work) -> BytesByPart:
        """The floor of drafting one level, from 1; ``work.rows`` are the level's."""
        traffic = self.first_level if level == 1 else self.further_level or self.first_level
        return BytesByPart() if traffic is None else traffic.bytes_read(work).as_draft()

    def step(
        self,
        target: Work,
        *,
        top_k: int = 0,
        depth: int = 0,
        narrows: bool = False,
        draft_context: float | None = None,
    ) -> BytesByPart:
        """The floor of a whole step with a tree of ``depth`` levels, ``top_k`` nodes each.

        The draft sees ``draft_context`` tokens; left out, as many as the target.
        """
        context = target.context if draft_context is None else draft_context
        found = self.verifying(narrows=narrows).bytes_read(target)
        for level in range(1, depth + 1):
            rows = target.batch * (1 if level == 1 else top_k)
            found = found.plus(self.level(level, Work(rows, target.batch, context)))
        return found

    def verifying(self, *, narrows: bool) -> PassTraffic:
        """The target's pass of a step that narrows, or does not."""
        return self.narrowed if narrows and self.narrowed is not None else self.target


def expected_experts(experts: int, experts_per_token: int, rows: int) -> float:
    """Distinct experts that random rows choose: E · (1 − (1 − k/E)^T)."""
    if experts == 0:
        return 0.0
    return float(experts * (1 - (1 - experts_per_token / experts) ** rows))


def tokens_seen(work: Work, window: int) -> float:
    """Tokens of one sequence, its own rows included, that some row of the pass sees."""
    tokens = work.context + work.rows_each
    return min(tokens, window - 1 + work.rows_each) if window else tokens


def engine_traffic(plan: Plan, read: ReadProgram) -> EngineTraffic:
    """Reads the smallest steps without a draft, and of one sequence with the deepest chain."""
    steps = [entry for entry in plan.programs if entry.kind == "step" and not entry.full_logits]
    plain = [e for e in steps if not e.draft_depth and not e.extends and not e.fed_again]
    target, narrowed = (
        _section_traffic(plan, read(min(found, key=lambda e: e.batch)), (TARGET,))
        if (found := [e for e in plain if e.narrows == narrows and not e.checks])
        else None
        for narrows in (False, True)
    )
    assert target is not None
    steps = [e for e in steps if not e.narrows]
    drafted = [e for e in steps if e.draft_depth]
    if not drafted:
        return EngineTraffic(target, narrowed=narrowed)
    extending = min((e for e in steps if e.extends), key=lambda e: e.batch, default=None)
    taken_up = None
    if extending is not None:
        taken_up = _section_traffic(plan, read(extending), (f"{LEVEL}1",))
    deepest = max(drafted, key=lambda e: (e.draft_depth, -e.batch, -e.draft_top_k))
    program = read(deepest)
    first = _section_traffic(plan, program, (f"{LEVEL}1",))
    if deepest.draft_depth == 1:
        return EngineTraffic(target, first, taken_up=taken_up, narrowed=narrowed)
    further = _section_traffic(plan, program, (f"{LEVEL}2",))
    return EngineTraffic(target, first, further, taken_up, narrowed)


def pass_traffic(plan: Plan, ops: Iterable[OpCall]) -> PassTraffic:
    """What these ops read and compute when each is called once."""
    found = PassTraffic()
    for call in ops:
        for name, binding in call.inputs.items():
            if plan.buffers[binding.buffer].space == "weights":
                _add_weight(found, call, name, binding)
        if call.op == _ATTENTION:
            _add_attention(found, call)
        elif call.op == _LATENT:
            _add_latent_attention(found, call)
        elif call.op == _INDEXER:
            _add_indexer(found, call)
    return found


def _section_traffic(plan: Plan, program: Program, names: Sequence[str]) -> PassTraffic:
    sections = [s for s in step_sections(program.ops) if s.name in names]
    return pass_traffic(plan, (c for s in sections for c in program.ops[s.first : s.last + 1]))


def _add_weight(found: PassTraffic, call: OpCall, name: str, binding: Binding) -> None:
    size = _bytes(binding)
    if name in _TABLES:
        found.looked_up_bytes += size // binding.shape[0]
    elif call.op == _MOE and name in _PER_EXPERT:
        found.expert_bytes += size // binding.shape[0]
        found.experts = binding.shape[0]
        found.experts_per_token = int(call.attributes["top_k"])
        if name == "gate_up_bias":
            inner, hidden = binding.shape[1] // 2, call.inputs["x"].shape[1]
            found.operations += 2 * found.experts_per_token * 3 * inner * hidden
    elif call.op in HEADS:
        found.head_bytes += size
        found.head_operations += _operations(call, name)
    else:
        found.dense_bytes += size
        found.operations += _operations(call, name)


def _operations(call: OpCall, name: str) -> int:
    """Of one row: a product and a sum for every element of a weight."""
    if name not in _PRODUCTS:
        return 0
    shape = call.inputs[name].shape
    outputs = shape[0] if len(shape) == 2 else _TILE_ROWS * shape[0]
    return 2 * outputs * call.inputs["x"].shape[1]


def _add_attention(found: PassTraffic, call: OpCall) -> None:
    per_token = 0
    for name in _POOLS:
        pool = call.inputs[name]
        per_token += pool.shape[1] * pool.shape[3] * ITEM_BYTES[pool.dtype]
    # Scores and the weighted sum: two products of a head's width each.
    operations = 4 * prod(call.inputs["q"].shape[1:])
    if "selected" in call.inputs:
        found.chosen_bytes += per_token
        found.chosen_operations += operations
        return
    reads = found.caches.setdefault(int(call.attributes["window"]), _CacheReads())
    reads.add(per_token, operations)


def _add_indexer(found: PassTraffic, call: OpCall) -> None:
    """A key for every cached token, which the rows of a sequence share."""
    pool = call.inputs["key_pool"]
    found.chosen = sum(int(call.attributes[name]) for name in _CHOSEN)
    reads = found.caches.setdefault(0, _CacheReads())
    reads.add(pool.shape[3] * ITEM_BYTES[pool.dtype], 2 * prod(call.inputs["q"].shape[1:]))


def _add_latent_attention(found: PassTraffic, call: OpCall) -> None:
    """Scores and the weighted sum of latents; and where keys are rebuilt, that."""
    pool = call.inputs["c_pool"]
    q_heads, width = call.inputs["q"].shape[1:]
    value, _, v_width = call.inputs["w_v"].shape
    rebuilding = 2 * prod(call.inputs["w_k"].shape) if "w_k" in call.inputs else 0
    found.operations += 2 * q_heads * value * v_width
    per_token, attending = pool.shape[3] * ITEM_BYTES[pool.dtype], 2 * q_heads * (width + value)
    if "selected" in call.inputs:
        found.chosen_bytes += per_token
        found.chosen_operations += attending + rebuilding
        return
    reads = found.caches.setdefault(int(call.attributes["window"]), _CacheReads())
    reads.add(per_token, attending, rebuilding)


def _pairs(work: Work, window: int) -> float:
    """(row, token it sees) of one sequence whose rows follow each other."""
    rows = work.rows_each
    if not window:
        return rows * work.context + rows * (rows + 1) / 2
    # Row i sees min(context + i, window) tokens, i from 1.
    growing = min(max(window - work.context, 0.0), rows)
    return growing * work.context + growing * (growing + 1) / 2 + (rows - growing) * window


def _bytes(binding: Binding) -> int:
    return prod(binding.shape) * ITEM_BYTES[binding.dtype]
