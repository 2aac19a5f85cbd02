"""Runs a program of a plan on the CPU: every op by its torch reference, at the plan's offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import Binding, OpCall, Plan, Program

# Bytes of all ones: NaN as any float, -1 as an int.
POISON = 0xFF
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class PlanInterpreter:
    """The memory of an engine, as bytes by buffer, and the ops that change it.

    ``weight`` gives a stored tensor by name, at its first use. The arena is poisoned at first, and
    every piece of it before the first op and after the last op that uses it: an op that reads
    what nothing wrote, or what another tensor has replaced, gives NaN or nonsense.
    """

    def __init__(self, plan: Plan, weight: Callable[[str], torch.Tensor]) -> None:
        self._plan = plan
        self._weight = weight
        self._memory: dict[int, torch.Tensor] = {}
        self._ports = {port.name: port for port in plan.ports}

    def port(self, name: str) -> torch.Tensor:
        """A port's tensor; writing to it writes to the engine's memory."""
        port = self._ports[name]
        return self._tensor(Binding(port.buffer, port.offset, port.shape, port.dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """All bytes of a buffer."""
        index = next(i for i, buffer in enumerate(self._plan.buffers) if buffer.name == name)
        return self._bytes(index)

    def run(self, program: Program) -> None:
        """Every op in order, of an engine of one rank."""
        run_in_lockstep([self], program)

    def contribution(self, call: OpCall) -> torch.Tensor | None:
        """What this rank sends to the others, None for an op that exchanges nothing."""
        send = op_named(call.op).contribution
        return None if send is None else send(*self._inputs(call), **call.attributes)

    def call(self, call: OpCall, contributions: Sequence[torch.Tensor] = ()) -> None:
        """Computes an op; ``contributions`` are those of all ranks, where it exchanges data."""
        op = op_named(call.op)
        received = {"contributions": contributions} if contributions else {}
        results: Any = op.reference(*self._inputs(call), **call.attributes, **received)
        results = results if isinstance(results, tuple) else (results,)
        for spec, result in zip(op.outputs, results, strict=True):
            binding = call.outputs.get(spec.name)
            if binding is None or result is None:
                continue
            place = self._tensor(binding)
            if (result.shape, result.dtype) != (place.shape, place.dtype):
                raise AssertionError(
                    f"{call.op}.{spec.name}: the reference gives {result.dtype} "
                    f"{tuple(result.shape)}, the plan has {place.dtype} {tuple(place.shape)}"
                )
            place.copy_(result)

    def _inputs(self, call: OpCall) -> list[torch.Tensor | None]:
        return [
            self._tensor(call.inputs[spec.name]) if spec.name in call.inputs else None
            for spec in op_named(call.op).inputs
        ]

    def _tensor(self, binding: Binding) -> torch.Tensor:
        dtype = _DTYPES[binding.dtype]
        count = torch.Size(binding.shape).numel() * dtype.itemsize
        span = self._bytes(binding.buffer)[binding.offset : binding.offset + count]
        if len(span) != count:
            raise AssertionError(f"{self._plan.buffers[binding.buffer].name}: {binding} is outside")
        return span.view(dtype).view(binding.shape)

    def _bytes(self, index: int) -> torch.Tensor:
        if index not in self._memory:
            buffer = self._plan.buffers[index]
            if buffer.space == "weights":
                stored = self._weight(buffer.name).contiguous().flatten().view(torch.uint8)
                if len(stored) != buffer.bytes:
                    raise AssertionError(f"{buffer.name}: {len(stored)} bytes stored")
                self._memory[index] = stored
            else:
                self._memory[index] = torch.zeros(buffer.bytes, dtype=torch.uint8)
        return self._memory[index]


def run_in_lockstep(ranks: Sequence[PlanInterpreter], program: Program) -> None:
    """A program on all ranks of an engine: each op runs on every rank before the next one does.

    So an op that exchanges data has the contributions of all ranks, from the same op of theirs.
    """
    arenas = [rank.buffer("arena") for rank in ranks]
    _poison(arenas, [slice(None)])
    born: dict[int, list[slice]] = {}
    dead: dict[int, list[slice]] = {}
    for life in program.lifetimes:
        span = slice(life.offset, life.offset + life.bytes)
        born.setdefault(life.first, []).append(span)
        dead.setdefault(life.last, []).append(span)
    for index, call in enumerate(program.ops):
        _poison(arenas, born.get(index, ()))
        sent = [rank.contribution(call) for rank in ranks]
        contributions = [tensor for tensor in sent if tensor is not None]
        for rank in ranks:
            rank.call(call, contributions)
        _poison(arenas, dead.get(index, ()))


def _poison(arenas: Sequence[torch.Tensor], spans: Sequence[slice]) -> None:
    for arena in arenas:
        for span in spans:
            arena[span] = POISON
