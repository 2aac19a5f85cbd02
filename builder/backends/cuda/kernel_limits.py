"""The sizes and kinds of layers that CUDA kernels support, in targets and draft models."""

from __future__ import annotations

from typing import Protocol

from specbuild.plugins_cuda.absorb_query.lowering import MAX_NOPE
from specbuild.plugins_cuda.linear.packing import BLOCK, TILE_ROWS
from specbuild.plugins_cuda.mla_attention.geometry import (
    ABSORBED_VALUE_WIDTHS,
    MAX_ABSORBED,
    MAX_ABSORBED_VALUE,
)
from specbuild.plugins_cuda.paged_tree_attention.geometry import MAX_GROUP, WIDTHS
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import AttentionParts, MlaGeometry, TargetGeometry
from specbuild.runtime.errors import SpecbuildError


class LayeredDraft(DraftGeometry, Protocol):
    """A draft of LLaMA layers: attention, and an MLP of width ``inner``."""

    @property
    def attention(self) -> AttentionParts: ...
    @property
    def inner(self) -> int: ...


def require_tiles(model: str, *, rows: dict[str, int], columns: dict[str, int]) -> None:
    """Raise SpecbuildError for a size that is not a multiple of a kernel's tile."""
    for sizes, tile in ((rows, TILE_ROWS), (columns, BLOCK)):
        for name, size in sizes.items():
            if size % tile:
                raise SpecbuildError(
                    f"the {model}'s {name} is {size}, but CUDA kernels need a multiple of {tile}; "
                    "build with --backend cpu"
                )


def require_heads(model: str, g: TargetGeometry | LayeredDraft) -> None:
    """Raise SpecbuildError for attention heads without a kernel."""
    require_tiles(
        model,
        rows={"head_dim": g.head_dim},
        columns={"num_attention_heads * head_dim": g.q_heads * g.head_dim},
    )
    if g.head_dim not in WIDTHS or g.q_heads // g.kv_heads > MAX_GROUP:
        raise SpecbuildError(
            f"the {model} has {g.q_heads} query and {g.kv_heads} KV heads of {g.head_dim}, but "
            f"CUDA kernels support heads of {', '.join(map(str, WIDTHS))} and up to {MAX_GROUP} "
            "query heads per KV head; build with --backend cpu"
        )


def require_head_norms(attention: AttentionParts) -> None:
    """Raise SpecbuildError for norms of a draft's queries and keys without a kernel."""
    if attention.qk_norm == "all_heads":
        raise SpecbuildError(
            "the draft normalizes the queries of all heads together before RoPE, but CUDA kernels "
            "normalize each head; build with --backend cpu"
        )


def require_mla(model: str, heads: int, mla: MlaGeometry) -> None:
    """Raise SpecbuildError for sizes of native latent attention (MLA) without a kernel."""
    columns = {
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "num_attention_heads * v_head_dim": heads * mla.v_dim,
    }
    if mla.q_lora_rank is not None:
        columns["q_lora_rank"] = mla.q_lora_rank
    require_tiles(model, rows={"qk_rope_head_dim": mla.rope_dim}, columns=columns)
    limits = {
        "kv_lora_rank": (mla.kv_lora_rank, MAX_ABSORBED_VALUE),
        "kv_lora_rank + qk_rope_head_dim": (mla.entry_width, MAX_ABSORBED),
        "qk_nope_head_dim": (mla.nope_dim, MAX_NOPE),
    }
    for name, (size, largest) in limits.items():
        if size > largest:
            raise SpecbuildError(
                f"the {model}'s {name} is {size}, but CUDA kernels support up to {largest}; build "
                "with --backend cpu"
            )
    if mla.v_dim not in ABSORBED_VALUE_WIDTHS:
        raise SpecbuildError(
            f"the {model}'s v_head_dim is {mla.v_dim}, but CUDA kernels support "
            f"{', '.join(map(str, ABSORBED_VALUE_WIDTHS))}; build with --backend cpu"
        )


def require_quantized_experts(
    option: str, model: str, dtype: str | None, moe: MoeFeedForward
) -> None:
    """Raise SpecbuildError if an option requests a format of experts without a kernel."""
    if dtype == "fp8" and moe.storage != "mxfp4":
        raise SpecbuildError(
            f"{option} fp8: {model} has experts, which CUDA kernels support in bf16 or mxfp4; "
            f"remove the option, or build with {option} mxfp4"
        )


def require_draft_layers(_target: TargetGeometry, draft: LayeredDraft) -> None:
    """Raise SpecbuildError for parts of a draft's layers without a kernel."""
    require_head_norms(draft.attention)
    require_tiles(
        "draft",
        rows={"draft_vocab_size": draft.vocab},
        columns={"hidden_size": draft.hidden, "intermediate_size": draft.inner},
    )
    if draft.mla is None:
        require_heads("draft", draft)
    else:
        require_mla("draft", draft.q_heads, draft.mla)
