"""The sizes at which a TensorRT engine runs each role: one optimization profile per size.

Kernels are compiled for exact numbers of rows, and launches are padded to the next size. Launches
of up to ``MAX_DECODE_ROWS`` rows use the batch-invariant decode kernels, larger ones the prefill
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.step.programs import batch_buckets, draft_shapes
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.plugins_cuda.launches import Phase
from specbuild.runtime.cache.layout import layouts
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits, ShapeProfile, SizeRange
from specbuild.runtime.errors import SpecbuildError

# Sizes of short prompts and of the last chunk of long ones. Larger chunks are in PREFILL_ROWS.
CHUNK_ROWS = (16, 64, MAX_DECODE_ROWS)
PREFILL_ROWS = (1024, 2048)


@dataclass(frozen=True)
class RoleSizes:
    """The sizes of a role: ``fixed`` axes have one size, those of ``profiles`` one per profile.

    A scalar input that determines launches is listed among the axes by its name.
    """

    fixed: Mapping[str, int]
    profiles: tuple[ShapeProfile, ...]

    def every(self) -> list[dict[str, int]]:
        """Return the sizes of all axes in each profile."""
        return [
            {**self.fixed, **{name: axis.most for name, axis in profile.axes.items()}}
            for profile in self.profiles
        ]


def phase_of(sizes: Mapping[str, int]) -> Phase:
    """Return which kernels run a launch of this size."""
    return "prefill" if sizes.get("T", 0) > MAX_DECODE_ROWS else "decode"


def exact(**axes: int) -> ShapeProfile:
    """Return a profile with exactly these sizes."""
    name = ",".join(f"{axis}={size}" for axis, size in axes.items())
    return ShapeProfile(name, {axis: SizeRange(size, size, size) for axis, size in axes.items()})


def role_sizes(
    engine_sizes: EngineSizes, prefill_rows: Sequence[int], *, has_draft: bool
) -> dict[str, RoleSizes]:
    """Return the sizes of every role. Raises SpecbuildError if a step has too many rows."""
    limits = engine_sizes.limits
    batch, nodes = limits.max_batch_size, limits.draft_tokens + 1
    if batch * nodes > MAX_DECODE_ROWS:
        raise SpecbuildError(
            f"{batch} sequences of {nodes} tree nodes are {batch * nodes} rows, but kernels verify "
            f"at most {MAX_DECODE_ROWS}; reduce --max-batch-size or --draft-tokens"
        )
    tables = {
        f"P_{name}": layout.logical_pages(limits)
        for name, layout in layouts(engine_sizes.groups).items()
    }
    shapes = draft_shapes(limits) if has_draft else ()
    shared = {"B": batch, "B1": batch + 1, **tables}
    # Scoring a text needs the logits of all rows of a chunk.
    verify_rows = [*_verify_rows(limits, shapes), MAX_DECODE_ROWS]
    chunks = [*CHUNK_ROWS, *prefill_rows]
    roles = {
        "target": RoleSizes(
            {**shared, "W": _words(nodes)}, _rows_and_logits(verify_rows, chunks, batch)
        ),
        "choose": RoleSizes({}, tuple(exact(R=rows) for rows in sorted({*verify_rows, batch}))),
    }
    return roles | (_drafting(limits, shapes, shared, chunks) if has_draft else {})


def _verify_rows(limits: Limits, shapes: Iterable[DraftShape]) -> list[int]:
    """Return the numbers of rows that all need logits: a tree or one row per sequence."""
    nodes = {1, limits.draft_tokens + 1, *(shape.draft_tokens + 1 for shape in shapes)}
    return sorted({batch * count for batch in _batches(limits) for count in nodes})


def _rows_and_logits(
    all_logits: Iterable[int], rows: Iterable[int], batch: int
) -> tuple[ShapeProfile, ...]:
    """Return launches with logits for all rows, and launches with logits for one per sequence."""
    pairs = {(count, count) for count in all_logits}
    pairs |= {(count, batch) for count in (*all_logits, *rows) if count > batch}
    return tuple(exact(T=count, R=logits) for count, logits in sorted(pairs))


def _drafting(
    limits: Limits, shapes: Sequence[DraftShape], shared: Mapping[str, int], chunks: Sequence[int]
) -> dict[str, RoleSizes]:
    batch, depth, max_tokens = limits.max_batch_size, limits.draft_depth, limits.draft_tokens
    children = range(1, limits.draft_top_k + 1)
    levels = sorted({count * k for count in _batches(limits) for k in (1, limits.draft_top_k)})
    ingest_rows = {
        count * ingested for count in _batches(limits) for ingested in range(1, depth + 2)
    }
    rows = sorted({*ingest_rows, *levels, *chunks})
    pool = DraftShape(limits.draft_top_k, depth, max_tokens).candidates
    words = _words(max(1, limits.draft_top_k * (depth - 1)))
    tree_tokens = sorted({max_tokens, *(shape.draft_tokens for shape in shapes)})
    return {
        "draft_fuse": RoleSizes({}, tuple(exact(T=count) for count in rows)),
        "draft": RoleSizes({**shared, "W": words}, _rows_and_logits(levels, rows, batch)),
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
                for n in range(1, max_tokens + 1)
            ),
        ),
        "accept": RoleSizes(
            {}, tuple(exact(B=batch, N1=n + 1, W=_words(n + 1), D1=depth + 1) for n in tree_tokens)
        ),
        "commit": RoleSizes({}, (exact(B=batch, D1=depth + 1),)),
    }


def _batches(limits: Limits) -> list[int]:
    """Return the batch sizes with compiled kernels."""
    max_batch = limits.max_batch_size
    return sorted({batch for batch in batch_buckets(max_batch) if batch < max_batch} | {max_batch})


def _words(bits: int) -> int:
    return -(-bits // 32)
