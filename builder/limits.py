"""What an engine is built for: limits, the default draft shape, and the cache groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbuild.builder.config import BuildOptions
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.kv_pool import DRAFT_GROUP, pages_per_sequence
from specbuild.runtime.manifest import (
    CacheGroup,
    DraftGeometry,
    DraftShape,
    Limits,
    TargetGeometry,
)

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_BATCH_SIZE = 4
DEFAULT_PAGE_SIZE = 16
DEFAULT_DRAFT_LIMITS = DraftShape(draft_top_k=8, draft_depth=8, draft_tokens=60)
# A chain of three: what pays on a CPU for a deep, narrow target; a run adapts it to what it sees.
DEFAULT_DRAFT_SHAPE = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
PREFILL_ROWS = 256


@dataclass(frozen=True)
class EnginePlan:
    """The sizes of an engine, all settled."""

    limits: Limits
    draft_default: DraftShape | None
    groups: tuple[CacheGroup, ...]

    def group_of_layer(self, target: TargetGeometry) -> tuple[int, ...]:
        """For every target layer, the index of its group among ``target_groups``."""
        return tuple(
            next(
                i for i, g in enumerate(self.groups) if g.name != DRAFT_GROUP and layer in g.layers
            )
            for layer in range(target.layers)
        )

    @property
    def target_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that the target's launches take."""
        return tuple(group for group in self.groups if group.name != DRAFT_GROUP)


def windowed_draft(draft: DraftGeometry, options: BuildOptions) -> DraftGeometry:
    """The draft with ``--draft-window`` on its own attention, where that is asked for.

    A window changes what the draft proposes, never the output.
    """
    if options.draft_window is None:
        return draft
    if draft.sliding_window and draft.sliding_window < options.draft_window:
        raise SpecbuildError(
            f"--draft-window {options.draft_window} is wider than the draft's own window of "
            f"{draft.sliding_window}; leave it out or ask for less"
        )
    return replace(draft, sliding_window=options.draft_window)


def context_warnings(draft: DraftGeometry, limits: Limits) -> tuple[str, ...]:
    """A draft that is asked for positions beyond those it was trained on loses its acceptance."""
    trained = draft.max_positions
    if trained is None or limits.max_seq_len <= trained or 0 < draft.sliding_window <= trained:
        return ()
    return (
        f"draft: trained on {trained} positions, the engine allows {limits.max_seq_len}; beyond "
        f"them fewer drafts are accepted (--draft-window {trained} keeps its attention within)",
    )


def candidate_pool(shape: DraftShape) -> int:
    """How many candidates a dynamic tree of this shape drafts: K + (D − 1)·K²."""
    return shape.draft_top_k + (shape.draft_depth - 1) * shape.draft_top_k**2


def plan_engine(
    options: BuildOptions, target: TargetGeometry, draft: DraftGeometry | None
) -> EnginePlan:
    """Settles every size; SpecbuildError names an option that is out of range, with the numbers."""
    for name in ("max_seq_len", "max_batch_size", "page_size", "draft_window"):
        _require_positive(name, getattr(options, name))
    max_seq_len = options.max_seq_len or min(target.max_positions, DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > target.max_positions:
        raise SpecbuildError(
            f"--max-seq-len {max_seq_len} exceeds the model's {target.max_positions} positions; "
            f"ask for at most {target.max_positions}"
        )
    batch = options.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    page_size = options.page_size or DEFAULT_PAGE_SIZE
    shape, default = _draft_shapes(options, draft, max_seq_len)
    if shape.draft_tokens >= max_seq_len:
        raise SpecbuildError(
            f"a draft of {shape.draft_tokens} tokens does not fit a sequence of {max_seq_len}; "
            "raise --max-seq-len or ask for fewer --draft-tokens"
        )
    rows = max(PREFILL_ROWS, batch * (shape.draft_tokens + 1))
    limits = Limits(
        max_seq_len=max_seq_len,
        max_batch_size=batch,
        max_rows=rows,
        draft_top_k=shape.draft_top_k,
        draft_depth=shape.draft_depth,
        draft_tokens=shape.draft_tokens,
    )
    groups = _target_groups(target, page_size)
    if draft is not None:
        groups.append(_group(DRAFT_GROUP, (0,), draft, draft.sliding_window, page_size))
    return EnginePlan(limits, default, tuple(_with_pages(group, limits) for group in groups))


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise SpecbuildError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def _draft_shapes(
    options: BuildOptions, draft: DraftGeometry | None, max_seq_len: int
) -> tuple[DraftShape, DraftShape | None]:
    names = ("draft_top_k", "draft_depth", "draft_tokens", "draft_window")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, value in given.items():
        _require_positive(name, value)
    if draft is None:
        if given:
            raise SpecbuildError(
                f"--{next(iter(given)).replace('_', '-')} needs a draft; give one with --draft"
            )
        return DraftShape(0, 0, 0), None
    given.pop("draft_window", None)
    most_children = min(DEFAULT_DRAFT_LIMITS.draft_top_k, draft.vocab)
    if not given:
        return _default_shapes(most_children, max_seq_len)
    top_k = given.get("draft_top_k", most_children)
    depth = given.get("draft_depth", DEFAULT_DRAFT_LIMITS.draft_depth)
    if top_k > draft.vocab:
        raise SpecbuildError(
            f"--draft-top-k {top_k} exceeds the draft's vocabulary of {draft.vocab}"
        )
    pool = candidate_pool(DraftShape(top_k, depth, 0))
    tokens = given.get("draft_tokens", min(pool, DEFAULT_DRAFT_LIMITS.draft_tokens))
    if tokens > pool:
        raise SpecbuildError(
            f"--draft-tokens {tokens} exceeds the candidate pool of {pool} that top-k {top_k} and "
            f"depth {depth} draft (K + (D-1)*K*K); ask for at most {pool}"
        )
    shape = DraftShape(top_k, depth, tokens)
    return shape, shape


def _default_shapes(most_children: int, max_seq_len: int) -> tuple[DraftShape, DraftShape]:
    """Limits and default without draft options, within the vocabulary and the context."""
    fitting = max(max_seq_len - 1, 1)
    limits = DEFAULT_DRAFT_LIMITS
    pool = candidate_pool(replace(limits, draft_top_k=most_children))
    tokens = min(limits.draft_tokens, pool, fitting)
    chain = min(DEFAULT_DRAFT_SHAPE.draft_depth, tokens)
    return (
        DraftShape(most_children, limits.draft_depth, tokens),
        DraftShape(draft_top_k=1, draft_depth=chain, draft_tokens=chain),
    )


def _target_groups(target: TargetGeometry, page_size: int) -> list[CacheGroup]:
    groups = []
    for name, layer_type in (("full", "full_attention"), ("sliding", "sliding_attention")):
        layers = tuple(i for i, kind in enumerate(target.layer_types) if kind == layer_type)
        if layers:
            window = target.sliding_window if name == "sliding" else 0
            groups.append(_group(name, layers, target, window, page_size))
    return groups


def _group(
    name: str,
    layers: tuple[int, ...],
    model: TargetGeometry | DraftGeometry,
    window: int,
    page_size: int,
) -> CacheGroup:
    return CacheGroup(
        name=name,
        layers=layers,
        kv_heads=model.kv_heads,
        k_width=model.head_dim,
        v_width=model.head_dim,
        page_size=page_size,
        pages=0,
        window=window,
        dtype="float32",
        pool_axes=POOL_BODY_AXES,
    )


def _with_pages(group: CacheGroup, limits: Limits) -> CacheGroup:
    """The group with pages for every sequence at its longest, and page 0."""
    per_sequence = pages_per_sequence(
        group.name,
        limits,
        tokens=limits.max_seq_len,
        page_size=group.page_size,
        window=group.window,
    )
    return replace(group, pages=limits.max_batch_size * per_sequence + 1)
