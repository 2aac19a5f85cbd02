"""Requests for layers with MLA at the sizes of real models, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from gpt_oss_requests import bf16

from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.storage import BF16, Storage
from specbuild.plugins_cuda.registry import op_named

RANK, ROPE, PAGE, PAGES = 512, 64, 64, 128


@dataclass(frozen=True)
class MlaSizes:
    """The sizes of one model. ``query`` is None if queries have no latent."""

    hidden: int
    heads: int
    nope: int
    value: int
    query: int | None


YOUTU = MlaSizes(2048, 16, 128, 128, 1536)
DEEPSEEK_V2_LITE = MlaSizes(2048, 16, 128, 128, None)
GLM = MlaSizes(2048, 20, 192, 256, 768)
DEEPSEEK_V3 = MlaSizes(7168, 128, 128, 128, 1536)


def mla_requests(
    s: MlaSizes, rows: int, storage: Storage = BF16, batch: int = 1
) -> dict[str, LoweringRequest]:
    """Return the requests of a layer's attention for ``rows`` rows, except plain projections."""
    heads = s.heads * (s.nope + ROPE)
    projected = (heads if s.query is None else s.query) + RANK + ROPE
    units = storage.units(s.hidden // 32)
    ids, angles = TensorInfo((rows,), "int32"), TensorInfo((8192, ROPE // 2), "float32")
    turning = {"cos": angles, "sin": angles, "positions": ids}
    pool, absorbed = bf16(batch * PAGES + 1, 1, PAGE, RANK + ROPE), bf16(rows, s.heads, RANK + ROPE)
    low_rank = {
        "x": bf16(rows, s.hidden), "norm": bf16(s.hidden),
        "weight": TensorInfo((projected // 16, units, storage.elements), storage.dtype),
        "latent_norm": bf16(RANK), **turning, "write_slot": ids, "c_pool": pool,
        "q": bf16(rows, projected - RANK - ROPE),
    }  # fmt: skip
    if s.query is not None:
        low_rank["q_norm"] = bf16(s.query)
    absorb = {"q": bf16(rows, heads), "weight": bf16(s.heads * RANK // 16, s.nope // 32, 512),
              **turning, "absorbed": absorbed}  # fmt: skip
    attend = {
        "q": absorbed, "c_pool": pool, "w_v": bf16(RANK, s.heads, s.value),
        "page_table": TensorInfo((batch, 1, PAGES), "int32"),
        "row_start": TensorInfo((batch + 1,), "int32"), "row_slot": ids,
        "tree_start": TensorInfo((batch,), "int32"),
        "ancestor_bits": TensorInfo((rows, 1), "int32"), "attended": bf16(rows, s.heads, s.value),
    }  # fmt: skip
    made = {
        "RmsLowRank": (low_rank, {"eps": 1e-6, "latent_eps": 1e-6}),
        "AbsorbQuery": (absorb, {"q_heads": s.heads, "entry": RANK + ROPE}),
        "MlaAttention": (attend, {"scale": 0.07, "window": 0}),
    }
    return {
        name: LoweringRequest(tensors, op_named(name).complete(attributes))
        for name, (tensors, attributes) in made.items()
    }
