"""Advance: emit the target's samples, and update the state of the sequences for the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbuild.plugins_cuda.advance.lowering import lower
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import STATE_ONLY
from specbuild.runtime.engine_dir.plan import ADJUSTS

if TYPE_CHECKING:
    import torch


def emitted(choices: list[int], capacity: int, eos_ids: set[int]) -> tuple[list[int], bool]:
    """Return the emitted prefix of ``choices``, and whether the sequence ends.

    It has capacity for ``capacity`` more tokens. It ends with the first token of ``eos_ids``, or
    when no capacity is left.
    """
    tokens: list[int] = []
    for token in choices[:capacity]:
        tokens.append(token)
        if token in eos_ids:
            return tokens, True
    return tokens, len(tokens) >= capacity


def reference(
    choice: torch.Tensor,
    logprob: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor | None,
    captured: torch.Tensor | None,
    length: torch.Tensor,
    root: torch.Tensor,
    pending_count: torch.Tensor | None,
    pending_tokens: torch.Tensor | None,
    pending_captured: torch.Tensor | None,
    done: torch.Tensor,
    limit: torch.Tensor,
    ignore_eos: torch.Tensor,
    eos_ids: torch.Tensor,
    step: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_logprobs: torch.Tensor,
    ring_accepted: torch.Tensor,
    ring_count: torch.Tensor,
    ring_step: torch.Tensor,
    changes: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
    row_start: torch.Tensor | None = None,
    *,
    extended: int = 1,
) -> tuple[Any, ...]:
    """Emit the choices at the slots of each sequence's path, up to its limit and its first EOS.

    ``choice``, ``logprob`` [T] and ``captured`` [T, C] belong to the rows of VerifyInputs. Slot i
    is in row ``row_start[b]`` + i, or without ``row_start`` [B+1] in row b·N1 + i, T = B·N1.
    ``path`` [B, D1] and ``accepted`` [B] are TreeAccept's outputs, absent without a tree (root
    only). If m tokens are emitted, length grows by m, and root becomes the last of them. The
    sequence is ``done`` if root is one of ``eos_ids`` (padded with -1) and ``ignore_eos`` is 0, or
    if length + 1 ≥ ``limit``. A done sequence emits nothing and does not change. All state is [B].

    The draft ingests the m rows at the path's first m slots in its next run. Their aux hidden
    states and the emitted tokens are appended to ``pending_captured`` [B, DM1, C] and
    ``pending_tokens`` [B, DM1], with ``pending_count`` [B]. If this step ran the draft
    (``extended`` = 1), they replace the pending rows. If there is no capacity for all rows, the
    oldest ones are discarded. Entries past the count are unspecified. All three, and ``captured``,
    are absent without a draft.

    The ring is in host memory. Entry s = step % S receives, for sequence b at [s, b], the count m
    ``ring_count`` [S, BM], the number of accepted draft tokens ``ring_accepted`` [S, BM], the
    tokens ``ring_tokens`` [S, BM, R1] and their log-probabilities ``ring_logprobs`` [S, BM, R1].
    Entries past m, and sequences past B, are not written. Then, after a system-wide fence,
    ``ring_step`` [S] at s becomes step + 1, and ``step`` [1] grows by 1.

    If ``changes`` int32 [B] has the bit ``ADJUSTS``, ``marks`` int32 [B, V] count the tokens of the
    output before the new root: the old root, and the m tokens except the last. Both are absent in
    steps that change no logits.

    Returns all of these states and rings, in place; None for absent ones.
    """
    import torch

    batch, nodes = length.shape[0], choice.shape[0] // length.shape[0]
    state = [length, root, done, step]
    rings = [ring_tokens, ring_logprobs, ring_accepted, ring_count, ring_step]
    length, root, done, step = (t.clone() for t in state)
    ring_tokens, ring_logprobs, ring_accepted, ring_count, ring_step = (t.clone() for t in rings)
    if pending_count is not None and pending_tokens is not None and pending_captured is not None:
        pending_count, pending_tokens = pending_count.clone(), pending_tokens.clone()
        pending_captured = pending_captured.clone()
    marks = None if marks is None else marks.clone()
    ring = int(step) % ring_step.shape[0]
    for b in range(batch):
        slots = (
            [0] if path is None or accepted is None else path[b, : int(accepted[b]) + 1].tolist()
        )
        first = b * nodes if row_start is None else int(row_start[b])
        rows = [] if done[b] else [first + slot for slot in slots]
        capacity = 0 if done[b] else int(limit[b] - length[b]) - 1
        ends_at = set() if ignore_eos[b] else set(eos_ids.tolist()) - {-1}
        tokens, ends = emitted(choice[rows].tolist(), capacity, ends_at)
        count = len(tokens)
        ring_count[ring, b] = count
        ring_accepted[ring, b] = min(len(slots) - 1, count)
        ring_tokens[ring, b, :count] = torch.tensor(tokens, dtype=torch.int32)
        ring_logprobs[ring, b, :count] = logprob[rows[:count]]
        if count == 0:
            continue
        if marks is not None and changes is not None and int(changes[b]) & ADJUSTS:
            for token in (int(root[b]), *tokens[:-1]):
                marks[b, token] += 1
        length[b] += count
        root[b], done[b] = tokens[-1], int(ends)
        if captured is None or pending_count is None:
            continue
        assert pending_tokens is not None and pending_captured is not None
        kept = 0 if extended else int(pending_count[b])
        new_tokens = [*pending_tokens[b, :kept].tolist(), *tokens]
        new_captured = torch.cat([pending_captured[b, :kept], captured[rows[:count]]])
        pending = min(len(new_tokens), pending_tokens.shape[1])
        pending_count[b] = pending
        pending_tokens[b, :pending] = torch.tensor(new_tokens[-pending:], dtype=torch.int32)
        pending_captured[b, :pending] = new_captured[-pending:]
    ring_step[ring] = step[0] + 1
    return (
        length,
        root,
        pending_count,
        pending_tokens,
        pending_captured,
        done,
        step + 1,
        ring_tokens,
        ring_logprobs,
        ring_accepted,
        ring_count,
        ring_step,
        marks,
    )


_STATE = (
    TensorSpec("length", "int32", ("B",)),
    TensorSpec("root", "int32", ("B",)),
    TensorSpec("pending_count", "int32", ("B",), optional=True),
    TensorSpec("pending_tokens", "int32", ("B", "DM1"), optional=True),
    TensorSpec("pending_captured", "T", ("B", "DM1", "C"), optional=True),
    TensorSpec("done", "int32", ("B",)),
)
_STEP = TensorSpec("step", "int32", ("1",))
_RING = (
    TensorSpec("ring_tokens", "int32", ("S", "BM", "R1")),
    TensorSpec("ring_logprobs", "float32", ("S", "BM", "R1")),
    TensorSpec("ring_accepted", "int32", ("S", "BM")),
    TensorSpec("ring_count", "int32", ("S", "BM")),
    TensorSpec("ring_step", "int32", ("S",)),
)
_MARKS = TensorSpec("marks", "int32", ("B", "vocab"), optional=True)
_IN_PLACE = (*_STATE, _STEP, *_RING, _MARKS)

OP = OpSpec(
    name="Advance",
    doc="Emits the accepted tokens to the host's ring and moves the state to the next step.",
    inputs=(
        TensorSpec("choice", "int32", ("T",)),
        TensorSpec("logprob", "float32", ("T",)),
        TensorSpec("path", "int32", ("B", "D1"), optional=True),
        TensorSpec("accepted", "int32", ("B",), optional=True),
        TensorSpec("captured", "T", ("T", "C"), optional=True),
        *_STATE,
        TensorSpec("limit", "int32", ("B",)),
        TensorSpec("ignore_eos", "int32", ("B",)),
        TensorSpec("eos_ids", "int32", ("8",)),
        _STEP,
        *_RING,
        TensorSpec("changes", "int32", ("B",), optional=True),
        _MARKS,
        TensorSpec("row_start", "int32", ("B1",), optional=True),
    ),
    outputs=tuple(
        TensorSpec(f"{spec.name}_out", spec.dtype, spec.axes, optional=spec.optional)
        for spec in _IN_PLACE
    ),
    attributes=(AttributeSpec("extended", int, 1),),
    reference=reference,
    aliases=tuple((f"{spec.name}_out", spec.name) for spec in _IN_PLACE),
    lower=lower,
    traffic=STATE_ONLY,
)
