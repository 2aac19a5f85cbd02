"""What an engine is built for: limits, the default draft shape, and the cache groups."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.builder.config import BuildOptions
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.errors import SpecbuildError
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
        """For every target layer, the index of its group among ``groups``."""
        return tuple(
            next(i for i, g in enumerate(self.groups) if g.name != "draft" and layer in g.layers)
            for layer in range(target.layers)
        )

    @property
    def target_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that the target's launches take."""
        return tuple(group for group in self.groups if group.name != "draft")


def candidate_pool(shape: DraftShape) -> int:
    """How many candidates a dynamic tree of this shape drafts: K + (D − 1)·K²."""
    return shape.draft_top_k + (shape.draft_depth - 1) * shape.draft_top_k**2


def plan_engine(
    options: BuildOptions, target: TargetGeometry, draft: DraftGeometry | None
) -> EnginePlan:
    """Settles every size; SpecbuildError names an option that is out of range, with the numbers."""
    for name in ("max_seq_len", "max_batch_size", "page_size"):
        _require_positive(name, getattr(options, name))
    max_seq_len = options.max_seq_len or min(target.max_positions, DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > target.max_positions:
        raise SpecbuildError(
            f"--max-seq-len {max_seq_len} exceeds the model's {target.max_positions} positions; "
            f"ask for at most {target.max_positions}"
        )
    batch = options.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    page_size = options.page_size or DEFAULT_PAGE_SIZE
    shape, default = _draft_shapes(options, draft)
    rows = max(PREFILL_ROWS, batch * (shape.draft_tokens + 1))
    limits = Limits(
        max_seq_len=max_seq_len,
        max_batch_size=batch,
        max_rows=rows,
        draft_top_k=shape.draft_top_k,
        draft_depth=shape.draft_depth,
        draft_tokens=shape.draft_tokens,
    )
    groups = _target_groups(target, limits, page_size)
    if draft is not None:
        groups.append(_draft_group(draft, limits, page_size))
    return EnginePlan(limits, default, tuple(groups))


def _require_positive(name: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise SpecbuildError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def _draft_shapes(
    options: BuildOptions, draft: DraftGeometry | None
) -> tuple[DraftShape, DraftShape | None]:
    names = ("draft_top_k", "draft_depth", "draft_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, value in given.items():
        _require_positive(name, value)
    if draft is None:
        if given:
            raise SpecbuildError(
                f"--{next(iter(given)).replace('_', '-')} needs a draft; give one with --draft"
            )
        return DraftShape(0, 0, 0), None
    if not given:
        return DEFAULT_DRAFT_LIMITS, DEFAULT_DRAFT_SHAPE
    top_k = given.get("draft_top_k", DEFAULT_DRAFT_LIMITS.draft_top_k)
    depth = given.get("draft_depth", DEFAULT_DRAFT_LIMITS.draft_depth)
    pool = candidate_pool(DraftShape(top_k, depth, 0))
    tokens = given.get("draft_tokens", min(pool, DEFAULT_DRAFT_LIMITS.draft_tokens))
    if tokens > pool:
        raise SpecbuildError(
            f"--draft-tokens {tokens} exceeds the candidate pool of {pool} that top-k {top_k} and "
            f"depth {depth} draft (K + (D-1)*K*K); ask for at most {pool}"
        )
    if tokens >= options_rows_bound(options):
        raise SpecbuildError(
            f"--draft-tokens {tokens} does not fit a sequence of {options_rows_bound(options)}"
        )
    shape = DraftShape(top_k, depth, tokens)
    return shape, shape


def options_rows_bound(options: BuildOptions) -> int:
    """The most tokens that one sequence may hold under these options."""
    return options.max_seq_len or DEFAULT_MAX_SEQ_LEN


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _target_groups(target: TargetGeometry, limits: Limits, page_size: int) -> list[CacheGroup]:
    groups = []
    slots = limits.max_seq_len + limits.draft_tokens + 1
    for name, layer_type in (("full", "full_attention"), ("sliding", "sliding_attention")):
        layers = tuple(i for i, kind in enumerate(target.layer_types) if kind == layer_type)
        if not layers:
            continue
        window = target.sliding_window if name == "sliding" else 0
        # A window's pages slide: the oldest live page and the newest are both partly used.
        per_sequence = _pages(slots, page_size)
        if window:
            per_sequence = min(per_sequence, _pages(window + limits.max_rows, page_size) + 1)
        groups.append(
            CacheGroup(
                name=name,
                layers=layers,
                kv_heads=target.kv_heads,
                k_width=target.head_dim,
                v_width=target.head_dim,
                page_size=page_size,
                pages=limits.max_batch_size * per_sequence + 1,
                window=window,
                dtype="float32",
                pool_axes=POOL_BODY_AXES,
            )
        )
    return groups


def _draft_group(draft: DraftGeometry, limits: Limits, page_size: int) -> CacheGroup:
    slots = limits.max_seq_len + limits.draft_top_k * max(limits.draft_depth - 1, 0)
    return CacheGroup(
        name="draft",
        layers=(0,),
        kv_heads=draft.kv_heads,
        k_width=draft.head_dim,
        v_width=draft.head_dim,
        page_size=page_size,
        pages=limits.max_batch_size * _pages(slots, page_size) + 1,
        window=0,
        dtype="float32",
        pool_axes=POOL_BODY_AXES,
    )
