"""The sizes at which a TensorRT engine runs each role: one optimisation profile for each.

Kernels are made for exact numbers of rows; what runs is padded to the next. Up to
``MAX_DECODE_ROWS`` rows they are those that decode, batch-invariant; above, a prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.step.programs import batch_buckets, draft_shapes
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.plugins_cuda.launches import Phase
from specbuild.runtime.cache.layout import layouts
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits, ShapeProfile, SizeRange
from specbuild.runtime.errors import SpecbuildError

# Short prompts and what is left of long ones; longer chunks have kernels of their own.
CHUNK_ROWS = (16, 64, MAX_DECODE_ROWS)
PREFILL_ROWS = (1024, 2048)


@dataclass(frozen=True)
class RoleSizes:
    """``fixed`` axes have one size, those of ``profiles`` one in each of them.

    A scalar input, whose value launches are made for, stands among the axes by its name.
    """

    fixed: Mapping[str, int]
    profiles: tuple[ShapeProfile, ...]

    def every(self) -> list[dict[str, int]]:
        """The size of every axis, in each profile."""
        return [
            {**self.fixed, **{name: axis.most for name, axis in profile.axes.items()}}
            for profile in self.profiles
        ]


def phase_of(sizes: Mapping[str, int]) -> Phase:
    """Which kernels run a launch of this size."""
    return "prefill" if sizes.get("T", 0) > MAX_DECODE_ROWS else "decode"


def exact(**axes: int) -> ShapeProfile:
    """A profile of one size."""
    name = ",".join(f"{axis}={size}" for axis, size in axes.items())
    return ShapeProfile(name, {axis: SizeRange(size, size, size) for axis, size in axes.items()})


def role_sizes(
    plan: EnginePlan, prefill_rows: Sequence[int], *, drafted: bool
) -> dict[str, RoleSizes]:
    """The sizes of every role. Raises SpecbuildError where a step has too many rows."""
    limits = plan.limits
    batch, nodes = limits.max_batch_size, limits.draft_tokens + 1
    if batch * nodes > MAX_DECODE_ROWS:
        raise SpecbuildError(
            f"{batch} sequences of {nodes} tree nodes are {batch * nodes} rows, kernels verify at "
            f"most {MAX_DECODE_ROWS}; build with a smaller --max-batch-size or --draft-tokens"
        )
    tables = {
        f"P_{name}": layout.logical_pages(limits) for name, layout in layouts(plan.groups).items()
    }
    shapes = draft_shapes(limits) if drafted else ()
    every = {"B": batch, "B1": batch + 1, **tables}
    # Scoring a text asks for the logits of whole chunks.
    verified = [*_verified_rows(limits, shapes), MAX_DECODE_ROWS]
    chunks = [*CHUNK_ROWS, *prefill_rows]
    found = {
        "target": RoleSizes(
            {**every, "W": _words(nodes)}, _rows_and_logits(verified, chunks, batch)
        ),
        "choose": RoleSizes({}, tuple(exact(R=rows) for rows in sorted({*verified, batch}))),
    }
    return found | (_drafting(limits, shapes, every, chunks) if drafted else {})


def _verified_rows(limits: Limits, shapes: Iterable[DraftShape]) -> list[int]:
    """Rows whose logits are all wanted: a tree, or one row, of each of several sequences."""
    nodes = {1, limits.draft_tokens + 1, *(shape.draft_tokens + 1 for shape in shapes)}
    return sorted({batch * count for batch in _batches(limits) for count in nodes})


def _rows_and_logits(
    all_logits: Iterable[int], rows: Iterable[int], batch: int
) -> tuple[ShapeProfile, ...]:
    """Launches that want every row's logits, and those that want one row's of each sequence."""
    pairs = {(count, count) for count in all_logits}
    pairs |= {(count, batch) for count in (*all_logits, *rows) if count > batch}
    return tuple(exact(T=count, R=logits) for count, logits in sorted(pairs))


def _drafting(
    limits: Limits, shapes: Sequence[DraftShape], every: Mapping[str, int], chunks: Sequence[int]
) -> dict[str, RoleSizes]:
    batch, depth, most = limits.max_batch_size, limits.draft_depth, limits.draft_tokens
    children = range(1, limits.draft_top_k + 1)
    levels = sorted({count * k for count in _batches(limits) for k in (1, limits.draft_top_k)})
    extended = {count * taken for count in _batches(limits) for taken in range(1, depth + 2)}
    rows = sorted({*extended, *levels, *chunks})
    pool = DraftShape(limits.draft_top_k, depth, most).candidates
    words = _words(max(1, limits.draft_top_k * (depth - 1)))
    kept = sorted({most, *(shape.draft_tokens for shape in shapes)})
    return {
        "draft_fuse": RoleSizes({}, tuple(exact(T=count) for count in rows)),
        "draft": RoleSizes({**every, "W": words}, _rows_and_logits(levels, rows, batch)),
        "expand": RoleSizes(
            {},
            tuple(
                exact(B=batch, BF=batch * f, F=f, K=k, FK=f * k, top_k=k)
                for k in children
                for f in sorted({1, k})
            ),
        ),
        "select": RoleSizes(
            {},
            tuple(
                exact(B=batch, M=pool, N1=n + 1, W=_words(n + 1), draft_tokens=n)
                for n in range(1, most + 1)
            ),
        ),
        "accept": RoleSizes(
            {}, tuple(exact(B=batch, N1=n + 1, W=_words(n + 1), D1=depth + 1) for n in kept)
        ),
        "commit": RoleSizes({}, (exact(B=batch, D1=depth + 1),)),
    }


def _batches(limits: Limits) -> list[int]:
    """Numbers of sequences that have kernels of their own."""
    most = limits.max_batch_size
    return sorted({batch for batch in batch_buckets(most) if batch < most} | {most})


def _words(bits: int) -> int:
    return -(-bits // 32)
