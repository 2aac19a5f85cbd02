"""Reads the entry points of a ``kernel.cu`` and holds their parameters to a declaration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from specbuild.plugins_cuda.opspec import OpSpec

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void[^(]*?(\w+)\s*\(([^)]*)\)\s*\{', re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
_WORKSPACE = "workspace"


def entry_points(source: str) -> dict[str, tuple[str, ...]]:
    """The parameter names of every ``extern "C" __global__`` function, by its name."""
    plain = _BOUNDS.sub("", _COMMENT.sub("", source))
    found = {}
    for name, parameters in _ENTRY.findall(plain):
        split = [part.strip() for part in parameters.split(",") if part.strip()]
        found[name] = tuple(re.findall(r"\w+", part)[-1] for part in split)
    return found


def tensor_parameters(source: str) -> dict[str, tuple[str, ...]]:
    """The pointer parameters alone: those that name tensors."""
    plain = _BOUNDS.sub("", _COMMENT.sub("", source))
    found = {}
    for name, parameters in _ENTRY.findall(plain):
        pointers = [part for part in parameters.split(",") if "*" in part]
        found[name] = tuple(re.findall(r"\w+", part)[-1] for part in pointers)
    return found


def violations(op: OpSpec, folder: Path) -> list[str]:
    """What is wrong with the ``kernel.cu`` of this folder: empty where nothing is, or no kernel.

    Every pointer is named like an input or output of the declaration (or ``workspace…``), every
    declared tensor is named by some entry point (an alias's two names are one buffer), and an
    entry point lists them in declared order.
    """
    path = folder / "kernel.cu"
    if not path.exists():
        return []
    entries = tensor_parameters(path.read_text())
    if not entries:
        return [f'{path.name}: no extern "C" __global__ function']
    aliases = dict(op.aliases)
    order = {t.name: i for i, t in enumerate((*op.inputs, *op.outputs))}
    problems = []
    for entry, names in entries.items():
        known = [name for name in names if not name.startswith(_WORKSPACE)]
        problems += [f"{entry}: {name} is not declared" for name in known if name not in order]
        places = [order[name] for name in known if name in order]
        if places != sorted(places):
            problems.append(f"{entry}: parameters {known} are not in declared order")
    problems += [f"{name} is in no entry point" for name in _missing(order, aliases, entries)]
    return problems


def _missing(
    declared: Iterable[str], aliases: Mapping[str, str], entries: Mapping[str, tuple[str, ...]]
) -> list[str]:
    named = {name for names in entries.values() for name in names}
    named |= {aliases[name] for name in named if name in aliases}
    named |= {output for output, source in aliases.items() if source in named}
    return [name for name in declared if name not in named]
