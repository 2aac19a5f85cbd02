"""Converts a tactic entry to a request that can be lowered and compiled again."""

from __future__ import annotations

import re
from dataclasses import replace

from specbuild.builder.backends.cuda.tactics.tactic_file import UNREAD, TacticEntry, axes_of
from specbuild.plugins_cuda.launches import LoweringRequest, Target, TensorInfo, Unsupported
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named

_TENSOR = re.compile(r"(\w+)\[((?:\d+|\*)(?:,(?:\d+|\*))*)\]")
# Replaces a size that no kernel reads: pages of a pool and of a table, rows of a table of angles.
UNREAD_SIZE = 256


def entry_request(entry: TacticEntry, target: Target) -> LoweringRequest | Unsupported:
    """Return the request of the entry's op, sizes and tactic, or why this version lacks the op.

    A size that the entry leaves open is :data:`UNREAD_SIZE`. The number of sequences is that of a
    tensor, or one.
    """
    try:
        op = op_named(entry.op)
        parsed = {name: _parsed(text) for name, text in entry.shapes.items()}
        axes = {name: axes_of(op, name, len(sizes)) for name, (_, sizes) in parsed.items()}
        attributes = op.complete(entry.attributes)
    except (KeyError, ValueError) as error:
        return Unsupported(f"this version has no such op: {error}")
    batch_sizes = (
        int(size)
        for name, (_, sizes) in parsed.items()
        for axis, size in zip(axes[name], sizes, strict=True)
        if axis == "B"
    )
    open_sizes = {"B1": next(batch_sizes, 1) + 1}
    tensors = {
        name: TensorInfo(
            tuple(
                open_sizes.get(axis, UNREAD_SIZE) if size == UNREAD else int(size)
                for axis, size in zip(axes[name], sizes, strict=True)
            ),
            dtype,
        )
        for name, (dtype, sizes) in parsed.items()
    }
    return _with_tactic(op, LoweringRequest(tensors, attributes, entry.phase, target), entry)


def _with_tactic(
    op: OpSpec, request: LoweringRequest, entry: TacticEntry
) -> LoweringRequest | Unsupported:
    candidates = op.tactics(request) if op.tactics is not None else ({},)
    if entry.tactic and entry.tactic not in candidates:
        return Unsupported(f"{entry.tactic} is not a tactic of the op")
    return replace(request, tactic=entry.tactic)


def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
    """Return dtype and sizes of a tensor from the text of an entry."""
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not describe a tensor")
    return match[1], tuple(match[2].split(","))
