"""How long an engine's own steps take on its device, at a context and batch of one's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.timing import LaunchTime, profile_program, time_program
from specbuild.runtime.manifest import DraftShape
from specbuild.runtime.program_table import ProgramTable
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.slots import SEQUENCE_PORTS


@dataclass(frozen=True)
class StepTiming:
    """Median seconds of one step on the device, and what each of its launches adds, if asked."""

    program: str
    step_s: float
    launches: list[LaunchTime] = field(default_factory=list)


def time_step(
    engine: Engine,
    *,
    batch: int,
    context: int,
    shape: DraftShape | None = None,
    repeats: int = 30,
    profile: bool = False,
    seed: int = 0,
) -> StepTiming:
    """Times a step of ``batch`` sequences of ``context`` random tokens each.

    The prompts are really taken up, and the first steps really run; then one step is repeated
    from the same state. Raises UnsupportedHereError where the engine's steps run on the host.
    """
    executor = engine.executor
    if not isinstance(executor, CudaExecutor):
        raise UnsupportedHereError("steps are timed on a GPU, this engine runs on the host")
    entry = ProgramTable(executor.plan).step(shape, batch=batch, full_logits=False)
    random = np.random.default_rng(seed)
    ids = random.integers(0, engine.manifest.target.vocab, (batch, context))
    prompts = [Prompt(str(b), ids=tuple(map(int, row))) for b, row in enumerate(ids)]
    # Enough tokens that no sequence ends while its step is timed.
    room = engine.manifest.limits.max_seq_len - context
    params = GenerateParams(max_new_tokens=room, ignore_eos=True)
    events = engine.generate(prompts, params, speculation=shape)
    try:
        emitted = [0] * batch
        while min(emitted) < 2:
            emitted[next(events).request] += 1
        reset = keep_state(executor)
        step_s = time_program(executor.runner, entry, repeats, reset=reset)
        launches = []
        if profile:
            launches = profile_program(executor.runner, entry, repeats, reset=reset)
            reset()
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    return StepTiming(entry.name, step_s, launches)


def keep_state(executor: CudaExecutor) -> Callable[[], None]:
    """What puts the sequences back where they are now; it queues the writes and returns."""
    ports = [name for name in SEQUENCE_PORTS if executor.port(name) is not None]
    kept = {name: executor.read(name) for name in ports}

    def restore() -> None:
        for name, values in kept.items():
            executor.write(name, values)

    return restore
