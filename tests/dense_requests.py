"""Requests for layers of Llama and similar dense models at real sizes, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpt_oss_requests import bf16

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.storage import BF16, Storage
from specbuild.plugins_cuda.registry import op_named


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model.

    ``normed``: queries and keys are normed, as in Qwen3. ``together``: one norm covers all heads.
    ``output``: the outputs of attention and feed-forward are normed, in addition to their inputs
    (``both``) or instead of them. ``residual`` scales what is added to the residual stream. ``cap``
    and ``divisor`` change logits. Norms have the ``rounding``. With ``shared``, a layer reads the
    caches of another one.
    """

    hidden: int
    inner: int
    q_heads: int
    vocab: int
    head_dim: int = 128
    kv_heads: int = 8
    normed: bool = False
    together: bool = False
    output: Literal["none", "only", "both"] = "none"
    residual: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0
    activation: str = "swiglu"
    rounding: str = "llama"
    shared: bool = False


LLAMA_1B = Sizes(2048, 8192, 32, 128256, head_dim=64)
LLAMA_8B = Sizes(4096, 14336, 32, 128256)
LLAMA_70B = Sizes(8192, 28672, 64, 128256)
QWEN3_8B = Sizes(4096, 12288, 32, 151936, normed=True)
QWEN3_32B = Sizes(5120, 25600, 64, 151936, normed=True)
GRANITE_8B = Sizes(4096, 12800, 32, 49152, residual=0.22, divisor=16.0)
OLMO_32B = Sizes(5120, 27648, 40, 100352, normed=True, together=True, output="only",
                 rounding="gpt_oss")  # fmt: skip
# Attention and head of MiniMax-M2, whose feed-forward is experts.
MINIMAX_M2 = Sizes(3072, 1536, 48, 200064, normed=True, together=True)
GEMMA3_12B = Sizes(3840, 15360, 16, 262208, head_dim=256, normed=True, output="both",
                   activation="geglu_tanh", rounding="offset")  # fmt: skip
GEMMA3_27B = Sizes(5376, 21504, 32, 262208, kv_heads=16, normed=True, output="both",
                   activation="geglu_tanh", rounding="offset")  # fmt: skip
# Layers without a window of Gemma 4, the dense feed-forward of 26B-A4B, and the last of E4B.
GEMMA4_26B = Sizes(2816, 2112, 16, 262144, head_dim=512, kv_heads=2, normed=True, output="both",
                   activation="geglu_tanh", rounding="gpt_oss", cap=30.0)  # fmt: skip
GEMMA4_E4B = Sizes(2560, 10240, 8, 262144, head_dim=512, kv_heads=2, normed=True, output="both",
                   activation="geglu_tanh", rounding="gpt_oss", cap=30.0, shared=True)  # fmt: skip


def layer_requests(s: Sizes, rows: int, storage: Storage = BF16) -> dict[str, LoweringRequest]:
    """Return the requests of a layer and of the head for ``rows`` rows, by name."""
    width = s.q_heads * s.head_dim

    def weight(outputs: int, columns: int) -> TensorInfo:
        units = storage.units(columns // 32)
        return TensorInfo((outputs // 16, units, storage.elements), storage.dtype)

    added = {"residual": bf16(rows, s.hidden)} if s.output == "none" else {}

    def linear(columns: int) -> LoweringRequest:
        tensors = {"x": bf16(rows, columns), "weight": weight(s.hidden, columns),
                   **added, "y": bf16(rows, s.hidden)}  # fmt: skip
        return LoweringRequest(tensors, {"scale": s.residual})

    angles = TensorInfo((8192, s.head_dim // 2), "float32")
    pool, ids = bf16(64, s.kv_heads, 64, s.head_dim), TensorInfo((rows,), "int32")
    written = 0 if s.shared else s.kv_heads
    outputs = width + 2 * written * s.head_dim
    counts = {"q_norm": s.q_heads, "k_norm": written} if s.normed else {}
    norms = {n: bf16(s.head_dim * (of if s.together else 1)) for n, of in counts.items() if of}
    norm = {} if s.output == "only" else {"norm": bf16(s.hidden)}
    qkv = {
        "x": bf16(rows, s.hidden), **norm, "weight": weight(outputs, s.hidden),
        **norms, "cos": angles, "sin": angles, "positions": ids, "write_slot": ids,
        "k_pool": pool, "v_pool": pool, "q": bf16(rows, s.q_heads, s.head_dim),
    }  # fmt: skip
    by = {"eps": 1e-5, "rounding": s.rounding}
    heads = {"q_heads": s.q_heads, "kv_heads": written, "head_rounding": s.rounding, **by}
    swiglu = {"x": bf16(rows, s.hidden), **norm,
              "gate_up": weight(2 * s.inner, s.hidden), "h": bf16(rows, s.inner)}  # fmt: skip
    head = {
        "x": bf16(rows, s.hidden), "logit_rows": ids, "norm": bf16(s.hidden),
        "weight": weight(s.vocab, s.hidden), "temperature": TensorInfo((rows,), "float32"),
        "seed": ids, "position": ids, "choice": ids, "logprob": TensorInfo((rows,), "float32"),
    }  # fmt: skip
    made = {
        "qkv": ("RmsQkvRope", LoweringRequest(qkv, heads)),
        "o": ("Linear", linear(width)),
        "gate and up": (
            "RmsSwiglu", LoweringRequest(swiglu, {**by, "activation": s.activation})
        ),
        "down": ("Linear", linear(s.inner)),
        "head": (
            "HeadChoose", LoweringRequest(head, {**by, "divisor": s.divisor, "cap": s.cap})
        ),
    }  # fmt: skip
    if s.output != "none":
        stream = {"hidden": bf16(rows, s.hidden), "hidden_norm": bf16(s.hidden),
                  "residual": bf16(rows, s.hidden), "u": bf16(rows, s.hidden)}  # fmt: skip
        made["output norm"] = ("DraftInput", LoweringRequest(stream, by))
    return {
        f"{op} {name}": LoweringRequest(r.tensors, op_named(op).complete(r.attributes))
        for name, (op, r) in made.items()
    }
