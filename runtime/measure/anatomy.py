"""The launches of a step one by one: their layers, the bytes that they read, their dependencies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbuild.runtime.engine_dir.plan import OpCall, Plan, Program, ProgramEntry
from specbuild.runtime.measure.byte_floor import Work, pass_traffic
from specbuild.runtime.measure.launch_bytes import launch_bytes
from specbuild.runtime.measure.launch_needs import launch_needs

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class LaunchAnatomy:
    """One launch. ``layer`` is its layer of the model, from 0, or None outside of layers.

    ``bytes_read`` is the device memory that it must read. ``starts_early``: it may start while the
    previous launch runs; it prefetches data that no launch writes, and waits for the rest.
    ``needs`` has the indices of the launches whose results it reads. ``added_s`` is the time that
    it adds to the previous launches; ``serial_s`` is the same if each launch waits for the end of
    the previous one. Both are None if nothing was measured.
    """

    section: str
    layer: int | None
    op: str
    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    bytes_read: float
    starts_early: bool
    needs: tuple[int, ...]
    added_s: float | None = None
    serial_s: float | None = None


@dataclass(frozen=True)
class LaunchTimes:
    """Seconds of every launch, as in :class:`LaunchAnatomy`, and of the step.

    The serial times are None if only overlapping launches were timed.
    """

    added_s: Sequence[float]
    step_s: float
    serial_s: Sequence[float] | None = None
    serial_step_s: float | None = None


@dataclass(frozen=True)
class StepAnatomy:
    """A step of ``batch`` sequences of ``context`` tokens.

    ``draft`` describes the draft, or the part of a prompt. ``experts`` is the number of distinct
    experts per layer that its rows select, read back from the step if ``experts_measured``, else
    expected for random routing. ``step_s`` is the median time of the step's graph; ``serial_s`` is
    the time if each launch waits for the previous one.
    """

    program: str
    draft: str
    batch: int
    context: float
    experts: float
    experts_measured: bool
    bytes_per_s: float | None
    launches: tuple[LaunchAnatomy, ...]
    step_s: float | None = None
    serial_s: float | None = None

    @property
    def bytes_read(self) -> float:
        """The bytes that all launches read."""
        return sum(launch.bytes_read for launch in self.launches)

    def timed(self, times: LaunchTimes) -> StepAnatomy:
        """Return a copy with measured times."""
        serial_s: Sequence[float | None] = times.serial_s or [None] * len(self.launches)
        each = zip(self.launches, times.added_s, serial_s, strict=True)
        launches = tuple(
            replace(one, added_s=added, serial_s=serial) for one, added, serial in each
        )
        return replace(self, launches=launches, step_s=times.step_s, serial_s=times.serial_step_s)


def step_anatomy(
    plan: Plan,
    entry: ProgramEntry,
    program: Program,
    work: Work,
    *,
    draft: str,
    bytes_per_s: float | None = None,
) -> StepAnatomy:
    """Return the anatomy of a step's or a prompt's program from its plan.

    ``work`` is the target's work; if its experts are None, random routing is assumed.
    ``bytes_per_s`` is the bandwidth of a streaming read.
    """
    read = launch_bytes(plan, entry, program, work)
    needs, layers = launch_needs(plan, program), op_layers(plan, program.ops)
    launches = []
    for index, launch in enumerate(program.launches):
        call = program.ops[launch.op]
        launches.append(
            LaunchAnatomy(
                section=call.section,
                layer=layers[launch.op],
                op=call.op,
                kernel=plan.kernels[launch.kernel].name,
                grid=launch.grid,
                block=launch.block,
                shared_bytes=launch.shared_bytes,
                bytes_read=read[index],
                starts_early=launch.programmatic,
                needs=needs[index],
            )
        )
    return StepAnatomy(
        program=entry.name,
        draft=draft,
        batch=work.batch,
        context=work.context,
        experts=pass_traffic(program.ops).distinct_experts(work),
        experts_measured=work.experts is not None,
        bytes_per_s=bytes_per_s,
        launches=tuple(launches),
    )


def op_layers(plan: Plan, ops: Sequence[OpCall]) -> list[int | None]:
    """Return the layer of each op, from the names of its weights or from its neighbours.

    An op without such weights between two ops of one layer belongs to that layer, others to none.
    """
    named = [_named_layer(plan, call) for call in ops]
    layers = list(named)
    last: int | None = None
    for index, layer in enumerate(named):
        if layer is None:
            continue
        if last is not None and (named[last], ops[last].section) == (layer, ops[index].section):
            layers[last:index] = [layer] * (index - last)
        last = index
    return layers


def _named_layer(plan: Plan, call: OpCall) -> int | None:
    for binding in call.inputs.values():
        buffer = plan.buffers[binding.buffer]
        if buffer.space == "weights" and (match := _LAYER.search(buffer.name)):
            return int(match[1])
    return None
