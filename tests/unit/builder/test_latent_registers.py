"""Latent attention at real sizes does not spill registers, for any layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, required
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.mla_attention.op import OP

HEADS, KV_HEADS, WIDTH = 64, 8, 64
PAGE, PAGES = 64, 2049
LISTED = 2116


def request(
    entry: int,
    *,
    batch: int,
    rows: int,
    lists: bool = False,
    viewed: bool = False,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, WIDTH),
) -> LoweringRequest:
    """Return a request of rows over 131072 tokens of latents, ``rows`` for each sequence.

    ``heads`` are query heads, KV heads and their width, by default those of GPT-OSS.
    """
    q_heads, kv_heads, width = heads
    total = batch * rows
    tensors = {
        "q": (total, q_heads, width),
        "c_pool": (batch * PAGES, 1, PAGE, entry),
        "w_k": (entry, kv_heads, width),
        "b_k": (kv_heads, width),
        "w_v": (entry, kv_heads, width),
        "b_v": (kv_heads, width),
        "attended": (total, q_heads, width),
    }
    floats = {"cos": (131072, width // 2), "sin": (131072, width // 2), "sinks": (q_heads,)}
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
    by_dtype = {"bfloat16": tensors, "float32": floats, "int32": indices}
    infos = {n: TensorInfo(s, dtype) for dtype, group in by_dtype.items() for n, s in group.items()}
    return LoweringRequest(infos, {"scale": width**-0.5, "window": 0})


def compile_all(entry: int, shapes: Sequence[tuple[int, int]], **form: Any) -> None:
    """Compile batches with these numbers of rows; the compiler rejects hot kernels that spill."""
    assert OP.lower is not None
    requests = [request(entry, batch=b, rows=r, **form) for b, r in shapes]
    kernels = [launch.kernel for r in requests for launch in OP.lower(r).launches]
    assert all(kernel.hot for kernel in kernels)
    required(Compiler("sm_90a").compile(kernels, lambda: None))


def test_ctas_of_many_splits_and_lists_spill_no_register() -> None:
    compile_all(512, [(8, 1)], lists=True, viewed=True)


@pytest.mark.slow
@pytest.mark.parametrize("viewed", [False, True], ids=["positions", "views"])
@pytest.mark.parametrize("lists", [False, True], ids=["plain", "lists"])
@pytest.mark.parametrize("entry", [256, 432, 496, 512, 768])
def test_no_width_of_latents_spills_registers(entry: int, lists: bool, viewed: bool) -> None:
    """Cover CTAs of single splits and of groups, with two rows each and with shared keys."""
    compile_all(entry, [(1, 1), (8, 1), (8, 2), (8, 4)], lists=lists, viewed=viewed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "entry", "shares"),
    [(32, 128, True), (32, 192, True), (32, 208, False), (16, 64, True), (16, 80, False)],
)
def test_narrow_heads_with_shared_keys_spill_no_registers(
    width: int, entry: int, shares: bool
) -> None:
    names = ("rebuild_keys", "attend_stored")
    for lists in (False, True):
        one = request(entry, batch=8, rows=4, lists=lists, heads=(16, 2, width))
        assert OP.lower is not None
        kernels = [launch.kernel for launch in OP.lower(one).launches]
        stored = [kernel for kernel in kernels if kernel.entry in names]
        assert bool(stored) == shares
        required(Compiler("sm_90a").compile(stored, lambda: None))


@pytest.mark.parametrize(("heads", "width"), [(64, 64), (16, 128), (128, 128), (20, 256)])
def test_values_of_many_splits_spill_no_register(heads: int, width: int) -> None:
    """Use absorbed queries over 131072 tokens, with one or two CTAs on a multiprocessor."""
    tensors = {
        "q": (3, heads, 576), "c_pool": (PAGES, 1, PAGE, 576), "w_v": (512, heads, width),
        "attended": (3, heads, width),
    }  # fmt: skip
    indices = {
        "page_table": (3, 1, PAGES), "row_start": (4,), "row_slot": (3,), "tree_start": (3,),
        "ancestor_bits": (3, 1),
    }  # fmt: skip
    infos = {n: TensorInfo(shape, "bfloat16") for n, shape in tensors.items()}
    infos |= {n: TensorInfo(shape, "int32") for n, shape in indices.items()}
    request = LoweringRequest(infos, {"scale": 192**-0.5, "window": 0})
    assert OP.lower is not None
    kernels = [launch.kernel for launch in OP.lower(request).launches]
    assert "project_absorbed" in [kernel.entry for kernel in kernels]
    required(Compiler("sm_90a").compile(kernels, lambda: None))


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("entry", [256, 320, 384, 448, 496, 512])
def test_offsets_in_shared_memory(entry: int, rows: int) -> None:
    """A kernel's own shared memory precedes its buffers, which begin at a multiple of 1024."""
    assert OP.lower is not None
    for launch in OP.lower(request(entry, batch=8, rows=rows)).launches:
        noted = (
            -(-4 * 8 * (1 + rows) // 1024) * 1024 if launch.kernel.entry == "rebuild_keys" else 0
        )
        assert launch.shared_bytes + noted <= 227 * 1024, launch.kernel.entry
