"""Requests for GPT-OSS's layers at their real sizes, without tensors."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.storage import INT8
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.packing import down_steps, gate_up_steps, tile_bytes

HIDDEN = 2880


def bf16(*shape: int) -> TensorInfo:
    """Return a tensor of this shape."""
    return TensorInfo(shape, "bfloat16")


def experts_request(rows: int, experts: int = 32, hidden: int = HIDDEN) -> LoweringRequest:
    """Return a request for RmsMoe over ``rows`` rows of two sequences in decoding."""
    gate_up, down = tile_bytes(gate_up_steps(hidden)), tile_bytes(down_steps(2880))
    tensors = {
        "x": bf16(rows, hidden), "norm": bf16(hidden),
        "router_weight": bf16(experts, hidden), "router_bias": bf16(experts),
        "gate_up": TensorInfo((experts, 360, gate_up), "uint8"),
        "gate_up_bias": bf16(experts, 5760),
        "down": TensorInfo((experts, hidden // 8, down), "uint8"),
        "down_bias": bf16(experts, hidden),
        "row_start": TensorInfo((3,), "int32"), "y": bf16(rows, hidden),
    }  # fmt: skip
    attributes = op_named("RmsMoe").complete({"eps": 1e-5, "top_k": 4})
    return LoweringRequest(tensors, attributes)


def projection(rows: int, columns: int) -> LoweringRequest:
    """Return a request for O, or for the draft's down projection, with all optional inputs."""
    tensors = {
        "x": bf16(rows, columns), "weight": bf16(HIDDEN // 16, columns // 32, 512),
        "bias": bf16(HIDDEN), "residual": bf16(rows, HIDDEN), "y": bf16(rows, HIDDEN),
    }  # fmt: skip
    return LoweringRequest(tensors, op_named("Linear").complete({}))


def qkv(rows: int) -> LoweringRequest:
    """Return a request for QKV with this number of rows."""
    tensors = {
        "x": bf16(rows, HIDDEN), "norm": bf16(HIDDEN), "weight": bf16(320, HIDDEN // 32, 512),
        "bias": bf16(5120), "cos": TensorInfo((4096, 32), "float32"),
        "sin": TensorInfo((4096, 32), "float32"), "positions": TensorInfo((rows,), "int32"),
        "write_slot": TensorInfo((rows,), "int32"), "k_pool": bf16(64, 8, 64, 64),
        "v_pool": bf16(64, 8, 64, 64), "q": bf16(rows, 64, 64),
    }  # fmt: skip
    attributes = op_named("RmsQkvRope").complete({"q_heads": 64, "kv_heads": 8, "eps": 1e-5})
    return LoweringRequest(tensors, attributes)


def screened_head(rows: int, columns: int = HIDDEN, vocab: int = 201088) -> LoweringRequest:
    """Return a request for HeadScreen with this number of rows."""
    units = INT8.units(columns // 32)
    tensors = {
        "x": bf16(rows, columns), "logit_rows": TensorInfo((rows,), "int32"),
        "norm": bf16(columns), "weight": bf16(vocab // 16, columns // 32, 512),
        "codes": TensorInfo((vocab // 16, units, INT8.elements), INT8.dtype),
        "errors": TensorInfo((vocab,), "float32"), "temperature": TensorInfo((rows,), "float32"),
        "seed": TensorInfo((rows,), "int32"), "position": TensorInfo((rows,), "int32"),
        "choice": TensorInfo((rows,), "int32"), "logprob": TensorInfo((rows,), "float32"),
    }  # fmt: skip
    attributes = op_named("HeadScreen").complete({"eps": 1e-5, "rounding": "gpt_oss"})
    return LoweringRequest(tensors, attributes)


def attention(
    batch: int, rows: int, *, pages: int = 32, heads: tuple[int, int] = (64, 8), width: int = 64,
    window: int = 0, total: int | None = None,
) -> LoweringRequest:  # fmt: skip
    """Return a request for attention, with up to ``pages`` pages of 64 tokens.

    ``heads`` are those of queries, and of keys and values. Each sequence has the given number of
    rows, unless the launch has ``total`` rows.
    """
    total = batch * rows if total is None else total
    pool = bf16(99, heads[1], 64, width)
    tensors = {
        "q": bf16(total, heads[0], width), "k_pool": pool, "v_pool": pool,
        "page_table": TensorInfo((batch, 1, pages), "int32"),
        "row_start": TensorInfo((batch + 1,), "int32"), "row_slot": TensorInfo((total,), "int32"),
        "tree_start": TensorInfo((batch,), "int32"),
        "ancestor_bits": TensorInfo((total, 1), "int32"), "sinks": TensorInfo(heads[:1], "float32"),
        "attended": bf16(total, heads[0], width),
    }  # fmt: skip
    return LoweringRequest(tensors, {"scale": 0.125, "window": window})
