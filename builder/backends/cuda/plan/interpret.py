"""Runs a program of a plan on the CPU: the torch reference of every op at the plan's offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import Binding, OpCall, Plan, Program

# All bits set: NaN as any float, -1 as an int.
POISON = 0xFF
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class PlanInterpreter:
    """The memory of an engine, as bytes by buffer, and the ops that modify it.

    ``weight`` loads a stored tensor by name at its first use. The arena is filled with NaN at the
    start. Each of its tensors is filled again before its first op and after its last op. An op that
    reads unwritten or overwritten memory therefore produces NaN.
    """

    def __init__(self, plan: Plan, weight: Callable[[str], torch.Tensor]) -> None:
        self._plan = plan
        self._weight = weight
        self._memory: dict[int, torch.Tensor] = {}
        self._ports = {port.name: port for port in plan.ports}

    def port(self, name: str) -> torch.Tensor:
        """Return a port's tensor, which shares the engine's memory."""
        port = self._ports[name]
        return self._tensor(Binding(port.buffer, port.offset, port.shape, port.dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """Return all bytes of a buffer."""
        index = next(i for i, buffer in enumerate(self._plan.buffers) if buffer.name == name)
        return self._bytes(index)

    def run(self, program: Program) -> None:
        """Run all ops in order, for an engine with one rank."""
        run_in_lockstep([self], program)

    def contribution(self, call: OpCall) -> torch.Tensor | None:
        """Return the tensor that this rank sends to the others; None for ops without exchange."""
        send = op_named(call.op).contribution
        return None if send is None else send(*self._inputs(call), **call.attributes)

    def call(self, call: OpCall, contributions: Sequence[torch.Tensor] = ()) -> None:
        """Run an op; ``contributions`` has the tensors of all ranks if the op exchanges data."""
        op = op_named(call.op)
        received = {"contributions": contributions} if contributions else {}
        results: Any = op.reference(*self._inputs(call), **call.attributes, **received)
        results = results if isinstance(results, tuple) else (results,)
        for spec, result in zip(op.outputs, results, strict=True):
            binding = call.outputs.get(spec.name)
            if binding is None or result is None:
                continue
            output = self._tensor(binding)
            if (result.shape, result.dtype) != (output.shape, output.dtype):
                raise AssertionError(
                    f"{call.op}.{spec.name}: the reference returned {result.dtype} "
                    f"{tuple(result.shape)}, the plan has {output.dtype} {tuple(output.shape)}"
                )
            output.copy_(result)

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
            raise AssertionError(
                f"{self._plan.buffers[binding.buffer].name}: {binding} exceeds the buffer"
            )
        return span.view(dtype).view(binding.shape)

    def _bytes(self, index: int) -> torch.Tensor:
        if index not in self._memory:
            buffer = self._plan.buffers[index]
            if buffer.space == "weights":
                stored = self._weight(buffer.name).contiguous().flatten().view(torch.uint8)
                if len(stored) != buffer.bytes:
                    raise AssertionError(
                        f"{buffer.name}: got {len(stored)} bytes, expected {buffer.bytes}"
                    )
                self._memory[index] = stored
            else:
                self._memory[index] = torch.zeros(buffer.bytes, dtype=torch.uint8)
        return self._memory[index]


def run_in_lockstep(ranks: Sequence[PlanInterpreter], program: Program) -> None:
    """Run a program on all ranks: each op runs on every rank before the next op.

    An op that exchanges data therefore has the contributions of all ranks.
    """
    arenas = [rank.buffer("arena") for rank in ranks]
    _poison(arenas, [slice(None)])
    starting: dict[int, list[slice]] = {}
    ending: dict[int, list[slice]] = {}
    for life in program.lifetimes:
        span = slice(life.offset, life.offset + life.bytes)
        starting.setdefault(life.first, []).append(span)
        ending.setdefault(life.last, []).append(span)
    for index, call in enumerate(program.ops):
        _poison(arenas, starting.get(index, ()))
        sent = [rank.contribution(call) for rank in ranks]
        contributions = [tensor for tensor in sent if tensor is not None]
        for rank in ranks:
            rank.call(call, contributions)
        _poison(arenas, ending.get(index, ()))


def _poison(arenas: Sequence[torch.Tensor], spans: Sequence[slice]) -> None:
    for arena in arenas:
        for span in spans:
            arena[span] = POISON
