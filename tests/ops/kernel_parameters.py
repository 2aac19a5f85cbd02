"""Read the entry points of an op's ``.cu`` files and compare their parameters with an op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from specbuild.plugins_cuda.opspec import OpSpec

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void[^(]*?(\w+)\s*\(([^)]*)\)\s*\{', re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
_WORKSPACE = "workspace"
# A tensor in the memory of the rank at this distance.
_ON_PEER = re.compile(r"_on_\d$")
PREFILL = "prefill"
# Sources of kernels that several ops launch, by folder.
SHARED = {"linear/normed_tokens.cu": ("RmsQkvRope", "RmsSwiglu", "RmsHead")}
# Ops whose launches are those of another op, with exceptions.
BORROWED = {"rank_moe": "rms_moe"}


def entry_points(source: str) -> dict[str, tuple[str, ...]]:
    """Return the parameter names of every ``extern "C" __global__`` function, by its name."""
    plain = _BOUNDS.sub("", _COMMENT.sub("", source))
    found = {}
    for name, parameters in _ENTRY.findall(plain):
        split = [part.strip() for part in parameters.split(",") if part.strip()]
        found[name] = tuple(re.findall(r"\w+", part)[-1] for part in split)
    return found


def tensor_parameters(source: str) -> dict[str, tuple[str, ...]]:
    """Return the pointer parameters, which name tensors of any rank."""
    plain = _BOUNDS.sub("", _COMMENT.sub("", source))
    found = {}
    for name, parameters in _ENTRY.findall(plain):
        pointers = [part for part in parameters.split(",") if "*" in part]
        found[name] = tuple(_ON_PEER.sub("", re.findall(r"\w+", part)[-1]) for part in pointers)
    return found


def violations(op: OpSpec, folder: Path) -> list[str]:
    """Return the errors in the sources of this folder; empty for correct sources or no file.

    Several ``.cu`` files may share an entry point from a header.

    Every pointer is named like an input or output of the declaration (or ``workspace…``). Every
    declared tensor is named by an entry point; the two names of an alias are one buffer. An entry
    point lists tensors in the declared order. The kernels of a prompt's chunks (``prefill….cu``)
    name every declared tensor themselves. ``SHARED`` sources are omitted.
    """
    folders = [
        folder,
        *([folder.parent / BORROWED[folder.name]] if folder.name in BORROWED else []),
    ]
    paths = [p for each in folders for p in sorted([*each.glob("*.cu"), *each.glob("*/*.cuh")])]
    paths = [p for p in paths if f"{p.parent.name}/{p.name}" not in SHARED]
    order = {t.name: i for i, t in enumerate((*op.inputs, *op.outputs))}
    problems: list[str] = []
    by_phase: dict[bool, list[tuple[str, ...]]] = {}
    for path in paths:
        entries = tensor_parameters(path.read_text())
        if not entries and path.suffix == ".cu":
            problems.append(f'{path.name}: no extern "C" __global__ function')
        for entry, names in entries.items():
            problems += _misplaced(f"{path.name}: {entry}", names, order)
        by_phase.setdefault(path.stem.startswith(PREFILL), []).extend(entries.values())
    aliases = dict(op.aliases)
    for prefill, parameters in sorted(by_phase.items()):
        where = "a prompt's kernels" if prefill else "the decoding kernels"
        missing = _missing(order, aliases, parameters)
        problems += [f"{name} is in no entry point of {where}" for name in missing]
    return problems


def _misplaced(entry: str, names: Iterable[str], order: Mapping[str, int]) -> list[str]:
    known = [name for name in names if not name.startswith(_WORKSPACE)]
    problems = [f"{entry}: {name} is not declared" for name in known if name not in order]
    places = [order[name] for name in known if name in order]
    if places != sorted(places):
        problems.append(f"{entry}: parameters {known} are not in declared order")
    return problems


def _missing(
    declared: Iterable[str], aliases: Mapping[str, str], entries: Iterable[tuple[str, ...]]
) -> list[str]:
    named = {name for names in entries for name in names}
    named |= {aliases[name] for name in named if name in aliases}
    named |= {output for output, source in aliases.items() if source in named}
    return [name for name in declared if name not in named]
