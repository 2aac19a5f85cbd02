"""Checks a program's file: its launches must stay in the memory of their plan.

A launch's pointers are tensors or scratch of its op, whose places and sizes are in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from specbuild.runtime.engine_dir.plan import (
    FLOAT32,
    INT32,
    ITEM_BYTES,
    NULL,
    PEER,
    POINTER,
    RANK,
    ZEROED,
    Launch,
    Plan,
    Program,
    ProgramEntry,
)
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.engine_dir.tensor_table import without_table
from specbuild.runtime.errors import EngineFileError, OutdatedEngineError, SpecbuildError

# CUDA's limits: CTAs along x, y and z, threads of a CTA, and shared memory on any GPU.
MAX_CTAS = (2**31 - 1, 65_535, 65_535)
MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 << 10
# The zeroed scratch of ops, aligned to this number of bytes.
_ZEROED_STEP = 256
_WORDS = (INT32, FLOAT32)
_Tensor = tuple[tuple[int, ...], int]  # its place and its bytes

_MAX_BITS = 2**32 - 1


def read_launches(data: bytes, plan: Plan, entry: ProgramEntry) -> tuple[Launch, ...]:
    """Return the launches in a program's file, checked against the plan. Raises EngineFileError."""
    try:
        program = json.loads(data)
        launches = tuple(_launch(item) for item in program["launches"])
        problem = next(_problems(program, launches, plan, entry), None)
    except (
        ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise _no_program(entry, error) from error
    if problem is not None:
        raise OutdatedEngineError(f"{entry.file}: {problem}")
    return launches


def read_program(data: bytes, entry: ProgramEntry) -> Program:
    """Return the contents of a program's file. Raises EngineFileError."""
    try:
        program = without_table(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_program(entry, error) from error
    try:
        return from_json(Program, program, entry.file)
    except SpecbuildError as error:
        raise OutdatedEngineError(str(error)) from error


def _no_program(entry: ProgramEntry, error: Exception) -> EngineFileError:
    return OutdatedEngineError(f"{entry.file} is no program ({error!r})")


def _launch(item: dict[str, Any]) -> Launch:
    """Return launches without a check: a program may have hundreds, so they are checked later."""
    return Launch(
        kernel=item["kernel"],
        op=item["op"],
        grid=tuple(item["grid"]),
        block=item["block"],
        shared_bytes=item["shared_bytes"],
        arguments=tuple(map(tuple, item["arguments"])),
        programmatic=item["programmatic"],
    )


def _problems(
    program: dict[str, Any], launches: Sequence[Launch], plan: Plan, entry: ProgramEntry
) -> Iterator[str]:
    if len(launches) != entry.launches:
        yield f"{len(launches)} launches, the plan says {entry.launches}"
    ops = _Ops(program, plan, entry)
    yield from ops.problems
    for i, launch in enumerate(launches):
        if not _is_launch(launch, plan, len(ops.places)):
            yield f"launch {i} is malformed"
        elif not ops.hold(launch):
            yield f"launch {i} leaves the memory of its op"


class _Ops:
    """Return the places and sizes of the tensors and the scratch of a program's ops."""

    def __init__(self, program: dict[str, Any], plan: Plan, entry: ProgramEntry) -> None:
        self._bytes = [buffer.bytes for buffer in plan.buffers]
        self._ranks = plan.ranks
        self._exchanges = {i for i, b in enumerate(plan.buffers) if b.space == "exchange"}
        self._rows = _rows_at_ports(plan, entry)
        self._zeroed = {i: b.bytes for i, b in enumerate(plan.buffers) if b.name == ZEROED}
        arena = next((i for i, b in enumerate(plan.buffers) if b.space == "arena"), -1)
        self.problems: list[str] = []
        # By op: the arguments that are its own places, and the maximum of a number.
        self.places: list[set[tuple[int, ...]]] = []
        self._maxima: list[int] = []
        tensors = self._read(program["tensors"])
        if self.problems:
            return
        for op in program["ops"]:
            self._add(op, tensors)
        for life in program["lifetimes"]:
            self._add_scratch(arena, life)

    def hold(self, launch: Launch) -> bool:
        """Check that arguments are places of the launch's op, or counts of their contents."""
        places, maxima = self.places[launch.op], self._maxima[launch.op]
        for argument in launch.arguments:
            if argument in places:
                continue
            kind, *values = argument
            if kind == POINTER:
                is_valid = len(values) == 2 and self._is_zeroed(*values)
            elif kind == PEER:
                is_valid = len(values) == 3 and self._is_of_peer(*values, places=places)
            elif kind == RANK:
                is_valid = self._ranks > 1 and not values
            else:
                bound = maxima if kind == INT32 else _MAX_BITS
                is_valid = kind in _WORDS and len(values) == 1 and 0 <= values[0] <= bound
            if not is_valid:
                return False
        return True

    def _is_of_peer(
        self, distance: int, buffer: int, offset: int, *, places: set[tuple[int, ...]]
    ) -> bool:
        """Return whether a place on another rank is one that others write here for this op."""
        is_exchange = buffer in self._exchanges and (POINTER, buffer, offset) in places
        return is_exchange and 1 <= distance < self._ranks

    def _is_zeroed(self, buffer: int, offset: int) -> bool:
        return 0 <= offset < self._zeroed.get(buffer, 0) and offset % _ZEROED_STEP == 0

    def _read(self, tensors: Sequence[Any]) -> list[_Tensor]:
        """Return the place and the bytes of every tensor."""
        sizes, rows = self._bytes, self._rows
        known_tensors: list[_Tensor] = []
        for index, (buffer, offset, shape, dtype) in enumerate(tensors):
            item = ITEM_BYTES[dtype]
            nbytes = item * math.prod(shape)
            if (
                buffer < 0
                or not 0 <= offset <= sizes[buffer] - nbytes
                or offset % item
                or (shape and min(shape) < 1)
            ):
                self.problems.append(f"tensor {index} lies outside its buffer")
                break
            place = (POINTER, buffer, offset)
            if place in rows and shape[0] not in rows[place]:
                self.problems.append(f"tensor {index} has other rows than the plan says")
                break
            known_tensors.append((place, nbytes))
        return known_tensors

    def _add(self, op: dict[str, Any], tensors: Sequence[_Tensor]) -> None:
        places: set[tuple[int, ...]] = {(NULL,)}
        counts = [v for v in op["attributes"].values() if type(v) is int]
        for row in chain(op["inputs"].values(), op["outputs"].values()):
            if row < 0:
                self.problems.append(f"op {len(self.places)} has tensor {row}")
                break
            place, nbytes = tensors[row]
            places.add(place)
            counts.append(nbytes)
        self.places.append(places)
        self._maxima.append(max(counts, default=0))

    def _add_scratch(self, arena: int, life: dict[str, Any]) -> None:
        offset, nbytes, first, last = life["offset"], life["bytes"], life["first"], life["last"]
        if (
            arena < 0
            or nbytes < 1
            or not 0 <= offset <= self._bytes[arena] - nbytes
            or not 0 <= first <= last < len(self.places)
        ):
            self.problems.append("scratch lies outside the arena")
        elif first == last:
            self.places[first].add((POINTER, arena, offset))
            self._maxima[first] = max(self._maxima[first], nbytes)


def _rows_at_ports(plan: Plan, entry: ProgramEntry) -> dict[tuple[int, ...], range]:
    """Return the rows of a program's tensors at ports that the host fills partially.

    The draft of a step ingests a large batch in pieces.
    """
    if entry.kind == "step":
        rows = {"length": range(1, entry.batch + 1)}
    else:
        exact = {"prefill.token_ids": entry.rows, "prefill.row_start": entry.batch + 1}
        rows = {name: range(count, count + 1) for name, count in exact.items()}
    return {(POINTER, p.buffer, p.offset): rows[p.name] for p in plan.ports if p.name in rows}


def _is_launch(launch: Launch, plan: Plan, ops: int) -> bool:
    numbers = (launch.kernel, launch.op, *launch.grid, launch.block, launch.shared_bytes)
    if set(map(type, chain(numbers, *launch.arguments))) != {int} or len(launch.grid) != 3:
        return False
    x, y, z = launch.grid
    return (
        0 <= launch.kernel < len(plan.kernels)
        and 0 <= launch.op < ops
        and 1 <= x <= MAX_CTAS[0]
        and 1 <= y <= MAX_CTAS[1]
        and 1 <= z <= MAX_CTAS[2]
        and 1 <= launch.block <= MAX_THREADS
        and 0 <= launch.shared_bytes <= MAX_SHARED_BYTES - plan.kernels[launch.kernel].shared_bytes
        and type(launch.programmatic) is bool
    )
