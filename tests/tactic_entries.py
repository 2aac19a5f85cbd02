"""Calls whose kernels have variants, and the entries that ``tune`` would write for them."""

from __future__ import annotations

from pathlib import Path

from plan_host import lowered_engine

from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tactics.tactic_book import Choice
from specbuild.builder.backends.cuda.tactics.tactic_file import TacticEntry, shape_key

GPU = "sm_90a"
SOURCES = ("linear/kernel.cu", "rms_moe/down.cu", "rms_moe/gate_up.cu")


def entry_of(choice: Choice, tactic: dict[str, int]) -> TacticEntry:
    """Return the entry that ``tune`` writes if this tactic is the fastest."""
    return TacticEntry(
        op=choice.op.name,
        phase=choice.request.phase,
        shapes=shape_key(choice.op, choice.request.tensors),
        attributes=dict(choice.request.attributes),
        sources=SOURCES[:1],
        tactic=tactic,
        median_us=3.0,
        default_us=4.0,
        code="",
        compiler="",
    )


def default_choices(target_path: Path) -> list[Choice]:
    """Return every call of a small engine, with default tactics."""
    lowering = CallLowering(target_of(GPU))
    engine = lowered_engine(target_path, None, lowering, max_seq_len=64, max_batch_size=2)
    return lowering.choices(program for _, program in engine.programs)
