"""What the compiler says of the default kernels of decoding layers at GPT-OSS's sizes.

An engine takes another candidate where the default spills registers, so that nothing else would
tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from gpt_oss_requests import attention, experts_request, projection, qkv

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler, required
from specbuild.plugins_cuda.launches import RESERVED_BYTES, Kernel, LoweringRequest
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.lowering import MOST_HIDDEN
from specbuild.plugins_cuda.rms_moe.memory import DYNAMIC_ALIGNMENT

ROWS = (1, 8, 16, 32, 64, 128, 256)


@cache
def compiler() -> Compiler:
    """One for all tests: it keeps what it has compiled."""
    return Compiler("sm_90a")


def compiled(kernels: Iterable[Kernel]) -> Compiled:
    """The compiler refuses hot kernels that spill, also those that it keeps."""
    return required(compiler().compile(kernels, lambda: None))


def compile_defaults(name: str, *requests: LoweringRequest) -> None:
    lower = op_named(name).lower
    assert lower is not None
    decoding = [replace(request, phase="decode") for request in requests]
    kernels = [launch.kernel for request in decoding for launch in lower(request).launches]
    assert any(kernel.hot for kernel in kernels)
    compiled(kernels)


@pytest.mark.parametrize("rows", ROWS)
def test_no_default_spills_registers(rows: int) -> None:
    compile_defaults("RmsMoe", experts_request(rows), experts_request(rows, 128))
    compile_defaults("RmsQkvRope", qkv(rows))
    compile_defaults("Linear", projection(rows, 4096), projection(rows, 17280))


@pytest.mark.parametrize("hidden", [2048, 2944, 4096, MOST_HIDDEN])
def test_no_router_of_other_widths_spills_registers(hidden: int) -> None:
    request = replace(experts_request(1, 128, hidden), phase="decode")
    lower = op_named("RmsMoe").lower
    assert lower is not None
    router = lower(request).launches[0]
    assert router.kernel.entry == "route_rows"
    compiled([router.kernel])


def test_attention_of_many_sequences_spills_no_registers() -> None:
    shapes = ((64, 1), (16, 1), (16, 4), (16, 5), (8, 8))
    compile_defaults("PagedTreeAttention", *(attention(*shape) for shape in shapes))


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("rows", ROWS)
def test_no_two_ctas_of_experts_fit_a_multiprocessor(rows: int, experts: int) -> None:
    """By the static memory that the compiler gives them; one does fit."""
    request = experts_request(rows, experts)
    lower = op_named("RmsMoe").lower
    assert lower is not None
    launches = lower(request).launches[1:3]
    kernels = compiled(each.kernel for each in launches).kernels
    multiprocessor = request.target.shared_bytes_per_block + RESERVED_BYTES
    for launch in launches:
        static = kernels[launch.kernel].shared_bytes
        dynamic_from = -(-static // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT
        taken = RESERVED_BYTES + dynamic_from + launch.shared_bytes
        assert taken <= multiprocessor < 2 * taken


@pytest.mark.parametrize("rows", ROWS)
def test_candidates_are_different_kernels(rows: int) -> None:
    """Else tune times one twice, and what spills has nothing smaller to make way for."""
    op = op_named("Linear")
    assert op.tactics is not None
    assert op.lower is not None
    request = replace(projection(rows, 4096), phase="decode")
    launches = [op.lower(replace(request, tactic=t)).launches for t in op.tactics(request)]
    assert all(a != b for n, a in enumerate(launches) for b in launches[:n])
