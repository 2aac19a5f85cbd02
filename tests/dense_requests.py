"""Requests for layers of dense Llamas and Qwen3 at their real sizes, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from gpt_oss_requests import bf16

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.storage import BF16, Storage
from specbuild.plugins_cuda.registry import op_named


@dataclass(frozen=True)
class Sizes:
    """Of one model; ``normed``: queries and keys are, as Qwen3's."""

    hidden: int
    inner: int
    q_heads: int
    vocab: int
    head_dim: int = 128
    kv_heads: int = 8
    normed: bool = False


LLAMA_1B = Sizes(2048, 8192, 32, 128256, head_dim=64)
LLAMA_8B = Sizes(4096, 14336, 32, 128256)
LLAMA_70B = Sizes(8192, 28672, 64, 128256)
QWEN3_8B = Sizes(4096, 12288, 32, 151936, normed=True)
QWEN3_32B = Sizes(5120, 25600, 64, 151936, normed=True)


def layer_requests(s: Sizes, rows: int, storage: Storage = BF16) -> dict[str, LoweringRequest]:
    """What a layer and the head launch for so many rows, by a name of their own."""
    width = s.q_heads * s.head_dim

    def weight(outputs: int, columns: int) -> TensorInfo:
        units = storage.units(columns // 32)
        return TensorInfo((outputs // 16, units, storage.elements), storage.dtype)

    def linear(columns: int) -> LoweringRequest:
        tensors = {"x": bf16(rows, columns), "weight": weight(s.hidden, columns),
                   "residual": bf16(rows, s.hidden), "y": bf16(rows, s.hidden)}  # fmt: skip
        return LoweringRequest(tensors, {})

    angles = TensorInfo((8192, s.head_dim // 2), "float32")
    pool, ids = bf16(64, s.kv_heads, 64, s.head_dim), TensorInfo((rows,), "int32")
    outputs = width + 2 * s.kv_heads * s.head_dim
    norms = dict.fromkeys(("q_norm", "k_norm"), bf16(s.head_dim)) if s.normed else {}
    qkv = {
        "x": bf16(rows, s.hidden), "norm": bf16(s.hidden), "weight": weight(outputs, s.hidden),
        **norms, "cos": angles, "sin": angles, "positions": ids, "write_slot": ids,
        "k_pool": pool, "v_pool": pool, "q": bf16(rows, s.q_heads, s.head_dim),
    }  # fmt: skip
    heads = {"q_heads": s.q_heads, "kv_heads": s.kv_heads, "eps": 1e-5, "rounding": "llama"}
    swiglu = {"x": bf16(rows, s.hidden), "norm": bf16(s.hidden),
              "gate_up": weight(2 * s.inner, s.hidden), "h": bf16(rows, s.inner)}  # fmt: skip
    head = {
        "x": bf16(rows, s.hidden), "logit_rows": ids, "norm": bf16(s.hidden),
        "weight": weight(s.vocab, s.hidden), "temperature": TensorInfo((rows,), "float32"),
        "seed": ids, "position": ids, "choice": ids, "logprob": TensorInfo((rows,), "float32"),
    }  # fmt: skip
    made = {
        "qkv": ("RmsQkvRope", LoweringRequest(qkv, heads)),
        "o": ("Linear", linear(width)),
        "gate and up": ("RmsSwiglu", LoweringRequest(swiglu, {"eps": 1e-5, "rounding": "llama"})),
        "down": ("Linear", linear(s.inner)),
        "head": ("HeadChoose", LoweringRequest(head, {"eps": 1e-5, "rounding": "llama"})),
    }
    return {
        f"{op} {name}": LoweringRequest(r.tensors, op_named(op).complete(r.attributes))
        for name, (op, r) in made.items()
    }
