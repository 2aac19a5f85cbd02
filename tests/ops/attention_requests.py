"""Requests of the attention ops, given by sizes only, without arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from specbuild.plugins_cuda.launches import LoweringRequest, Phase, Tactic, TensorInfo

Shapes = dict[str, tuple[int, ...]]
INTEGERS = ("page_table", "row_start", "row_slot", "tree_start", "ancestor_bits", "selected")


def request(
    shapes: Shapes, attributes: dict[str, Any], phase: Phase, tactic: Tactic | None = None
) -> LoweringRequest:
    """Return a request with bf16 tensors, and integers where the op has them."""
    tensors = {
        name: TensorInfo(
            shape,
            "int32" if name in INTEGERS else "float32" if name in ("cos", "sin") else "bfloat16",
        )
        for name, shape in shapes.items()
    }
    return LoweringRequest(tensors, attributes, phase, tactic=tactic or {})


def rows_of(batch: int, rows: int, pages: int, views: int, words: int) -> Shapes:
    """Return the tensors that describe the places of rows."""
    return {
        "page_table": (batch, views, pages),
        "row_start": (batch + 1,),
        "row_slot": (batch * rows,),
        "tree_start": (batch,),
        "ancestor_bits": (batch * rows, words),
    }


def plain(
    *, batch: int = 1, rows: int = 1, width: int = 64, pages: int = 64, window: int = 0,
    phase: Phase = "decode", views: int = 1, words: int = 1, lists: bool = False,
    tactic: Tactic | None = None,
) -> LoweringRequest:  # fmt: skip
    """Return a request of PagedTreeAttention: 8 KV heads, 64 query heads, pages of 64."""
    shapes = {
        "q": (batch * rows, 64, width),
        "k_pool": (4096, 8, 64, width),
        "v_pool": (4096, 8, 64, width),
        "attended": (batch * rows, 64, width),
        **rows_of(batch, rows, pages, views, words),
        **({"selected": (batch * rows, 1, 256)} if lists else {}),
    }
    return request(shapes, {"scale": 0.125, "window": window}, phase, tactic)


def latent(
    *, batch: int = 1, rows: int = 1, entry: int = 512, pages: int = 64, window: int = 0,
    phase: Phase = "decode", rebuilt: bool = True, v_width: int = 64, lists: bool = False,
    tactic: Tactic | None = None,
) -> LoweringRequest:  # fmt: skip
    """Return a request of MlaAttention: 8 KV heads, 64 query heads, keys rebuilt or absorbed."""
    keys = {"w_k": (entry, 8, 64), "cos": (4096, 32), "sin": (4096, 32)} if rebuilt else {}
    value_heads = 8 if rebuilt else 64
    shapes = {
        "q": (batch * rows, 64, 64 if rebuilt else entry),
        "c_pool": (4096, 1, 64, entry),
        "w_v": (entry if rebuilt else min(entry, 512), value_heads, v_width),
        "attended": (batch * rows, 64, v_width),
        **keys,
        **rows_of(batch, rows, pages, 1, 1),
        **({"selected": (batch * rows, 1, 256)} if lists else {}),
    }
    return request(shapes, {"scale": 0.125, "window": window}, phase, tactic)


def swept(make: Callable[..., LoweringRequest], **axes: Sequence[Any]) -> Iterator[LoweringRequest]:
    """Return every combination of some sizes."""
    for values in product(*axes.values()):
        yield make(**dict(zip(axes, values, strict=True)))
