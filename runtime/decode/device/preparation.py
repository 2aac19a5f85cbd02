"""The programs that requests are likely to need, in the order in which they are prepared.

A program's file is read, and its graph recorded, at its first use. This takes about as long as ten
steps of one sequence, so a server prepares likely programs before its requests need them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry


def likely_programs(
    programs: ProgramTable,
    shapes: Sequence[DraftShape | None],
    *,
    full_logits: bool,
    extends: bool,
    host_chains: bool,
) -> tuple[list[ProgramEntry], list[ProgramEntry]]:
    """Return the steps of one sequence, and the programs to prepare after them, in order.

    The steps are those of ``shapes``. With ``extends`` a step in which the draft ingests its
    pending tokens is one of them. With ``host_chains`` so are the steps that verify host chains of
    equal lengths. Prefill programs come second, the smallest first, then larger batches.
    """

    def steps_of(batch: int) -> list[ProgramEntry]:
        fitting = [
            shape
            for shape in shapes
            if programs.min_sequences(shape)
            <= batch
            <= programs.max_sequences(shape, full_logits=full_logits)
        ]
        steps = [programs.step(s, batch=batch, full_logits=full_logits) for s in fitting]
        if extends and None in fitting:
            ingests = programs.step(None, batch=batch, full_logits=full_logits, extends=True)
            steps.append(ingests)
        if host_chains:
            steps += [
                programs.host_chain_step([length] * batch, batch=batch, full_logits=full_logits)
                for length in programs.host_chain_lengths(batch=batch, full_logits=full_logits)
            ]
        return steps

    first = steps_of(1)
    larger = [entry for batch in programs.step_batches() for entry in steps_of(batch)]
    return list(dict.fromkeys(first)), [
        entry for entry in dict.fromkeys([*programs.prefills(), *larger]) if entry not in first
    ]
