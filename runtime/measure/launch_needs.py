"""Finds the launches of a program whose results other launches read, from their arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from specbuild.runtime.engine_dir.plan import ITEM_BYTES, POINTER, Binding, Plan, Program

Extent = tuple[int, int]  # first byte, end
Write = tuple[Extent, int, int]  # by an op, and by a launch of it


def launch_needs(plan: Plan, program: Program) -> list[tuple[int, ...]]:
    """Return, for every launch, the earlier launches whose results it reads, in order.

    For each place this is the last launch that wrote there. The launches of one op pass data in
    scratch or outputs; there it is the last earlier launch that points to the place. Results of the
    previous step are not counted.
    """
    lives = _Lifetimes(plan, program)
    constants = {i for i, buffer in enumerate(plan.buffers) if buffer.space == "weights"}
    writes: dict[int, list[Write]] = defaultdict(list)
    last_uses: dict[tuple[int, int, int], int] = {}
    all_needs = []
    for index, launch in enumerate(program.launches):
        call = program.ops[launch.op]
        inputs, outputs = _extents(call.inputs), _extents(call.outputs)
        needs: set[int] = set()
        places = {
            (argument[1], argument[2])
            for argument in launch.arguments
            if argument[0] == POINTER and argument[1] not in constants
        }
        for place in places:
            if (within := (launch.op, *place)) in last_uses:
                needs.add(last_uses[within])
            elif place in inputs:
                wrote = writes[place[0]]
                needs |= lives.last_writer(wrote, inputs[place], launch.op, place[0])
        for place in places - (inputs.keys() - outputs.keys()):
            last_uses[launch.op, *place] = index
            if place in outputs:
                writes[place[0]].append((outputs[place], launch.op, index))
        all_needs.append(tuple(sorted(needs)))
    return all_needs


class _Lifetimes:
    """The lifetimes of tensors in the arena."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._arena = {i for i, buffer in enumerate(plan.buffers) if buffer.space == "arena"}
        self._lifetimes = program.lifetimes

    def last_writer(
        self, writes: Sequence[Write], extent: Extent, reader: int, buffer: int
    ) -> set[int]:
        """Return the launch that wrote there last, if its result is still valid for the reader."""
        for (start, end), op, launch in reversed(writes):
            if start < extent[1] and extent[0] < end:
                is_valid = buffer not in self._arena or self._is_valid(extent, op, reader)
                return {launch} if is_valid else set()
        return set()

    def _is_valid(self, extent: Extent, writer: int, reader: int) -> bool:
        return any(
            life.first <= writer
            and reader <= life.last
            and life.offset <= extent[0]
            and extent[1] <= life.offset + life.bytes
            for life in self._lifetimes
        )


def _extents(bindings: dict[str, Binding]) -> dict[tuple[int, int], Extent]:
    return {
        (b.buffer, b.offset): (b.offset, b.offset + ITEM_BYTES[b.dtype] * prod(b.shape))
        for b in bindings.values()
    }
