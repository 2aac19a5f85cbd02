"""Prompt programs of every size launch the same kernels, with other tiles only.

The number of tokens of a tile may differ, and how weights of experts with few rows are loaded. A
row's sums therefore have one order in every program: the other constants determine the splits of K
and of the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from gpt_oss_requests import attention, bf16, experts_request, projection, qkv

from specbuild.builder.backends.cuda.step.programs import PREFILL_ROWS
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.registry import op_named

# Constants: tokens of a tile, stages of the ring, the maximum number of token tiles, and the shared
# memory of ring and outputs.
OF_TOKENS = {"COLUMNS", "STAGES", "MAX_TILES", "SHARED_BYTES"}
# Weight rows of a tile of few tokens, and the ring that loads them.
OF_FEW = {"WARPS", "CHUNK_STEPS", "CHUNKS", "WARP_TILES"}


def swiglu(rows: int) -> LoweringRequest:
    tensors = {"x": bf16(rows, 2880), "norm": bf16(2880), "gate_up": bf16(1080, 90, 512),
               "h": bf16(rows, 8640)}  # fmt: skip
    attributes = op_named("RmsSwiglu").complete({"eps": 1e-5})
    return LoweringRequest(tensors, attributes)


def windowed(rows: int) -> LoweringRequest:
    plain = attention(2, rows // 2)
    return replace(plain, attributes={**plain.attributes, "window": 128})


def latents(rows: int) -> LoweringRequest:
    plain = attention(2, rows // 2)
    others = {
        "c_pool": bf16(99, 1, 64, 512), "w_k": bf16(512, 8, 64), "b_k": bf16(8, 64),
        "w_v": bf16(512, 8, 64), "b_v": bf16(8, 64),
        "cos": TensorInfo((2048, 32), "float32"), "sin": TensorInfo((2048, 32), "float32"),
    }  # fmt: skip
    other_tensors = {n: info for n, info in plain.tensors.items() if n not in ("k_pool", "v_pool")}
    return replace(plain, tensors=other_tensors | others)


REQUESTS: dict[str, tuple[str, Callable[[int], LoweringRequest]]] = {
    "Linear": ("Linear", lambda rows: projection(rows, 4096)),
    "RmsQkvRope": ("RmsQkvRope", qkv),
    "RmsSwiglu": ("RmsSwiglu", swiglu),
    "RmsMoe": ("RmsMoe", experts_request),
    "full attention": ("PagedTreeAttention", lambda rows: attention(2, rows // 2)),
    "a window": ("PagedTreeAttention", windowed),
    "latents": ("MlaAttention", latents),
}


def kernels(
    name: str, request: LoweringRequest, tokens: set[str]
) -> list[tuple[str, str, str, object]]:
    """Return the launches in order, without the constants of token tiles."""
    lower = op_named(name).lower
    assert lower is not None
    return [
        (
            k.folder,
            k.file.replace("prefill_few_", "prefill_"),
            k.entry.replace("moe_few_", "moe_"),
            [c for c in k.constants if c[0] not in tokens],
        )
        for k in (launch.kernel for launch in lower(replace(request, phase="prefill")).launches)
    ]


@pytest.mark.parametrize("layer", REQUESTS)
def test_every_size_launches_the_same_kernels(layer: str) -> None:
    name, request_of = REQUESTS[layer]
    tokens = set() if "ttention" in name else OF_TOKENS
    tokens = tokens | OF_FEW if name == "RmsMoe" else tokens
    first = kernels(name, request_of(PREFILL_ROWS[0]), tokens)
    assert all(file.startswith(("prefill", "rebuild")) for _, file, _, _ in first)
    for rows in (*PREFILL_ROWS, 72, 1000):
        assert kernels(name, request_of(rows), tokens) == first, rows


@pytest.mark.parametrize("layer", REQUESTS)
def test_candidates_differ_in_tile_tokens_and_instruction_only(layer: str) -> None:
    """``wgmma`` 0 computes the same products in the same order; ``tune`` compares their bits."""
    name, request_of = REQUESTS[layer]
    op, tokens = op_named(name), OF_TOKENS | OF_FEW | {"WGMMA"}
    for rows in PREFILL_ROWS:
        request = replace(request_of(rows), phase="prefill")
        default = kernels(name, request, tokens)
        assert op.tactics is not None
        for tactic in op.tactics(request):
            assert set(tactic) <= {"columns", "wgmma", "few"}
            assert kernels(name, replace(request, tactic=tactic), tokens) == default
