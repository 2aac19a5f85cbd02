"""Steps in which requests change logits or want the likeliest tokens: a row a sequence, no draft.

A penalty changes with every token, so within a draft too; and a guide's next mask is known once the
token before it is. The sequences that ask for either decode in these programs, apart from the
others: each side is ``done`` for the other's. One that only a guide refused a token of goes back to
the others behind such a step: so there is one in which the draft takes up what waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.draft import Drafting
from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.programs import (
    NO_DRAFT,
    batch_buckets,
    row_sampling,
    verify_rows,
)
from specbuild.builder.backends.cuda.step.target import SAMPLING, logits, run_target
from specbuild.runtime.engine_dir.plan import ACCEPT, ADJUSTED_DONE
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS

# What waits for the draft: sequences that stay apart have none.
_PENDING = ("pending_count", "pending_tokens", "pending_captured")


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
    rows = verify_rows(parts, program, batch, NO_DRAFT, state=state)
    target = run_target(parts, program, rows, bare=not extends)
    own = {"token_ids": rows.inputs["token_ids"], **state}
    chosen = _choose(parts, program, logits(target.placement), {**row_sampling(rows.inputs), **own})
    program.section = ACCEPT
    advanced: dict[str, Tensor | None] = {**parts.state("Advance", batch)}
    if extends:
        advanced["captured"] = target.aux_hidden
    else:
        advanced = {name: port for name, port in advanced.items() if name not in _PENDING}
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
    _choose(parts, program, ports["prefill.logits"], sampling, outputs)
    return program


def _choose(
    parts: EngineParts,
    program: ProgramIr,
    raw: Tensor,
    rows: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """``choice`` and ``logprob`` [R] by ``raw`` logits [R, V] as they are changed.

    The log-probability is that of the raw ones, and so are the likeliest tokens. What nothing is
    changed of keeps its bits: rows of a launch of prompts whose requests ask for nothing.
    """
    batch, outputs = raw.shape[0], outputs or {}
    given = {name: tensor for name, tensor in rows.items() if name in ("token_ids", "done")}
    adjusted = program.call(
        "AdjustLogits",
        {
            **parts.state("AdjustLogits", batch),
            "logits": raw,
            "positions": rows["position"],
            "done": None,
            **given,
        },
    )["adjusted"]
    chosen = program.call(
        "Choose",
        {"logits": adjusted, **{name: rows[name] for name in SAMPLING}},
        outputs={name: outputs[name] for name in outputs if name == "choice"},
    )
    told = program.call(
        "TopLogprobs",
        {
            **parts.state("TopLogprobs", batch),
            "logits": raw,
            "choice": chosen["choice"],
            "chosen_logprob": chosen["logprob"],
        },
        {"most": MAX_TOP_LOGPROBS},
        outputs={
            **{name: parts.ports.first(name, batch) for name in ("top_ids", "top_logprobs")},
            **{name: outputs[name] for name in outputs if name == "logprob"},
        },
    )
    return {"choice": chosen["choice"], "logprob": told["logprob"]}
