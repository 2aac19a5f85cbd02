"""TreeExpand in standard ops: two TopK, whose ties go to the lower index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], _attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """The standard-ONNX form."""
    logits, score, d2t, top_k = inputs
    assert logits is not None and score is not None and d2t is not None and top_k is not None
    k = b.reshape(b.cast(top_k, INT64), 1)
    _, draft_ids = b.topk(logits, k)
    # Chosen by logit: rounding in the log-softmax could make two of them tie.
    log_p = b.GatherElements(b.LogSoftmax(logits, axis=1), draft_ids, axis=1)
    log_p = b.Min(log_p, b.scalar(0.0))
    per_sequence = b.Concat(b.size(score, 0), b.i64(-1), axis=0)
    scores = b.Reshape(b.Add(b.reshape(score, -1, 1), log_p), per_sequence)
    tokens = b.Add(b.cast(draft_ids, INT32), b.Gather(d2t, draft_ids))
    _, frontier = b.topk(scores, k)
    return [b.Reshape(tokens, per_sequence), scores, b.cast(frontier, INT32)]
