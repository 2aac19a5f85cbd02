"""Which launches of a program read what others of it wrote, from their arguments alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from specbuild.runtime.engine_dir.plan import ITEM_BYTES, POINTER, Binding, Plan, Program

Extent = tuple[int, int]  # first byte, end
Written = tuple[Extent, int, int]  # by an op, and by a launch of it


def launch_needs(plan: Plan, program: Program) -> list[tuple[int, ...]]:
    """Of every launch the launches in front of it whose results it reads, in order.

    Of each place it is the last that wrote there. What the launches of one op leave for each other
    lies in scratch or in outputs: there it is the last in front that points to it. What the step
    before wrote is not counted.
    """
    lives = _Lifetimes(plan, program)
    constants = {i for i, buffer in enumerate(plan.buffers) if buffer.space == "weights"}
    written: dict[int, list[Written]] = defaultdict(list)
    left: dict[tuple[int, int, int], int] = {}
    found = []
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
            if (within := (launch.op, *place)) in left:
                needs.add(left[within])
            elif place in inputs:
                wrote = written[place[0]]
                needs |= lives.last_writer(wrote, inputs[place], launch.op, place[0])
        for place in places - (inputs.keys() - outputs.keys()):
            left[launch.op, *place] = index
            if place in outputs:
                written[place[0]].append((outputs[place], launch.op, index))
        found.append(tuple(sorted(needs)))
    return found


class _Lifetimes:
    """What of the arena lives from one op to another."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._arena = {i for i, buffer in enumerate(plan.buffers) if buffer.space == "arena"}
        self._lifetimes = program.lifetimes

    def last_writer(
        self, written: Sequence[Written], wanted: Extent, reader: int, buffer: int
    ) -> set[int]:
        """The launch that wrote there last, if what it wrote is still there for the reader."""
        for (start, end), op, launch in reversed(written):
            if start < wanted[1] and wanted[0] < end:
                kept = buffer not in self._arena or self._kept(wanted, op, reader)
                return {launch} if kept else set()
        return set()

    def _kept(self, extent: Extent, writer: int, reader: int) -> bool:
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
