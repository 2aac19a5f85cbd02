"""Which sizes every role's engine takes: ranges of its dynamic axes, in a profile for each use.

The library chooses kernels for a profile's usual sizes. A launch takes the first that it fits.
Sizes that follow from a scalar's value are exact: the runtime then knows its outputs' shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from specbuild.builder.backends.tensorrt.request import InputShapes
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.runtime.engine_dir.cache_groups import group_pages
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP
from specbuild.runtime.engine_dir.manifest import (
    CacheGroup,
    DraftShape,
    Limits,
    ShapeProfile,
    SizeRange,
)


def role_profiles(plan: EnginePlan) -> dict[str, tuple[ShapeProfile, ...]]:
    """The profiles of every role that an engine of this plan may have."""
    limits = plan.limits
    batch, kept, width = limits.max_batch_size, limits.draft_tokens, limits.draft_top_k
    depth, nodes = limits.draft_depth, kept + 1
    usual = plan.draft_default or DraftShape(0, 0, 0)
    tree_bits, level_bits = _words(nodes), _words(width * max(depth - 1, 0))

    def rows(  # noqa: PLR0917
        launch: Mapping[str, SizeRange],
        name: str,
        usual_rows: int,
        most: int,
        wanted: int,
        words: int,
    ) -> ShapeProfile:
        """Launches of up to ``most`` rows, of which ``wanted`` have logits."""
        axes = {
            "T": SizeRange(1, min(usual_rows, most), most),
            "R": SizeRange(1, 1 if most > wanted else min(usual_rows, most), min(wanted, most)),
            "W": SizeRange(1, 1, words),
        }
        return ShapeProfile(name, {**launch, **axes})

    verified = batch * nodes
    level = batch * max(width, depth + 1)
    views = _launch(limits, plan.target_groups)
    target = [rows(views, "decode", 1, batch, batch, 1)]
    if kept:
        target.append(rows(views, "verify", usual.draft_tokens + 1, verified, verified, tree_bits))
    target.append(rows(views, "prefill", limits.max_rows, limits.max_rows, verified, 1))
    profiles = {
        "target": tuple(target),
        "choose": (_one("rows", R=SizeRange(1, usual.draft_tokens + 1, verified)),),
    }
    if not kept:
        return profiles
    extends = max(usual.draft_depth, 1)
    of_draft = _launch(limits, [group for group in plan.groups if group.name == DRAFT_GROUP])
    pool, usual_pool = DraftShape(width, depth, 0).candidates, usual.candidates
    sequences = {"B": SizeRange(1, 1, batch)}
    path = _exact(depth + 1)
    in_tree = {"N1": SizeRange(2, usual.draft_tokens + 1, nodes), "W": SizeRange(1, 1, tree_bits)}
    return profiles | {
        "draft_fuse": tuple(
            _one(name, T=SizeRange(1, min(count, most), most))
            for name, count, most in (
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
            for children in range(1, width + 1)
            for first in sorted({1, children})
        ),
        "select": tuple(
            _one(
                f"{tokens}",
                M=SizeRange(tokens, max(usual_pool, tokens), pool),
                N1=_exact(tokens + 1),
                W=_exact(_words(tokens + 1)),
                draft_tokens=_exact(tokens),
                **sequences,
            )
            for tokens in range(1, kept + 1)
        ),
        "accept": (_one("tree", D1=path, **sequences, **in_tree),),
        "commit": (_one("path", D1=SizeRange(1, usual.draft_depth + 1, depth + 1), **sequences),),
    }


def input_shapes(inputs: Iterable[ir.Value], profile: ShapeProfile) -> tuple[InputShapes, ...]:
    """What a profile says of a graph's inputs; those that never change are left out.

    A scalar has an entry where the profile has an axis of its name: other sizes follow from its
    value. Raises KeyError where the profile lacks an axis.
    """
    found = []
    for value in inputs:
        assert value.name is not None and value.shape is not None
        ranges = [_range(size, profile.axes) for size in value.shape]
        if not ranges and value.name in profile.axes:
            ranges = [profile.axes[value.name]]
        elif all(axis.least == axis.most for axis in ranges) and all(
            isinstance(size, int) for size in value.shape
        ):
            continue
        found.append(
            InputShapes(
                value.name,
                least=tuple(axis.least for axis in ranges),
                usual=tuple(axis.usual for axis in ranges),
                most=tuple(axis.most for axis in ranges),
            )
        )
    return tuple(found)


def _range(size: int | ir.SymbolicDim, axes: Mapping[str, SizeRange]) -> SizeRange:
    return SizeRange(size, size, size) if isinstance(size, int) else axes[str(size.value)]


def _launch(limits: Limits, groups: Iterable[CacheGroup]) -> dict[str, SizeRange]:
    """The axes of sequences and page tables: any number of sequences, views of any length."""
    batch = limits.max_batch_size
    axes = {"B": SizeRange(1, 1, batch), "B1": SizeRange(2, 2, batch + 1)}
    for group in groups:
        most = group_pages(group, limits, tokens=limits.max_seq_len)
        axes[f"P_{group.name}"] = SizeRange(1, -(-most // 4), most)
    return axes


def _exact(size: int) -> SizeRange:
    return SizeRange(size, size, size)


def _one(name: str, **axes: SizeRange) -> ShapeProfile:
    return ShapeProfile(name, axes)


def _words(bits: int) -> int:
    """32-bit words for so many bits; a launch has one at least."""
    return max(1, -(-bits // 32))
