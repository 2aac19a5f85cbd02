"""Logit-processor steps: one row a sequence, no draft. Sequences with a guide need them.

The next mask of a guide is known once the token before it is. Sequences that need a mask decode in
these programs, apart from the others: each side is ``done`` for the other's. One that only a guide
refused a token of goes back to the others behind such a step: so there is one in which the draft
takes up what waits for it. Steps that write all logits apply the processors of other requests.
"""

from __future__ import annotations

from specbuild.builder.backends.cuda.step.draft import Drafting
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr
from specbuild.builder.backends.cuda.step.logit_processors import advanced_state, choose_processed
from specbuild.builder.backends.cuda.step.programs import NO_DRAFT, batch_buckets
from specbuild.builder.backends.cuda.step.states import keep_path
from specbuild.builder.backends.cuda.step.target import SAMPLING, logits, run_target
from specbuild.builder.backends.cuda.step.verification import row_sampling, verify_rows
from specbuild.runtime.engine_dir.plan import ACCEPT, ADJUSTED_DONE


def adjusted_batches(max_batch_size: int) -> tuple[int, ...]:
    """Powers of four, and the largest bucket: few of a server's sequences ask for this."""
    buckets = batch_buckets(max_batch_size)
    return tuple(sorted({*buckets[::2], buckets[-1]}))


def adjusted_program(parts: EngineParts, batch: int, *, extends: bool = False) -> ProgramIr:
    """A step of ``batch`` sequences, ``step@4.adjusted``.

    ``extends``: drafts take up what waits for them, and the step's own row waits for it next;
    ``step@4.adjusted.extends``.
    """
    program = ProgramIr(f"step@{batch}.adjusted{'.extends' if extends else ''}", "decode")
    state = {"done": parts.ports.first(ADJUSTED_DONE, batch)}
    if extends:
        for draft in parts.drafts.values():
            Drafting(parts, draft, program, batch, NO_DRAFT, state).take_up()
    rows = verify_rows(parts, program, batch, state=state)
    target = run_target(parts, program, rows, bare=not extends)
    sampling = row_sampling(rows.inputs)
    chosen = choose_processed(parts, program, logits(target.placement), sampling, rows=rows)
    program.section = ACCEPT
    keep_path(parts, program, batch, rows.inputs, {})
    advanced = advanced_state(parts, batch, marks=True, pending=extends)
    advanced["captured"] = target.aux_hidden if extends else None
    program.call("Advance", {**chosen, **advanced, **state}, {"extended": int(extends)})
    return program


def first_token_program(parts: EngineParts) -> ProgramIr:
    """Behind a launch of prompts: chooses again where one has ended, from the logits that it kept.

    All of an output is in its sequence's marks there: there is none.
    """
    ports = parts.ports
    program = ProgramIr("adjust", "decode")
    sampling = {name: ports[f"prefill.{name}"] for name in SAMPLING}
    outputs = {name: ports[f"prefill.{name}"] for name in ("choice", "logprob")}
    raw = ports["prefill.logits"]
    choose_processed(parts, program, raw, sampling, outputs=outputs)
    return program
