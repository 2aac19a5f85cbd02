"""Recurrent states in a program: their inputs, and what the next launch applies."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor

STATE_PORTS = ("state_slot", "replay_path", "replay_count")


def state_inputs(parts: EngineParts, batch: int) -> dict[str, Tensor]:
    """The graph's inputs for ``batch`` sequences; none without recurrent states."""
    if parts.states is None:
        return {}
    name = parts.states.group.name
    return {f"{name}.{port}": parts.ports.first(port, batch) for port in STATE_PORTS}


def keep_path(
    parts: EngineParts,
    program: ProgramIr,
    batch: int,
    rows: Mapping[str, Tensor],
    path: Mapping[str, Tensor] | None,
) -> None:
    """The accepted rows of this launch are what the next one applies to the states.

    ``path`` has TreeAccept's outputs, none without a tree; None where the launch stores its states.
    """
    if parts.states is None:
        return
    taken = path or {}
    program.call(
        "ReplayPath",
        {
            "path": taken.get("path"),
            "accepted": taken.get("accepted"),
            "positions": rows["positions"],
            "row_start": rows["row_start"],
            **parts.state("ReplayPath", batch),
        },
        {"stores": int(path is None)},
    )
