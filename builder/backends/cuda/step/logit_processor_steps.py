"""Logit-processor steps: one row per sequence, no draft. Sequences with a guide need them.

A guide's next mask depends on the token before it. Sequences that need a mask therefore decode in
these programs, separately from the others: each group is ``done`` in the programs of the other. A
sequence whose guide only rejects single tokens returns to the ordinary steps afterwards. For it
there is a step in which the draft ingests pending tokens. Steps that write all logits apply the
processors of other requests.
"""

from __future__ import annotations

from specbuild.builder.backends.cuda.step.draft import Drafting
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr
from specbuild.builder.backends.cuda.step.logit_processors import advanced_state, choose_processed
from specbuild.builder.backends.cuda.step.programs import NO_DRAFT, batch_buckets
from specbuild.builder.backends.cuda.step.recurrent_states import save_path
from specbuild.builder.backends.cuda.step.target import SAMPLING, logits, run_target
from specbuild.builder.backends.cuda.step.verification import row_sampling, verify_rows
from specbuild.runtime.engine_dir.plan import ACCEPT, ADJUSTED_DONE


def processor_batches(max_batch_size: int) -> tuple[int, ...]:
    """Return powers of four and the largest bucket, because few sequences need these steps."""
    buckets = batch_buckets(max_batch_size)
    return tuple(sorted({*buckets[::2], buckets[-1]}))


def processor_program(parts: EngineParts, batch: int, *, extends: bool = False) -> ProgramIr:
    """Return the step of ``batch`` sequences, ``step@4.adjusted``.

    With ``extends`` drafts ingest pending tokens, and the step's own row becomes pending:
    ``step@4.adjusted.extends``.
    """
    program = ProgramIr(f"step@{batch}.adjusted{'.extends' if extends else ''}", "decode")
    state = {"done": parts.ports.first(ADJUSTED_DONE, batch)}
    if extends:
        for draft in parts.drafts.values():
            Drafting(parts, draft, program, batch, NO_DRAFT, state).ingest()
    rows = verify_rows(parts, program, batch, state=state)
    target = run_target(parts, program, rows, bare=not extends)
    sampling = row_sampling(rows.inputs)
    chosen = choose_processed(parts, program, logits(target.placement), sampling, rows=rows)
    program.section = ACCEPT
    save_path(parts, program, batch, rows.inputs, {})
    advance_inputs = advanced_state(parts, batch, marks=True, pending=extends)
    advance_inputs["captured"] = target.aux_hidden if extends else None
    program.call("Advance", {**chosen, **advance_inputs, **state}, {"extended": int(extends)})
    return program


def first_token_program(parts: EngineParts) -> ProgramIr:
    """Return the program that chooses tokens again after prompts, from their saved logits.

    There is no path: the marks of a sequence already contain its whole output.
    """
    ports = parts.ports
    program = ProgramIr("adjust", "decode")
    sampling = {name: ports[f"prefill.{name}"] for name in SAMPLING}
    outputs = {name: ports[f"prefill.{name}"] for name in ("choice", "logprob")}
    raw = ports["prefill.logits"]
    choose_processed(parts, program, raw, sampling, outputs=outputs)
    return program
