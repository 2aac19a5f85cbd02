"""Compiler reports for the kernels that exchange sums between GPUs, and for routers of prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, required
from specbuild.builder.backends.cuda.tuning.kernel_case import cases_for, kernel_case, phases_of
from specbuild.plugins_cuda.launches import Kernel, Phase, Target
from specbuild.plugins_cuda.rank_sum.rounds import cut_of
from specbuild.plugins_cuda.registry import op_named

WIDTHS = (2880, 4096)  # the second is a power of two
ROWS = (1, 256)


def last_kernel(name: str, phase: Phase) -> Kernel:
    """Return the kernel that exchanges the sums of an op, at the sizes of its first case."""
    op = op_named(name)
    drawn = kernel_case(op, cases_for(op, phase, gpu=False)[0])
    return drawn.lowering(phase, Target()).launches[-1].kernel


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["RankSum", "RankMoe"])
def test_no_exchange_spills_registers(name: str, ranks: int) -> None:
    """An engine of eight GPUs with a hidden size of 4096 could not be built."""
    kernels = []
    for phase in phases_of(op_named(name)):
        kernel = last_kernel(name, phase)
        for width in WIDTHS:
            for rows in ROWS:
                cut = cut_of(rows, width, ranks)
                sizes = {"RANKS": ranks, "WIDTH": width, "WORDS": width, "PAIRS": cut.pairs,
                         "THREADS": cut.threads}  # fmt: skip
                constants = tuple((key, sizes.get(key, old)) for key, old in kernel.constants)
                kernels.append(replace(kernel, constants=constants))
    required(Compiler("sm_90a").compile(kernels, lambda: None))


def test_no_router_of_prompts_spills_registers() -> None:
    """Scores with a bias, another norm and factors at once."""
    op = op_named("RmsMoe")
    cases = [case for case in cases_for(op, "prefill", gpu=False) if "with factors" in case.name]
    lowerings = [kernel_case(op, case).lowering("prefill", Target()) for case in cases]
    kernels = [lowering.launches[0].kernel for lowering in lowerings]
    assert any(kernel.file == "prefill_with_parts.cu" for kernel in kernels)
    required(Compiler("sm_90a").compile(kernels, lambda: None))
