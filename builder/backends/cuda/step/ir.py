"""A program while it is being built: op calls over tensors whose places are not yet settled."""

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
    """A buffer of the plan, or a piece of the arena that the memory plan will place."""

    name: str
    space: Space
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """A packed tensor somewhere in a storage."""

    storage: Storage
    offset: int
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.info.shape

    def view(self, *shape: int) -> Tensor:
        """The same bytes under another shape; the first of them where it is smaller."""
        info = TensorInfo(shape, self.info.dtype)
        if info.nbytes > self.info.nbytes:
            raise ValueError(f"{self.storage.name}: {self.shape} viewed as {shape}")
        return Tensor(self.storage, self.offset, info)

    def rows(self, first: int, count: int) -> Tensor:
        """Entries ``first`` to ``first + count`` of the first axis."""
        info = TensorInfo((count, *self.shape[1:]), self.info.dtype)
        if not 0 <= first <= first + count <= self.shape[0]:
            raise ValueError(f"{self.storage.name}: entries {first} + {count} of {self.shape}")
        offset = first * (info.nbytes // count)
        return Tensor(self.storage, self.offset + offset, info)

    def part(self, index: int) -> Tensor:
        """Entry ``index`` of the first axis."""
        info = TensorInfo(self.shape[1:], self.info.dtype)
        if not 0 <= index < self.shape[0]:
            raise ValueError(f"{self.storage.name}: entry {index} of {self.shape}")
        return Tensor(self.storage, self.offset + index * info.nbytes, info)


@dataclass(frozen=True)
class Call:
    """An op on tensors, by declared name; an output that aliases an input is the same tensor.

    ``section``: the part of a decoding step that it belongs to.
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
    """Op calls in order. :meth:`call` appends one, to ``section``, and gives its outputs.

    ``rounds``: how many rounds of exchange between ranks the calls so far have.
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
        """Appends a call and returns its outputs by declared name.

        An output lies where ``outputs`` says, else where the input lies that it aliases, else in
        the arena. ``sizes`` are axes that no input names. Raises ValueError where an axis has
        two sizes or none, or an input that is not optional is missing.
        """
        op = op_named(op_name)
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        filled = op.complete(attributes or {})
        axes = _axes(op, present, {**filled, **(sizes or {})}, outputs or {})
        aliases = dict(op.aliases)
        made = {}
        for spec in op.outputs:
            if outputs is not None and spec.name in outputs:
                made[spec.name] = outputs[spec.name]
            elif spec.name in aliases:
                if aliases[spec.name] in present:
                    made[spec.name] = present[aliases[spec.name]]
            elif optional_outputs or not spec.optional:
                made[spec.name] = self.scratch(spec.name, _info(op, spec, axes))
        if op.contribution is not None:
            filled["exchange"] = self.rounds
            rows = next(iter(made.values())).shape[0]
            self.rounds += exchange_rounds(rows)
        # Of what has no elements a plan has no place.
        placed = {name: tensor for name, tensor in made.items() if tensor.info.nbytes}
        self.calls.append(Call(op, filled, present, placed, self.section))
        return made

    def end_exchanges(self) -> None:
        """Appends what counts the program's rounds, if it has some: the next one's come after."""
        exchanges = [call for call in self.calls if call.op.contribution is not None]
        if exchanges:
            self.call(
                "RankAdvance", {"state": exchanges[0].inputs["state"]}, {"rounds": self.rounds}
            )

    def scratch(self, name: str, info: TensorInfo) -> Tensor:
        """A new tensor in the arena."""
        return Tensor(
            Storage(f"{self.name}/{len(self.calls)}.{name}", "arena", info.nbytes), 0, info
        )


def _axes(
    op: OpSpec,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
) -> dict[str, int]:
    """The size of every axis that a tensor, an attribute or ``sizes`` names."""
    declared = {spec.name for spec in op.inputs}
    unknown = sorted(set(inputs) - declared)
    missing = [s.name for s in op.inputs if not s.optional and s.name not in inputs]
    if unknown or missing:
        raise ValueError(f"{op.name}: inputs unknown {unknown}, missing {missing}")
    axes = {name: value for name, value in sizes.items() if type(value) is int}
    given = {**inputs, **outputs}
    for spec in (*op.inputs, *op.outputs):
        tensor = given.get(spec.name)
        if tensor is None or spec.rank_free:
            continue
        if len(spec.axes) != len(tensor.shape):
            raise ValueError(f"{op.name}.{spec.name}: shape {tensor.shape}, axes {spec.axes}")
        for axis, size in zip(spec.axes, tensor.shape, strict=True):
            wanted = int(axis) if axis.isdigit() else axes.setdefault(axis, size)
            if wanted != size:
                raise ValueError(f"{op.name}.{spec.name}: axis {axis} is {size}, was {wanted}")
    return axes


def _info(op: OpSpec, spec: TensorSpec, axes: Mapping[str, int]) -> TensorInfo:
    unsettled = [axis for axis in spec.axes if not axis.isdigit() and axis not in axes]
    if unsettled:
        raise ValueError(f"{op.name}.{spec.name}: nothing says the size of {unsettled}")
    shape = tuple(int(axis) if axis.isdigit() else axes[axis] for axis in spec.axes)
    return TensorInfo(shape, _FIXED_DTYPES.get(spec.dtype, ACTIVATIONS))


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a packed tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]
