"""The launches of projections with a specific epilogue."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, OpLaunch
from specbuild.plugins_cuda.linear.many_tokens import (
    ARRIVED,
    SUMS,
    TOKENS,
    dense_kernel,
    many_tokens,
    ready_tokens,
)
from specbuild.plugins_cuda.linear.storage import weight_tiles
from specbuild.plugins_cuda.linear.streaming import Dense, streaming
from specbuild.plugins_cuda.rms_norms import rounding_code


def projection_of(op: str, request: LoweringRequest) -> Dense:
    """Return the product of an op with inputs ``x`` [T, K], ``weight`` and an optional ``norm``."""
    tensors = request.tensors
    rows, width = tensors["x"].shape
    tiles, blocks, storage = weight_tiles(tensors["weight"], width)
    return Dense(op, tiles, blocks, rows, normed="norm" in tensors, storage=storage)


def lower_projection(
    request: LoweringRequest,
    dense: Dense,
    *,
    folder: str,
    constants: tuple[tuple[str, int | float], ...],
    arguments: tuple[str, ...],
    triggers_late: bool = False,
) -> Lowering:
    """Return the kernel named like its ``folder``, which normalizes itself; for many tokens others.

    If CTAs split K too, this is ``<folder>_of_many``, after a launch that normalizes the rows or
    writes panels, if required. ``constants`` and ``arguments`` are those of the op; those of the
    cut, the norm and the rows are added. ``triggers_late`` is that of the launch. The norm is
    GPT-OSS's if the op has no attribute ``rounding``. Raises SpecbuildError for over 256 rows.
    """
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    eps = float(request.attributes["eps"])
    rounding = str(request.attributes.get("rounding", "gpt_oss"))
    norm = (("HAS_NORM", int(dense.normed)), ("NORM_ROUNDING", rounding_code(rounding)))
    built = (*cut.constants, *norm, *constants, ("EPS", eps))
    launch = OpLaunch(
        dense_kernel(folder, built, many),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *(("x",) if many else ("x", "norm")),
            *arguments,
            *((TOKENS if many.ready else None, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
        triggers_late=triggers_late,
    )
    if not many:
        return Lowering((launch,))
    if not many.ready:
        return Lowering((launch,), many.workspaces)
    tokens = ready_tokens(dense, many, eps=eps, rounding=rounding)
    return Lowering((tokens, launch), many.workspaces)


def lower_product(
    request: LoweringRequest,
    dense: Dense,
    *,
    folder: str,
    constants: tuple[tuple[str, int | float], ...],
    arguments: tuple[str, ...],
) -> Lowering:
    """Return the launches as :func:`lower_projection`, for an op without a norm.

    A previous launch only writes panels. ``arguments`` start with ``x``.
    """
    many = many_tokens(request, dense)
    cut = many.cut if many else streaming(request, dense)
    launch = OpLaunch(
        dense_kernel(folder, (*cut.constants, *constants), many),
        grid=cut.grid,
        block=cut.block,
        shared_bytes=cut.shared_bytes,
        arguments=(
            *arguments,
            *((TOKENS if many.ready else None, SUMS, ARRIVED) if many else ()),
            dense.rows,
        ),
    )
    if not many or not many.ready:
        return Lowering((launch,), many.workspaces if many else ())
    return Lowering((ready_tokens(dense, many), launch), many.workspaces)
