"""The largest and the default draft trees of a build, from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specbuild.builder.engine.backend_sizes import DEFAULT_TREE_LIMITS, BackendSizes
from specbuild.builder.options import BuildOptions, DraftOptions
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

# A chain of three is best for a deep, narrow target; a run adapts it to measured costs.
NO_DRAFT = DraftShape(0, 0, 0)
DEFAULT_DRAFT_SHAPE = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)


def largest_shapes(
    options: BuildOptions,
    sizes: BackendSizes,
    drafts: Mapping[str, DraftGeometry],
    max_seq_len: int,
) -> tuple[dict[str, DraftShape], DraftShape | None]:
    """Return each draft's largest tree by cache group, and the first draft's default.

    Raises SpecbuildError for options out of range, or without a draft.
    """
    if not drafts:
        _draft_shapes(options, sizes, None, max_seq_len)
        return {}, None
    shapes = {g: _draft_shapes(options, sizes, d, max_seq_len) for g, d in drafts.items()}
    _, default = next(iter(shapes.values()))
    return {group: largest for group, (largest, _) in shapes.items()}, default


def _draft_shapes(
    options: BuildOptions, sizes: BackendSizes, draft: DraftGeometry | None, max_seq_len: int
) -> tuple[DraftShape, DraftShape | None]:
    given = options.drafting.given()
    given.pop("dtype", None)
    most_levels = draft.block - 1 if draft is not None and draft.block else None
    if most_levels is not None:
        sizes = _within_block(sizes, given, most_levels)
    DraftOptions.check_bounds(given)
    if draft is None:
        if given:
            raise SpecbuildError(
                f"{DraftOptions.flag(next(iter(given)))} needs a draft; give one with --draft"
            )
        return NO_DRAFT, None
    for of_draft_alone in ("window", "norm_output"):
        given.pop(of_draft_alone, None)
    most_children = min(DEFAULT_TREE_LIMITS.draft_top_k, draft.vocab)
    if not given:
        return _default_shapes(sizes, most_children, max_seq_len)
    top_k = given.get("top_k", most_children)
    usual_depth = DEFAULT_TREE_LIMITS.draft_depth
    if most_levels is not None:
        usual_depth = min(usual_depth, most_levels)
    if top_k == 1:
        usual_depth = given.get("tokens", sizes.draft_limits.draft_depth)
    depth = given.get("depth", usual_depth)
    if top_k > draft.vocab:
        raise SpecbuildError(
            f"--draft-top-k {top_k} exceeds the draft's vocabulary of {draft.vocab}"
        )
    pool = DraftShape(top_k, depth, 0).candidates
    tokens = given.get("tokens", min(pool, DEFAULT_TREE_LIMITS.draft_tokens))
    if tokens > pool:
        raise SpecbuildError(
            f"--draft-tokens {tokens} exceeds the candidate pool of {pool} that top-k {top_k} and "
            f"depth {depth} draft (K + (D-1)*K*K); ask for at most {pool}"
        )
    shape = _largest_draft(top_k, depth, tokens)
    return shape, shape


def _within_block(sizes: BackendSizes, given: dict[str, int], most_levels: int) -> BackendSizes:
    """Return the backend's sizes, limited to a block's levels; SpecbuildError for more."""
    depth = given.get("depth", 1)
    chain = given.get("tokens", 1) if given.get("top_k") == 1 and "depth" not in given else 1
    for option, levels in (("depth", depth), ("tokens", chain)):
        if levels > most_levels:
            raise SpecbuildError(
                f"{DraftOptions.flag(option)} {levels}: the draft's block is of {most_levels + 1} "
                f"tokens, which drafts {most_levels}; ask for at most {most_levels}"
            )
    limits = sizes.draft_limits
    deepest = replace(limits, draft_depth=min(limits.draft_depth, most_levels))
    return replace(sizes, draft_limits=deepest)


def _default_shapes(
    sizes: BackendSizes, most_children: int, max_seq_len: int
) -> tuple[DraftShape, DraftShape]:
    """Return limits and default without draft options, within vocabulary and context."""
    fitting = max(max_seq_len - 1, 1)
    limits = sizes.draft_limits
    top_k = min(limits.draft_top_k, most_children)
    pool = replace(limits, draft_top_k=top_k).candidates
    tokens = min(limits.draft_tokens, pool, fitting)
    chain = min(DEFAULT_DRAFT_SHAPE.draft_depth, tokens)
    return (
        _largest_draft(top_k, limits.draft_depth, tokens),
        DraftShape(draft_top_k=1, draft_depth=chain, draft_tokens=chain),
    )


def _largest_draft(top_k: int, depth: int, tokens: int) -> DraftShape:
    """A chain has at most as many levels as tokens, since others would not be verified."""
    return DraftShape(top_k, min(depth, tokens) if top_k == 1 else depth, tokens)
