"""Compiler reports for the default kernels of decoding layers at real sizes.

An engine uses another candidate if the default spills registers, so no other test would detect it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from deepseek_requests import routed_request
from dense_requests import (
    GEMMA3_12B,
    GEMMA3_27B,
    GEMMA4_26B,
    GEMMA4_E4B,
    GRANITE_8B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    MINIMAX_M2,
    OLMO_32B,
    QWEN3_8B,
    QWEN3_32B,
    Sizes,
    layer_requests,
)
from gpt_oss_requests import attention, experts_request, projection, qkv, screened_head
from left_out import slow
from mla_requests import DEEPSEEK_V2_LITE, GLM, YOUTU, MlaSizes, mla_requests
from mla_requests import DEEPSEEK_V3 as MLA_OF_V3

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler, required
from specbuild.plugins_cuda.cluster_logits.lowering import MAX_WIDTH
from specbuild.plugins_cuda.launches import (
    RESERVED_BYTES,
    Kernel,
    Lowering,
    LoweringRequest,
    Phase,
    TensorInfo,
    Unsupported,
)
from specbuild.plugins_cuda.linear.storage import (
    BF16,
    CODE_STORAGES,
    Q4_K,
    Q6_K,
    STORAGES,
    Storage,
)
from specbuild.plugins_cuda.linear.streaming import MAX_ROWS
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.cases import (
    DEEPSEEK_V3,
    GEMMA4,
    GLM_FLASH,
    KIMI_K2,
    QWEN3_BF16,
    QWEN3_NEXT,
    QWEN35_MOE,
    V2_LITE,
    Layer,
)
from specbuild.plugins_cuda.rms_moe.lowering import MAX_HIDDEN
from specbuild.plugins_cuda.rms_moe.memory import DYNAMIC_ALIGNMENT

ROWS = (1, 8, 16, 32, 64, 128, 256)


@cache
def compiler() -> Compiler:
    """A compiler for all tests, which caches its results."""
    return Compiler("sm_90a")


def compiled(kernels: Iterable[Kernel]) -> Compiled:
    """Compile kernels; hot kernels that spill are rejected, also cached ones."""
    return required(compiler().compile(kernels, lambda: None))


def compile_defaults(name: str, *requests: LoweringRequest) -> None:
    lower = op_named(name).lower
    assert lower is not None
    decoding = [replace(request, phase="decode") for request in requests]
    kernels = [launch.kernel for request in decoding for launch in lower(request).launches]
    assert any(kernel.hot for kernel in kernels)
    compiled(kernels)


def require_candidate(name: str, request: LoweringRequest) -> None:
    """Assert that one of the op's tactics, or its only form, does not spill."""
    op = op_named(name)
    assert op.lower is not None
    tactics = ({},) if op.tactics is None else op.tactics(request)
    lowerings = (op.lower(replace(request, tactic=tactic)) for tactic in tactics)
    kernels = ([launch.kernel for launch in lowering.launches] for lowering in lowerings)
    assert any(isinstance(compiler().compile(k, lambda: None), Compiled) for k in kernels), name


@pytest.mark.parametrize("rows", [1, 64, *slow(*(n for n in ROWS if n not in (1, 64)))])
def test_no_default_spills_registers(rows: int) -> None:
    compile_defaults("RmsMoe", experts_request(rows), experts_request(rows, 128))
    compile_defaults("RmsQkvRope", qkv(rows))
    compile_defaults("Linear", projection(rows, 4096), projection(rows, 17280))


@pytest.mark.parametrize("rows", [32, *slow(1, 8, 16)])
def test_no_screened_head_spills_registers(rows: int) -> None:
    """With more than 16 rows, its lower bounds are in shared memory."""
    compile_defaults("HeadScreen", screened_head(rows))


@pytest.mark.parametrize("width", [256, 1024, MAX_WIDTH])
def test_no_clustered_head_spills_registers(width: int) -> None:
    """The first width is that of Gemma 4's assistants with clusters."""
    vocab, clusters, numbers = 262144, 2048, TensorInfo((1,), "int32")
    tensors = {
        "scores": TensorInfo((1, clusters), "float32"), "x": TensorInfo((1, width), "bfloat16"),
        "logit_rows": numbers, "weight": TensorInfo((vocab, width), "bfloat16"),
        "cluster_of": TensorInfo((vocab,), "int32"), "logits": TensorInfo((1, vocab), "float32"),
    }  # fmt: skip
    compile_defaults("ClusterLogits", LoweringRequest(tensors, {"read": 32, "unread": -1e9}))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize("columns", [2048, 4096, 5120, 8192])
def test_screened_heads_of_other_widths_do_not_spill(columns: int, rows: int) -> None:
    require_candidate("HeadScreen", screened_head(rows, columns, 128256))


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (DEEPSEEK_V3, 1), (GLM_FLASH, 64), (GEMMA4, 4), *[
            pytest.param(layer, rows, marks=pytest.mark.slow)
            for layer in (DEEPSEEK_V3, KIMI_K2, GLM_FLASH, V2_LITE, QWEN3_NEXT, QWEN35_MOE, GEMMA4)
            for rows in (1, 8, 64, 256)
            if (layer, rows) not in ((DEEPSEEK_V3, 1), (GLM_FLASH, 64))
        ],
    ],
)  # fmt: skip
def test_no_default_of_routed_experts_spills_registers(layer: Layer, rows: int) -> None:
    forms = (replace(layer, rows=rows, bf16=bf16) for bf16 in (False, True))
    compile_defaults("RmsMoe", *map(routed_request, forms))


@pytest.mark.parametrize(
    ("gate_up", "down", "rows"),
    [(Q4_K, Q6_K, 1), *[
        pytest.param(storage, storage, rows, marks=pytest.mark.slow)
        for storage in CODE_STORAGES for rows in (1, 8, 64, 256, 512)
    ]],
)  # fmt: skip
def test_quantized_experts_have_kernels_that_do_not_spill(
    gate_up: Storage, down: Storage, rows: int
) -> None:
    """The sizes are those of Qwen3-30B-A3B. None of them has been measured."""
    phase: Phase = "decode" if rows <= MAX_ROWS else "prefill"
    request = routed_request(replace(QWEN3_BF16, rows=rows, units=(gate_up, down)))
    require_candidate("RmsMoe", replace(request, phase=phase))


@pytest.mark.parametrize(
    ("sizes", "storage", "rows"),
    [(LLAMA_8B, BF16, 1), *[
        pytest.param(sizes, storage, rows, marks=pytest.mark.slow)
        for sizes in (LLAMA_1B, LLAMA_8B, QWEN3_8B, QWEN3_32B, LLAMA_70B)
        for storage in STORAGES for rows in (1, 8, 16, 64, 2048)
    ], (GEMMA3_27B, BF16, 4), *[
        pytest.param(sizes, BF16, rows, marks=pytest.mark.slow)
        for sizes in (GRANITE_8B, OLMO_32B, MINIMAX_M2, GEMMA3_12B, GEMMA3_27B, GEMMA4_26B,
                      GEMMA4_E4B)
        for rows in (1, 16, 64, 2048)
    ]],
)  # fmt: skip
def test_dense_layers_have_kernels_that_do_not_spill(
    sizes: Sizes, storage: Storage, rows: int
) -> None:
    """None of these sizes has been measured: a build uses the first candidate that compiles."""
    phase: Phase = "decode" if rows <= MAX_ROWS else "prefill"
    for name, request in layer_requests(sizes, rows, storage).items():
        op = op_named(name.partition(" ")[0])
        if phase == "prefill" and op.name == "HeadChoose":
            continue
        require_candidate(op.name, replace(request, phase=phase))


@pytest.mark.parametrize(
    ("sizes", "storage", "rows"),
    [(GLM, BF16, 4), *[
        pytest.param(sizes, storage, rows, marks=pytest.mark.slow)
        for sizes, storages in ((YOUTU, STORAGES), (GLM, [BF16]), (MLA_OF_V3, [BF16]),
                                (DEEPSEEK_V2_LITE, [BF16]))
        for storage in storages for rows in (1, 16, 64, 2048)
    ]],
)  # fmt: skip
def test_layers_with_mla_have_kernels_that_do_not_spill(
    sizes: MlaSizes, storage: Storage, rows: int
) -> None:
    phase: Phase = "decode" if rows <= MAX_ROWS else "prefill"
    for name, request in mla_requests(sizes, rows, storage).items():
        require_candidate(name, replace(request, phase=phase))


def test_rejects_chunks_whose_latent_sums_exceed_the_memory() -> None:
    """For the 128 heads of DeepSeek-V3, a build then uses launches of fewer rows."""
    attend = op_named("MlaAttention")

    def lowered(rows: int) -> Lowering | Unsupported:
        request = mla_requests(MLA_OF_V3, rows)[attend.name]
        return attend.lowered(replace(request, phase="prefill"))

    assert isinstance(lowered(4096), Lowering)
    refused = lowered(8192)
    assert isinstance(refused, Unsupported)
    assert "chunk of 8192 rows and 128 heads leaves 1024 MiB of sums" in refused.reason


@pytest.mark.parametrize("hidden", [2048, 2944, 4096, 4320, 5120, MAX_HIDDEN])
def test_no_router_of_other_widths_spills_registers(hidden: int) -> None:
    request = replace(experts_request(1, 128, hidden), phase="decode")
    lower = op_named("RmsMoe").lower
    assert lower is not None
    router = lower(request).launches[0]
    assert router.kernel.entry == "route_rows"
    compiled([router.kernel])


@pytest.mark.parametrize(("batch", "rows"), [(16, 1), (16, 5), *slow((64, 1), (16, 4), (8, 8))])
def test_attention_of_many_sequences_spills_no_registers(batch: int, rows: int) -> None:
    compile_defaults("PagedTreeAttention", attention(batch, rows))


@pytest.mark.parametrize("total", [8, 16, 64])
@pytest.mark.parametrize("heads", [(32, 16), (16, 16), (24, 8)])
def test_windows_with_few_heads_per_kv_head_have_a_kernel(
    heads: tuple[int, int], total: int
) -> None:
    """Gemma 3 27B and others; a launch for the ends of a few prompts has 8 rows."""
    request = attention(16, 1, heads=heads, width=128, window=1024, total=total)
    require_candidate("PagedTreeAttention", replace(request, phase="decode"))


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("rows", [1, 64, *slow(*(n for n in ROWS if n not in (1, 64)))])
def test_one_cta_of_experts_fits_a_multiprocessor(rows: int, experts: int) -> None:
    """Use the static memory that the compiler reports; one CTA fits."""
    request = experts_request(rows, experts)
    lower = op_named("RmsMoe").lower
    assert lower is not None
    launches = lower(request).launches[1:3]
    kernels = compiled(each.kernel for each in launches).kernels
    multiprocessor = request.target.shared_bytes_per_block + RESERVED_BYTES
    for launch in launches:
        static = kernels[launch.kernel].shared_bytes
        dynamic_from = -(-static // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT
        used_bytes = RESERVED_BYTES + dynamic_from + launch.shared_bytes
        assert used_bytes <= multiprocessor < 2 * used_bytes


@pytest.mark.parametrize("rows", ROWS)
def test_candidates_are_different_kernels(rows: int) -> None:
    """Otherwise tune measures one kernel twice, and a spilling one has no smaller alternative."""
    op = op_named("Linear")
    assert op.tactics is not None
    assert op.lower is not None
    request = replace(projection(rows, 4096), phase="decode")
    launches = [op.lower(replace(request, tactic=t)).launches for t in op.tactics(request)]
    assert all(a != b for n, a in enumerate(launches) for b in launches[:n])
