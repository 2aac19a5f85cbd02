"""Calls whose kernels have variants, and what ``tune`` would write of them."""

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
    """What ``tune`` would write had this tactic been the fastest."""
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
    """Every call of a small engine, by defaults."""
    lowering = CallLowering(target_of(GPU))
    engine = lowered_engine(target_path, None, lowering, max_seq_len=64, max_batch_size=2)
    return lowering.choices(program for _, program in engine.programs)
