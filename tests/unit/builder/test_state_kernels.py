"""Compiler reports for kernels of hybrid models at real sizes: no registers are spilled."""

from __future__ import annotations

from functools import cache

import pytest

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, required
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, TensorInfo
from specbuild.plugins_cuda.lazy_gated_delta.op import OP as LAZY_GATED_DELTA
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.paged_tree_attention.op import OP as ATTENTION

KEY_HEADS, WIDTH, TAPS, NODES = 16, 128, 4, 8


@cache
def compiler() -> Compiler:
    """A compiler for all tests, which caches its results."""
    return Compiler("sm_90a")


def compile_default(op: OpSpec, request: LoweringRequest) -> None:
    """Compile the default launches; SpecbuildError if a hot kernel spills."""
    assert op.lower is not None
    kernels = [launch.kernel for launch in op.lower(request).launches]
    required(compiler().compile(kernels, lambda: None))


def recurrent_states(value_heads: int, rows: int, *, nodes: int = NODES) -> LoweringRequest:
    """Return a request for ``rows`` rows of each of four sequences, 0 for prompts."""
    batch, keys, values = 4, KEY_HEADS * WIDTH, value_heads * WIDTH
    total, channels = batch * rows or 2048, 2 * keys + values
    shapes = {
        "rows": (total, channels + values + 2 * value_heads),
        "conv_weight": (channels, 1, TAPS),
        "decay_scale": (value_heads,),
        "dt_bias": (value_heads,),
        "norm": (WIDTH,),
        "positions": (total,),
        "row_start": (batch + 1,),
        "ancestor_bits": (total, -(-nodes // 32)),
        "state_slot": (batch,),
        "replay_path": (batch, NODES),
        "replay_count": (batch,),
        "tail_pool": (batch, TAPS - 1 + nodes, channels),
        "state_pool": (batch, value_heads, WIDTH, WIDTH),
        "factor_pool": (batch, nodes, values + keys + value_heads),
    }
    kinds = {"T": "bfloat16", "float32": "float32", "int32": "int32"}
    tensors = {
        name: TensorInfo(shape, kinds[LAZY_GATED_DELTA.tensor(name).dtype])
        for name, shape in shapes.items()
    }
    attributes = {"key_heads": KEY_HEADS, "eps": 1e-6, "stores": int(not rows)}
    phase: Phase = "decode" if rows else "prefill"
    return LoweringRequest(tensors, attributes, phase)


@pytest.mark.parametrize("value_heads", [48, 32, 64], ids=["27B", "35B-A3B", "397B"])
@pytest.mark.parametrize("rows", [1, 4, 8, 0], ids=["1 row", "4 rows", "8 rows", "prompts"])
def test_recurrent_states_do_not_spill(value_heads: int, rows: int) -> None:
    """Prompts use the kernels for chunks."""
    compile_default(LAZY_GATED_DELTA, recurrent_states(value_heads, rows))


@pytest.mark.parametrize(("rows", "threads"), [(8, 256), (32, 256), (48, 512), (64, 512)])
def test_ctas_have_half_the_warps_if_two_fit_a_multiprocessor(rows: int, threads: int) -> None:
    """The rows of a larger tree take more than half of its shared memory."""
    request = recurrent_states(48, rows, nodes=rows)
    assert LAZY_GATED_DELTA.lower is not None
    [launch] = LAZY_GATED_DELTA.lower(request).launches
    assert launch.block == threads
    assert request.target.fits_twice(launch.shared_bytes) == (threads == 256)


@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 2)], ids=["27B", "35B-A3B"])
@pytest.mark.parametrize(("rows", "phase"), [(1, "decode"), (4, "decode"), (2048, "prefill")])
def test_attention_with_heads_of_256_does_not_spill(
    heads: int, kv_heads: int, rows: int, phase: Phase
) -> None:
    pages, pool = 130, (130, kv_heads, 64, 256)
    shapes = {"q": (rows, heads, 256), "attended": (rows, heads, 256), "k_pool": pool}
    tables = {
        "page_table": (1, 1, pages),
        "row_start": (2,),
        "row_slot": (rows,),
        "tree_start": (1,),
        "ancestor_bits": (rows, 1),
    }
    tensors = {name: TensorInfo(s, "bfloat16") for name, s in {**shapes, "v_pool": pool}.items()}
    tensors |= {name: TensorInfo(s, "int32") for name, s in tables.items()}
    attributes = ATTENTION.complete({"scale": 0.0625, "window": 0})
    compile_default(ATTENTION, LoweringRequest(tensors, attributes, phase))
