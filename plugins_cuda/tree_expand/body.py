"""TreeExpand in standard ops: two TopK, whose ties go to the lower index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.choose.body import gumbel, noise_bits

# The ratio of the draft's temperature to the request's: drafts are flatter than their targets.
TEMPERATURE_RATIO = 0.7

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def perturbed(
    b: BodyBuilder,
    logits: ir.Value,
    score: ir.Value,
    d2t: ir.Value,
    sampling: Sequence[ir.Value],
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Return the logits with noise in rows with temperature above 0."""
    temperature, seed, first = (
        b.reshape(b.Expand(b.reshape(x, -1, 1), b.Shape(score)), -1) for x in sampling
    )
    one = b.scalar(1, np.int64)
    node = b.Range(b.scalar(0, np.int64), b.Squeeze(b.size(score, 1), b.i64(0)), one)
    steps = b.Add(
        b.Mul(node, b.scalar(attributes["per_node"], np.int64)),
        b.scalar(attributes["offset"], np.int64),
    )
    per_row = b.reshape(b.Expand(b.reshape(steps, 1, -1), b.Shape(score)), -1)
    position = b.Add(b.cast(first, INT64), per_row)
    vocab = b.Squeeze(b.size(logits, 1), b.i64(0))
    ids = b.Add(b.Range(b.scalar(0, np.int64), vocab, one), b.cast(d2t, INT64))
    size = b.Add(b.ReduceMax(ids, b.i64(0), keepdims=1), b.i64(1))
    noise = gumbel(b, b.Gather(noise_bits(b, seed, position, size), ids, axis=1))
    sampled = b.reshape(b.Greater(temperature, b.scalar(0.0)), -1, 1)
    heat = b.Where(sampled, b.reshape(temperature, -1, 1), b.scalar(1.0))
    scaled = b.Div(logits, b.Mul(heat, b.scalar(TEMPERATURE_RATIO)))
    return b.Where(sampled, b.Add(scaled, noise), logits)


def body(
    b: BodyBuilder, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Sequence[ir.Value]:
    """Return the standard-ONNX body's outputs."""
    logits, score, d2t, top_k, *sampling, form = inputs
    assert logits is not None and score is not None and d2t is not None and top_k is not None
    sampling_inputs = [value for value in sampling if value is not None]
    if sampling_inputs:
        logits = perturbed(b, logits, score, d2t, sampling_inputs, attributes)
    k = b.reshape(b.cast(top_k, INT64), 1)
    _, draft_ids = b.topk(logits, k)
    # Selected by logit, because the rounded log-softmax could have ties that the logits have not.
    log_p = b.GatherElements(b.LogSoftmax(logits, axis=1), draft_ids, axis=1)
    log_p = b.Min(log_p, b.scalar(0.0))
    per_sequence = b.Concat(b.size(score, 0), b.i64(-1), axis=0)
    scores = b.Reshape(b.Add(b.reshape(score, -1, 1), log_p), per_sequence)
    if form is not None:
        scores = b.Where(b.Less(form, b.scalar(0.0)), form, scores)
    tokens = b.Add(b.cast(draft_ids, INT32), b.Gather(d2t, draft_ids))
    _, frontier = b.topk(scores, k)
    return [b.Reshape(tokens, per_sequence), scores, b.cast(frontier, INT32)]
