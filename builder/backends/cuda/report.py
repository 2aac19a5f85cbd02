"""What a build tells of a CUDA engine: kernels, programs, and the bytes that each moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.builder.backends.cuda.plan.plan_writer import ARENA, LoweredProgram
from specbuild.builder.backends.cuda.step.ir import Call, tensor_bytes
from specbuild.builder.backends.cuda.tactics.tactic_book import TacticsReport
from specbuild.plugins_cuda.launches import Unsupported
from specbuild.runtime.engine_dir.plan import CompiledKernel, Plan, ProgramEntry

_EXPERTS = "all_experts"
# The pools of which an op reads what its rows see.
_CONTEXT_POOLS = {"PagedTreeAttention": ("k_pool", "v_pool"), "MlaAttention": ("c_pool",)}
# First axes of weights that are looked up by token or by position.
_TABLES = (("V",), ("P",))


@dataclass(frozen=True)
class ProgramReport:
    """A program's launches, scratch memory, and the bytes that it reads at least.

    ``weight_bytes`` are those of dense weights, each as often as an op reads it; of a table that
    is looked up, the rows that are. ``expert_bytes`` is what all experts take that it may read;
    a launch reads those that its rows chose, of ``experts`` in each layer, and the shared ones,
    which count as experts.
    ``context_bytes_per_token`` is read of the caches for every token of a sequence's context, and
    ``window_bytes`` for a full window, once per sequence.
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
    """``memory`` in bytes: weights, caches, state and arena; ring is memory of the host.

    Of an engine of several GPUs it is that of one, with what the others write (exchange).

    ``tactics`` is None where nothing was chosen by a tactic file. ``left_out``: kernels that spill
    registers, which others stand for, and tactics of other kernels or another compiler.
    """

    gpu: str
    driver_version: int
    memory: dict[str, int]
    kernels: tuple[CompiledKernel, ...]
    programs: tuple[ProgramReport, ...]
    tactics: TacticsReport | None = None
    left_out: tuple[Unsupported, ...] = ()


def cuda_report(plan: Plan, programs: Sequence[tuple[ProgramEntry, LoweredProgram]]) -> CudaReport:
    """The report of a finished plan."""
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
    dense = experts_bytes = experts = context = window = 0
    for call in lowered.ir.calls:
        for name, tensor in call.inputs.items():
            if tensor.storage.space != "weights":
                continue
            if _EXPERTS in call.op.tensor(name).axes[:1]:
                experts_bytes += tensor.info.nbytes
                experts = tensor.shape[0]
            else:
                dense += _read_bytes(call, name)
        if call.op.name in _CONTEXT_POOLS:
            pools = [call.inputs[name] for name in _CONTEXT_POOLS[call.op.name]]
            per_token = sum(tensor_bytes((p.shape[1], p.shape[3]), p.info.dtype) for p in pools)
            if call.attributes["window"]:
                window += per_token * call.attributes["window"]
            else:
                context += per_token
    return ProgramReport(
        name=entry.name,
        launches=entry.launches,
        arena_bytes=lowered.arena_bytes,
        weight_bytes=dense,
        expert_bytes=experts_bytes,
        experts=experts,
        context_bytes_per_token=context,
        window_bytes=window,
    )


def _read_bytes(call: Call, name: str) -> int:
    """Bytes of a weight that a call reads: all, or of a table one row for every row."""
    tensor = call.inputs[name]
    if call.op.tensor(name).axes[:1] not in _TABLES:
        return tensor.info.nbytes
    rows = next(iter(call.outputs.values())).shape[0]
    return min(rows, tensor.shape[0]) * (tensor.info.nbytes // tensor.shape[0])
