"""Whether an accepted CUDA engine stays in its memory, by its JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 30  # of all buffers: the original has a few MiB


def memory_problem(directory: Path) -> str | None:
    """What leaves a buffer, None where nothing does; shares no code with the checks."""
    plan = json.loads((directory / "plan.json").read_bytes())
    sizes = [buffer["bytes"] for buffer in plan["buffers"]]
    if min(sizes, default=0) < 0 or sum(sizes) > _MAX_BYTES:
        return f"buffers of {sum(sizes)} bytes"
    for port in plan["ports"]:
        if not _inside(port["buffer"], port["offset"], sizes):
            return f"port {port['name']} lies outside"
    for entry in plan["programs"]:
        program = json.loads((directory / entry["file"]).read_bytes())
        for launch in program["launches"]:
            problem = _launch_problem(launch, plan, sizes)
            if problem:
                return f"{entry['file']}: {problem}"
    return None


def _launch_problem(launch: dict[str, Any], plan: dict[str, Any], sizes: list[int]) -> str | None:
    if not 0 <= launch["kernel"] < len(plan["kernels"]):
        return "a kernel that is none"
    if not 0 < launch["block"] <= 1024 or not all(0 < n < 2**31 for n in launch["grid"]):
        return "a grid that no GPU has"
    for argument in launch["arguments"]:
        kind, values = argument[0], argument[1:]
        if kind == 0 and not _inside(*values, sizes):
            return "a pointer outside its buffer"
        if kind == 1 and values[0] >= 2**31:
            return "a number that no kernel takes"
    return None


def _inside(buffer: int, offset: int, sizes: list[int]) -> bool:
    return 0 <= buffer < len(sizes) and 0 <= offset < sizes[buffer]
