"""The optimization profiles of every role's engine: ranges of its dynamic axes for each use.

The library selects kernels for a profile's optimal sizes. A launch uses the first profile that
fits. Axes that depend on a scalar's value have exact sizes, so the runtime knows the shapes of
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from specbuild.builder.backends.tensorrt.request import InputShapes
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.runtime.engine_dir.cache_groups import group_pages
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP
from specbuild.runtime.engine_dir.manifest import (
    CacheGroup,
    DraftShape,
    Limits,
    ShapeProfile,
    SizeRange,
)


def role_profiles(engine_sizes: EngineSizes) -> dict[str, tuple[ShapeProfile, ...]]:
    """Return the profiles of every role of an engine with these sizes."""
    limits = engine_sizes.limits
    batch, max_tokens, top_k = limits.max_batch_size, limits.draft_tokens, limits.draft_top_k
    depth, nodes = limits.draft_depth, max_tokens + 1
    default = engine_sizes.draft_default or DraftShape(0, 0, 0)
    tree_bits, level_bits = _words(nodes), _words(top_k * max(depth - 1, 0))

    def rows(  # noqa: PLR0917
        launch: Mapping[str, SizeRange],
        name: str,
        opt_rows: int,
        max_rows: int,
        logit_rows: int,
        words: int,
    ) -> ShapeProfile:
        """Return a profile of up to ``max_rows`` rows, of which ``logit_rows`` have logits."""
        axes = {
            "T": SizeRange(1, min(opt_rows, max_rows), max_rows),
            "R": SizeRange(
                1,
                1 if max_rows > logit_rows else min(opt_rows, max_rows),
                min(logit_rows, max_rows),
            ),
            "W": SizeRange(1, 1, words),
        }
        return ShapeProfile(name, {**launch, **axes})

    verify_rows = batch * nodes
    level = batch * max(top_k, depth + 1)
    views = _launch(limits, engine_sizes.target_groups)
    target = [rows(views, "decode", 1, batch, batch, 1)]
    if max_tokens:
        target.append(
            rows(views, "verify", default.draft_tokens + 1, verify_rows, verify_rows, tree_bits)
        )
    target.append(rows(views, "prefill", limits.max_rows, limits.max_rows, verify_rows, 1))
    profiles = {
        "target": tuple(target),
        "choose": (_one("rows", R=SizeRange(1, default.draft_tokens + 1, verify_rows)),),
    }
    if not max_tokens:
        return profiles
    extends = max(default.draft_depth, 1)
    of_draft = _launch(
        limits, [group for group in engine_sizes.groups if group.name == DRAFT_GROUP]
    )
    pool, default_pool = DraftShape(top_k, depth, 0).candidates, default.candidates
    sequences = {"B": SizeRange(1, 1, batch)}
    path = _exact(depth + 1)
    in_tree = {"N1": SizeRange(2, default.draft_tokens + 1, nodes), "W": SizeRange(1, 1, tree_bits)}
    return profiles | {
        "draft_fuse": tuple(
            _one(name, T=SizeRange(1, min(count, max_rows), max_rows))
            for name, count, max_rows in (
                ("step", extends, level),
                ("prefill", limits.max_rows, limits.max_rows),
            )
        ),
        "draft": (
            rows(of_draft, "step", extends, level, level, level_bits),
            rows(of_draft, "prefill", limits.max_rows, limits.max_rows, level, 1),
        ),
        "expand": tuple(
            _one(
                f"{first}x{children}",
                BF=SizeRange(first, first, batch * first),
                F=_exact(first),
                K=_exact(children),
                FK=_exact(first * children),
                top_k=_exact(children),
                **sequences,
            )
            for children in range(1, top_k + 1)
            for first in sorted({1, children})
        ),
        "select": tuple(
            _one(
                f"{tokens}",
                M=SizeRange(tokens, max(default_pool, tokens), pool),
                N1=_exact(tokens + 1),
                W=_exact(_words(tokens + 1)),
                draft_tokens=_exact(tokens),
                **sequences,
            )
            for tokens in range(1, max_tokens + 1)
        ),
        "accept": (_one("tree", D1=path, **sequences, **in_tree),),
        "commit": (_one("path", D1=SizeRange(1, default.draft_depth + 1, depth + 1), **sequences),),
    }


def input_shapes(inputs: Iterable[ir.Value], profile: ShapeProfile) -> tuple[InputShapes, ...]:
    """Return a profile's ranges of a graph's inputs, without inputs of constant shape.

    A scalar is included if the profile has an axis of its name, because other sizes depend on its
    value. Raises KeyError if the profile lacks an axis.
    """
    shapes = []
    for value in inputs:
        assert value.name is not None and value.shape is not None
        ranges = [_range(size, profile.axes) for size in value.shape]
        if not ranges and value.name in profile.axes:
            ranges = [profile.axes[value.name]]
        elif all(axis.least == axis.most for axis in ranges) and all(
            isinstance(size, int) for size in value.shape
        ):
            continue
        shapes.append(
            InputShapes(
                value.name,
                min_shape=tuple(axis.least for axis in ranges),
                opt_shape=tuple(axis.usual for axis in ranges),
                max_shape=tuple(axis.most for axis in ranges),
            )
        )
    return tuple(shapes)


def _range(size: int | ir.SymbolicDim, axes: Mapping[str, SizeRange]) -> SizeRange:
    return SizeRange(size, size, size) if isinstance(size, int) else axes[str(size.value)]


def _launch(limits: Limits, groups: Iterable[CacheGroup]) -> dict[str, SizeRange]:
    """Return the axes of sequences and page tables: up to the maximum batch and view length."""
    batch = limits.max_batch_size
    axes = {"B": SizeRange(1, 1, batch), "B1": SizeRange(2, 2, batch + 1)}
    for group in groups:
        max_pages = group_pages(group, limits, tokens=limits.max_seq_len)
        axes[f"P_{group.name}"] = SizeRange(1, -(-max_pages // 4), max_pages)
    return axes


def _exact(size: int) -> SizeRange:
    return SizeRange(size, size, size)


def _one(name: str, **axes: SizeRange) -> ShapeProfile:
    return ShapeProfile(name, axes)


def _words(bits: int) -> int:
    """Return the number of 32-bit words for this number of bits, at least one."""
    return max(1, -(-bits // 32))
