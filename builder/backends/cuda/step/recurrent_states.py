"""Inputs of recurrent states in a program, and the path that the next launch applies to them."""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor

STATE_PORTS = ("state_slot", "replay_path", "replay_count")


def state_inputs(parts: EngineParts, batch: int) -> dict[str, Tensor]:
    """Return the graph's inputs for ``batch`` sequences; none without recurrent states."""
    if parts.states is None:
        return {}
    name = parts.states.group.name
    return {f"{name}.{port}": parts.ports.first(port, batch) for port in STATE_PORTS}


def save_path(
    parts: EngineParts,
    program: ProgramIr,
    batch: int,
    rows: Mapping[str, Tensor],
    path: Mapping[str, Tensor] | None,
) -> None:
    """Save the accepted rows of this launch, which the next launch applies to the states.

    ``path`` has TreeAccept's outputs and is empty without a tree. None means that this launch
    stores its states.
    """
    if parts.states is None:
        return
    tree_path = path or {}
    program.call(
        "ReplayPath",
        {
            "path": tree_path.get("path"),
            "accepted": tree_path.get("accepted"),
            "positions": rows["positions"],
            "row_start": rows["row_start"],
            **parts.state("ReplayPath", batch),
        },
        {"stores": int(path is None)},
    )
