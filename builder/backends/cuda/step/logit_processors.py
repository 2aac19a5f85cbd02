"""Chooses tokens in programs that apply logit processors and return the top log-probabilities.

These are the logit-processor steps, the program after prompts, and every step that writes all
logits. Each row of a tree has its own processors, because they depend on the tokens before it. Rows
of requests without processors keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.builder.backends.cuda.step.engine_parts import EngineParts
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.target import SAMPLING, TargetRows
from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS

_MARKS = ("changes", "marks")
# Pending tokens of the draft. Sequences that stay in logit-processor steps have none.
_PENDING = ("pending_count", "pending_tokens", "pending_captured")


def choose_processed(
    parts: EngineParts,
    program: ProgramIr,
    logits: Tensor,
    sampling: Mapping[str, Tensor],
    *,
    rows: TargetRows | None = None,
    outputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return ``choice`` and ``logprob`` [R] from raw ``logits`` [R, V], which change in place.

    All log-probabilities are those of the raw logits. ``rows`` has the tokens on the path of each
    row. Without ``rows`` there is one row per sequence, and the marks contain the whole output.
    """
    outputs, path, batch = outputs or {}, {}, logits.shape[0]
    row_start = None
    if rows is not None:
        path = {"row_tokens": rows.inputs["token_ids"]}
        path["ancestor_bits"], batch = rows.inputs["ancestor_bits"], rows.batch
        row_start = None if rows.row_count is None else rows.inputs["row_start"]
    processed = program.call(
        "AdjustLogits",
        {
            **parts.state("AdjustLogits", batch),
            **path,
            "logits": logits,
            "positions": sampling["position"],
            "row_start": row_start,
        },
    )
    chosen = program.call(
        "Choose",
        {"logits": processed["adjusted"], **{name: sampling[name] for name in SAMPLING}},
        outputs={name: outputs[name] for name in outputs if name == "choice"},
    )
    top = program.call(
        "TopLogprobs",
        {
            **parts.state("TopLogprobs", batch),
            "logits": processed["adjusted"],
            "raw": processed["raw"],
            "choice": chosen["choice"],
            "chosen_logprob": chosen["logprob"],
            "row_start": row_start,
        },
        {"most": MAX_TOP_LOGPROBS},
        outputs={
            **{
                name: parts.ports.first(name, logits.shape[0])
                for name in ("top_ids", "top_logprobs")
            },
            **{name: outputs[name] for name in outputs if name == "logprob"},
        },
    )
    return {"choice": chosen["choice"], "logprob": top["logprob"]}


def advanced_state(
    parts: EngineParts, batch: int, *, marks: bool, pending: bool = True
) -> dict[str, Tensor | None]:
    """Return the ports that Advance reads.

    With ``marks`` it counts tokens, as a step with logit processors needs it. With ``pending`` the
    draft ingests the tokens that the step commits.
    """
    unused = (*(() if marks else _MARKS), *(() if pending else _PENDING))
    return {**parts.state("Advance", batch), **dict.fromkeys(unused)}
