"""The launches that compute-sanitizer checks, compiled and ready to run."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled, Compiler, required
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    SMALL_TARGET,
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.plugins_cuda.launches import (
    Kernel,
    Lowering,
    LoweringRequest,
    Phase,
    Tactic,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import CompiledKernel
from specbuild.runtime.errors import SpecbuildError

Arrays: TypeAlias = dict[str, np.ndarray]
# The label, the op, its launches, its inputs and its outputs.
Piece: TypeAlias = tuple[str, str, Lowering, Arrays, Arrays]

FORMS = ("PANELS", "TOKENS_READY", "ROW_GROUPS")

# Numbers of rows with which heads use panels, at real size.
PANEL_ROWS = (33, 64, 80)
PANEL_VOCAB, PANEL_WIDTH = 32000, 2880


def pieces() -> list[Piece]:
    """Yield every entry point of every op with every tactic and form, in the largest small case.

    The GPU counts as one of three multiprocessors, so that a CTA processes several tiles and reuses
    the stages of its rings. Heads at real size follow, whose rows pass through shared memory as
    panels.
    """
    results: list[Piece] = []
    seen: set[Any] = set()
    for _, op, phase, drawn in sorted(_small_cases(), key=lambda small: -small[0]):
        for tactic in _tactics(drawn, phase):
            try:
                lowering = drawn.lowering(phase, SMALL_TARGET, tactic)
            except SpecbuildError:
                continue
            kernels = [launch.kernel for launch in lowering.launches]
            # The width of a tile does not change the executed lines, and would take too long.
            how = tuple(sorted((name, x) for name, x in tactic.items() if name != "columns"))
            entries = {
                (op, phase, kernel.file, kernel.entry, how, forms(kernel)) for kernel in kernels
            }
            if entries <= seen:
                continue
            seen |= entries
            label = f"{op} {phase} {dict(tactic) or ''} {drawn.case.name}"
            inputs, outputs = _arrays(drawn.inputs), _arrays(drawn.outputs)
            results.append((label, op, lowering, inputs, outputs))
    return [*results, *(panel_head(rows) for rows in PANEL_ROWS)]


def forms(kernel: Kernel) -> tuple[tuple[str, Any], ...]:
    """Return the constants that select other lines of an entry point.

    These determine which threads load the tokens and in which form, and which warpgroups share a
    run of tiles.
    """
    return tuple((name, value) for name, value in kernel.constants if name in FORMS)


def panel_head(rows: int) -> Piece:
    """Return HeadChoose of many rows over a draft's vocabulary at the width of GPT-OSS."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ids = torch.arange(rows, dtype=torch.int32)
    inputs = {
        "x": normal(rows, PANEL_WIDTH), "logit_rows": ids, "norm": normal(PANEL_WIDTH),
        "weight": _panel_weight(), "temperature": torch.rand(rows, generator=generator),
        "seed": ids, "position": ids,
    }  # fmt: skip
    outputs = {"choice": ids, "logprob": torch.zeros(rows)}
    op = op_named("HeadChoose")
    tensors = {
        name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in (*inputs.items(), *outputs.items())
    }
    attributes = op.complete({"eps": 1e-5, "rounding": "gpt_oss"})
    assert op.lower is not None
    lowering = op.lower(LoweringRequest(tensors, attributes, "decode", Target()))
    label = f"HeadChoose panels {rows} rows, {PANEL_WIDTH} to {PANEL_VOCAB}"
    # One array for all cases, stored once.
    given = _arrays(inputs) | {"weight": _panel_bits()}
    return label, op.name, lowering, given, _arrays(outputs)


@cache
def _panel_bits() -> np.ndarray:
    return bits(_panel_weight())


@cache
def _panel_weight() -> torch.Tensor:
    shape = (PANEL_VOCAB // 16, PANEL_WIDTH // 32, 512)
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return (values * PANEL_WIDTH**-0.5).bfloat16()


def write_work(file: Path) -> list[str]:
    """Compile the launches of all pieces and store both; return the rejected pieces."""
    compiler, work = Compiler("sm_90a"), pieces()
    everything = [launch.kernel for piece in work for launch in piece[2].launches]
    # Compile all at once, in parallel; rejected kernels, for spills, are then found piece by piece.
    compiler.compile(everything, lambda: None)
    kept: list[Piece] = []
    refused: list[str] = []
    kernels: dict[Kernel, CompiledKernel] = {}
    files: dict[str, bytes] = {}
    for piece in work:
        try:
            launched = [launch.kernel for launch in piece[2].launches]
            compiled = required(compiler.compile(launched, lambda: None))
        except SpecbuildError as refusal:
            refused.append(f"{piece[0]}: {refusal}")
            continue
        kept.append(piece)
        kernels |= compiled.kernels
        files |= compiled.files
    file.write_bytes(pickle.dumps((kept, Compiled(kernels, files))))
    return refused


def _small_cases() -> list[tuple[int, str, Phase, KernelCase]]:
    drawn = [
        (op.name, phase, kernel_case(op, case))
        for op in kernel_ops()
        for phase in phases_of(op)
        for case in cases_for(op, phase, gpu=False)
    ]
    return [
        (sum(a.nbytes for a in _arrays(case.inputs).values()), op, phase, case)
        for op, phase, case in drawn
    ]


def _tactics(drawn: KernelCase, phase: Phase) -> tuple[Tactic, ...]:
    try:
        return drawn.op.tactics(drawn.request(phase, SMALL_TARGET)) if drawn.op.tactics else ({},)
    except SpecbuildError:
        return ()  # the kernels reject the case


def _arrays(tensors: Any) -> Arrays:
    return {name: bits(tensor) for name, tensor in tensors.items()}
