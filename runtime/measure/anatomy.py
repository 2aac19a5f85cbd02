"""The launches of a step one by one: whose they are, what they read and what they wait for."""

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
    """One launch. ``layer`` of its model, from 0; None outside of layers.

    ``bytes_read``: what it must read of device memory. ``starts_early``: while the launch in front
    still runs; it then reads ahead what no launch writes, and waits for the rest. ``needs``: the
    launches, by their places in the step, whose results it reads. ``added_s``: what it adds to the
    launches in front of it; ``serial_s``: the same where each launch waits until the one in front
    is done. Both are None where nothing was measured.
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
    """Seconds of every launch, as in :class:`LaunchAnatomy`, and of the whole.

    The serial ones are None where launches were timed as they overlap alone.
    """

    added_s: Sequence[float]
    step_s: float
    serial_s: Sequence[float] | None = None
    serial_step_s: float | None = None


@dataclass(frozen=True)
class StepAnatomy:
    """A step of ``batch`` sequences of ``context`` tokens; ``draft`` says what it drafts, or how
    much of a prompt it is.

    ``experts``: distinct ones that its rows choose in a layer, read back from the step where
    ``experts_measured``, else as random routing does. ``step_s``: the median time of the whole
    step as its graph; ``serial_s`` where each launch waits until the one in front is done.
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
        """Of all launches."""
        return sum(launch.bytes_read for launch in self.launches)

    def timed(self, times: LaunchTimes) -> StepAnatomy:
        """The same with what was measured."""
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
    """The anatomy of a step's or a prompt's program from its plan.

    ``work`` is the target's; its experts None takes what random routing would. ``bytes_per_s``:
    of a streaming read.
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
    """The layer of each op: what the names of its weights say, or those of the ops around it.

    An op without such weights between two of one layer belongs to that layer, others to none.
    """
    named = [_named_layer(plan, call) for call in ops]
    found = list(named)
    last: int | None = None
    for index, layer in enumerate(named):
        if layer is None:
            continue
        if last is not None and (named[last], ops[last].section) == (layer, ops[index].section):
            found[last:index] = [layer] * (index - last)
        last = index
    return found


def _named_layer(plan: Plan, call: OpCall) -> int | None:
    for binding in call.inputs.values():
        buffer = plan.buffers[binding.buffer]
        if buffer.space == "weights" and (match := _LAYER.search(buffer.name)):
            return int(match[1])
    return None
