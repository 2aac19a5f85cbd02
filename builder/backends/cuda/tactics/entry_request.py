"""What a tactic entry was measured for, as a request that can be lowered and compiled again."""

from __future__ import annotations

import re
from dataclasses import replace

from specbuild.builder.backends.cuda.tactics.tactic_file import UNREAD, TacticEntry, axes_of
from specbuild.plugins_cuda.launches import LoweringRequest, Target, TensorInfo, Unsupported
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named

_TENSOR = re.compile(r"(\w+)\[((?:\d+|\*)(?:,(?:\d+|\*))*)\]")
# What stands for an unread size: pages of a pool and of a table, rows of a table of angles.
UNREAD_SIZE = 256


def entry_request(entry: TacticEntry, target: Target) -> LoweringRequest | Unsupported:
    """The entry's op at its own sizes, by its tactic; or why it is no entry of this specbuild.

    A size that the entry leaves open is :data:`UNREAD_SIZE`; sequences are as many as a tensor
    says, or one.
    """
    try:
        op = op_named(entry.op)
        texts = {name: _parsed(text) for name, text in entry.shapes.items()}
        axes = {name: axes_of(op, name, len(sizes)) for name, (_, sizes) in texts.items()}
        attributes = op.complete(entry.attributes)
    except (KeyError, ValueError) as error:
        return Unsupported(f"no op is called so: {error}")
    of_batch = (
        int(size)
        for name, (_, sizes) in texts.items()
        for axis, size in zip(axes[name], sizes, strict=True)
        if axis == "B"
    )
    open_sizes = {"B1": next(of_batch, 1) + 1}
    tensors = {
        name: TensorInfo(
            tuple(
                open_sizes.get(axis, UNREAD_SIZE) if size == UNREAD else int(size)
                for axis, size in zip(axes[name], sizes, strict=True)
            ),
            dtype,
        )
        for name, (dtype, sizes) in texts.items()
    }
    return _with_tactic(op, LoweringRequest(tensors, attributes, entry.phase, target), entry)


def _with_tactic(
    op: OpSpec, request: LoweringRequest, entry: TacticEntry
) -> LoweringRequest | Unsupported:
    candidates = op.tactics(request) if op.tactics is not None else ({},)
    if entry.tactic and entry.tactic not in candidates:
        return Unsupported(f"{entry.tactic} is none of its tactics")
    return replace(request, tactic=entry.tactic)


def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
    """Type and sizes of a tensor as an entry writes them."""
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no tensor")
    return found[1], tuple(found[2].split(","))
