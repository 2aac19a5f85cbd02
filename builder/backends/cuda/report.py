"""The build report of a CUDA engine: kernels, programs, and the bytes that each program reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.plan.plan_writer import ARENA, LoweredProgram
from specbuild.builder.backends.cuda.step.ir import Call, tensor_bytes
from specbuild.builder.backends.cuda.tactics.tactic_book import TacticsReport
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.plan import CompiledKernel, Plan, ProgramEntry

_EXPERTS = "all_experts"
# The pools whose visible tokens an op reads.
_CONTEXT_POOLS = {"PagedTreeAttention": ("k_pool", "v_pool"), "MlaAttention": ("c_pool",)}
# The first axes of weights that are lookup tables, by token or by position.
_TABLES = (("V",), ("P",))


@dataclass(frozen=True)
class ProgramReport:
    """A program's launches, its scratch memory, and a lower bound of the bytes that it reads.

    ``weight_bytes`` counts a dense weight as often as an op reads it, and of a lookup table only
    the rows read. ``expert_bytes`` counts all routed and shared experts; a launch reads only those
    that its rows select, of ``experts`` in each layer. The caches contribute
    ``context_bytes_per_token`` for every token of a sequence's context, and ``window_bytes`` for
    the full window of each sequence.
    """

    name: str
    launches: int
    arena_bytes: int
    weight_bytes: int
    expert_bytes: int
    experts: int
    context_bytes_per_token: int
    window_bytes: int


@dataclass(frozen=True)
class CudaReport:
    """``memory`` is in bytes: weights, caches, state and arena; ring is host memory.

    For several GPUs it is the memory of one, including the buffers that the others write
    (exchange). ``tactics`` is None if no tactic file was used. ``left_out`` lists kernels that
    spill registers, and tactics for other kernels or another compiler.
    """

    gpu: str
    driver_version: int
    memory: dict[str, int]
    kernels: tuple[CompiledKernel, ...]
    programs: tuple[ProgramReport, ...]
    tactics: TacticsReport | None = None
    left_out: tuple[Unsupported, ...] = ()


def cuda_report(plan: Plan, programs: Sequence[tuple[ProgramEntry, LoweredProgram]]) -> CudaReport:
    """Return the report of a finished plan."""
    memory: dict[str, int] = dict.fromkeys(("weights", "cache", "state", "ring", ARENA), 0)
    for buffer in plan.buffers:
        memory[buffer.space] = memory.get(buffer.space, 0) + buffer.bytes
    return CudaReport(
        gpu=plan.gpu,
        driver_version=plan.driver_version,
        memory=memory,
        kernels=plan.kernels,
        programs=tuple(_program(entry, lowered) for entry, lowered in programs),
    )


def _program(entry: ProgramEntry, lowered: LoweredProgram) -> ProgramReport:
    weight_bytes = expert_bytes = experts = context_bytes = window_bytes = 0
    for call in lowered.ir.calls:
        for name, tensor in call.inputs.items():
            if tensor.storage.space != "weights":
                continue
            if _EXPERTS in call.op.tensor(name).axes[:1]:
                expert_bytes += tensor.info.nbytes
                experts = tensor.shape[0]
            else:
                weight_bytes += _read_bytes(call, name)
        if call.op.name in _CONTEXT_POOLS:
            pools = [call.inputs[name] for name in _CONTEXT_POOLS[call.op.name]]
            per_token = sum(tensor_bytes((p.shape[1], p.shape[3]), p.info.dtype) for p in pools)
            if call.attributes["window"]:
                window_bytes += per_token * call.attributes["window"]
            else:
                context_bytes += per_token
    return ProgramReport(
        name=entry.name,
        launches=entry.launches,
        arena_bytes=lowered.arena_bytes,
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        experts=experts,
        context_bytes_per_token=context_bytes,
        window_bytes=window_bytes,
    )


def _read_bytes(call: Call, name: str) -> int:
    """Return the bytes of a weight that a call reads; of a table, one table row per row."""
    tensor = call.inputs[name]
    if call.op.tensor(name).axes[:1] not in _TABLES:
        return tensor.info.nbytes
    rows = next(iter(call.outputs.values())).shape[0]
    return min(rows, tensor.shape[0]) * (tensor.info.nbytes // tensor.shape[0])
