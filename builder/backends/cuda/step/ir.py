"""The intermediate representation of a program: op calls on tensors without final offsets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbuild.plugins_cuda.launches import ProgramPhase, TensorInfo
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.rank_sum.rounds import exchange_rounds
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import ITEM_BYTES, Space

ACTIVATIONS = "bfloat16"
_FIXED_DTYPES = {"float32": "float32", "int32": "int32"}


@dataclass(frozen=True, eq=False)
class Storage:
    """A buffer of the plan, or a piece of the arena with an offset assigned later."""

    name: str
    space: Space
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """A contiguous tensor within a storage."""

    storage: Storage
    offset: int
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.info.shape

    def view(self, *shape: int) -> Tensor:
        """Return the same bytes with another shape; a smaller shape uses the first bytes."""
        info = TensorInfo(shape, self.info.dtype)
        if info.nbytes > self.info.nbytes:
            raise ValueError(f"{self.storage.name}: cannot view {self.shape} as {shape}")
        return Tensor(self.storage, self.offset, info)

    def rows(self, first: int, count: int) -> Tensor:
        """Return entries ``first`` to ``first + count`` of the first axis."""
        info = TensorInfo((count, *self.shape[1:]), self.info.dtype)
        if not 0 <= first <= first + count <= self.shape[0]:
            raise ValueError(
                f"{self.storage.name}: entries {first} to {first + count} exceed {self.shape}"
            )
        offset = first * (info.nbytes // count)
        return Tensor(self.storage, self.offset + offset, info)

    def part(self, index: int) -> Tensor:
        """Return entry ``index`` of the first axis."""
        info = TensorInfo(self.shape[1:], self.info.dtype)
        if not 0 <= index < self.shape[0]:
            raise ValueError(f"{self.storage.name}: entry {index} exceeds {self.shape}")
        return Tensor(self.storage, self.offset + index * info.nbytes, info)


@dataclass(frozen=True)
class Call:
    """An op on tensors by declared name; an output that aliases an input is the same tensor.

    ``section`` is the part of a decode step to which the call belongs.
    """

    op: OpSpec
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    section: str = ""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs and outputs together."""
        return {**self.inputs, **self.outputs}


@dataclass
class ProgramIr:
    """Op calls in order. :meth:`call` appends one to ``section`` and returns its outputs.

    ``rounds`` counts the rounds of exchange between ranks in the calls so far.
    """

    name: str
    phase: ProgramPhase
    calls: list[Call] = field(default_factory=list)
    section: str = ""
    rounds: int = 0

    def call(
        self,
        op_name: str,
        inputs: Mapping[str, Tensor | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Mapping[str, Tensor] | None = None,
        optional_outputs: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Append a call and return its outputs by declared name.

        An output is the tensor in ``outputs``, else the input that it aliases, else new scratch.
        ``sizes`` are axes that no input has. Raises ValueError if an axis has two sizes or none, or
        a required input is missing.
        """
        op = op_named(op_name)
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        all_attributes = op.complete(attributes or {})
        axes = _axes(op, present, {**all_attributes, **(sizes or {})}, outputs or {})
        aliases = dict(op.aliases)
        results = {}
        for spec in op.outputs:
            if outputs is not None and spec.name in outputs:
                results[spec.name] = outputs[spec.name]
            elif spec.name in aliases:
                if aliases[spec.name] in present:
                    results[spec.name] = present[aliases[spec.name]]
            elif optional_outputs or not spec.optional:
                results[spec.name] = self.scratch(spec.name, _info(op, spec, axes))
        if op.contribution is not None:
            all_attributes["exchange"] = self.rounds
            rows = next(iter(results.values())).shape[0]
            self.rounds += exchange_rounds(rows)
        # Empty tensors have no location in a plan.
        stored = {name: tensor for name, tensor in results.items() if tensor.info.nbytes}
        self.calls.append(Call(op, all_attributes, present, stored, self.section))
        return results

    def end_exchanges(self) -> None:
        """Append the call that counts the program's exchange rounds for the next program."""
        exchanges = [call for call in self.calls if call.op.contribution is not None]
        if exchanges:
            self.call(
                "RankAdvance", {"state": exchanges[0].inputs["state"]}, {"rounds": self.rounds}
            )

    def scratch(self, name: str, info: TensorInfo) -> Tensor:
        """Return a new tensor in the arena."""
        return Tensor(
            Storage(f"{self.name}/{len(self.calls)}.{name}", "arena", info.nbytes), 0, info
        )


def _axes(
    op: OpSpec,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
) -> dict[str, int]:
    """Return the size of every axis of the tensors, attributes and ``sizes``."""
    declared = {spec.name for spec in op.inputs}
    unknown = sorted(set(inputs) - declared)
    missing = [s.name for s in op.inputs if not s.optional and s.name not in inputs]
    if unknown or missing:
        raise ValueError(f"{op.name}: unknown inputs {unknown}, missing inputs {missing}")
    axes = {name: value for name, value in sizes.items() if type(value) is int}
    tensors = {**inputs, **outputs}
    for spec in (*op.inputs, *op.outputs):
        tensor = tensors.get(spec.name)
        if tensor is None or spec.rank_free:
            continue
        if len(spec.axes) != len(tensor.shape):
            raise ValueError(
                f"{op.name}.{spec.name}: got shape {tensor.shape} for the axes {spec.axes}"
            )
        for axis, size in zip(spec.axes, tensor.shape, strict=True):
            expected = int(axis) if axis.isdigit() else axes.setdefault(axis, size)
            if expected != size:
                raise ValueError(
                    f"{op.name}.{spec.name}: axis {axis} is {size}, expected {expected}"
                )
    return axes


def _info(op: OpSpec, spec: TensorSpec, axes: Mapping[str, int]) -> TensorInfo:
    unknown = [axis for axis in spec.axes if not axis.isdigit() and axis not in axes]
    if unknown:
        raise ValueError(f"{op.name}.{spec.name}: the size of {unknown} is not defined")
    shape = tuple(int(axis) if axis.isdigit() else axes[axis] for axis in spec.axes)
    return TensorInfo(shape, _FIXED_DTYPES.get(spec.dtype, ACTIVATIONS))


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]
