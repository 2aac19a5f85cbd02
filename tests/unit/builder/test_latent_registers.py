"""Latent attention at real sizes leaves no register in memory, whatever shape a layer has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specbuild.builder.backends.cuda.kernels.nvrtc import Compiler
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.mla_attention.op import OP

HEADS, KV_HEADS, WIDTH = 64, 8, 64
PAGE, PAGES = 64, 2049
LISTED = 2116


def request(
    entry: int, *, batch: int, rows: int, lists: bool = False, viewed: bool = False
) -> LoweringRequest:
    """Rows of GPT-OSS's heads over 131072 tokens of latents, ``rows`` of each sequence."""
    total = batch * rows
    tensors = {
        "q": (total, HEADS, WIDTH),
        "c_pool": (batch * PAGES, 1, PAGE, entry),
        "w_k": (entry, KV_HEADS, WIDTH),
        "b_k": (KV_HEADS, WIDTH),
        "w_v": (entry, KV_HEADS, WIDTH),
        "b_v": (KV_HEADS, WIDTH),
        "attended": (total, HEADS, WIDTH),
    }
    floats = {"cos": (131072, WIDTH // 2), "sin": (131072, WIDTH // 2), "sinks": (HEADS,)}
    indices = {
        "page_table": (batch, 1, PAGES),
        "row_start": (batch + 1,),
        "row_slot": (total,),
        "tree_start": (batch,),
        "ancestor_bits": (total, 1),
    }
    if lists:
        indices["selected"] = (total, 1, LISTED)
    if viewed:
        indices["page_position"] = (batch, PAGES)
    given = {"bfloat16": tensors, "float32": floats, "int32": indices}
    infos = {n: TensorInfo(s, dtype) for dtype, group in given.items() for n, s in group.items()}
    return LoweringRequest(infos, {"scale": WIDTH**-0.5, "window": 0})


def compile_all(entry: int, shapes: Sequence[tuple[int, int]], **form: bool) -> None:
    """For batches of so many rows each; the compiler refuses hot kernels that spill."""
    assert OP.lower is not None
    requests = [request(entry, batch=b, rows=r, **form) for b, r in shapes]
    kernels = [launch.kernel for r in requests for launch in OP.lower(r).launches]
    assert all(kernel.hot for kernel in kernels)
    Compiler("sm_90a").compile(kernels, lambda: None)


def test_ctas_of_many_slots_and_lists_spill_no_register() -> None:
    compile_all(512, [(8, 1)], lists=True, viewed=True)


@pytest.mark.slow
@pytest.mark.parametrize("viewed", [False, True], ids=["positions", "views"])
@pytest.mark.parametrize("lists", [False, True], ids=["plain", "lists"])
@pytest.mark.parametrize("entry", [256, 432, 496, 512, 768])
def test_no_width_spills_registers(entry: int, lists: bool, viewed: bool) -> None:
    """In CTAs that take single slots, in those that take groups of them, with two rows each, and
    where rows share keys."""
    compile_all(entry, [(1, 1), (8, 1), (8, 2), (8, 4)], lists=lists, viewed=viewed)
