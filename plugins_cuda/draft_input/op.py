"""DraftInput: the input of the draft's attention: the normalized embedding and hidden state.

Without an embedding it is a norm of rows, optionally with a residual, for models that normalize
the outputs of attention and feed-forward layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.draft_input.lowering import lower
from specbuild.plugins_cuda.embed.op import table_rows
from specbuild.plugins_cuda.opspec import AttributeSpec, OpSpec, TensorSpec
from specbuild.plugins_cuda.rms_norms import rms_norm
from specbuild.plugins_cuda.traffic import Weights

if TYPE_CHECKING:
    import torch


def reference(
    token_ids: torch.Tensor | None,
    table: torch.Tensor | None,
    embed_norm: torch.Tensor | None,
    hidden: torch.Tensor,
    hidden_norm: torch.Tensor,
    residual: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    *,
    eps: float,
    segments: int,
    rounding: str = "llama",
) -> torch.Tensor:
    """Return ``[rms(table[token_ids]); rms(hidden)]`` [T, 2H], or ``rms(hidden)`` [T, H].

    ``hidden`` is [T, H]; ``rounding`` is that of the norms. Each of ``segments`` equal parts of a
    hidden state has a separate norm, with its part of ``hidden_norm``. With a table there is one
    segment. ``table`` (in row order, or packed as Embed's) and ``embed_norm`` come together and
    need ``token_ids``. Without a table, ``residual`` [T, H] can be added, and the rounded sum can
    be multiplied by ``factor`` [1].
    """
    import torch

    parts = zip(hidden.chunk(segments, dim=-1), hidden_norm.chunk(segments), strict=True)
    normed = torch.cat([rms_norm(part, weight, eps, rounding) for part, weight in parts], dim=-1)
    if residual is not None:
        normed = (residual.float() + normed.float()).to(hidden.dtype)
    if factor is not None:
        normed = (normed.float() * factor.float()).to(hidden.dtype)
    if table is None or embed_norm is None or token_ids is None:
        return normed
    tokens = table_rows(table, token_ids).to(hidden.dtype)
    embedded = rms_norm(tokens, embed_norm, eps, rounding)
    return torch.cat([embedded, normed], dim=-1)


OP = OpSpec(
    name="DraftInput",
    doc="The draft's normed embedding and hidden state, or a norm of rows, perhaps plus others.",
    inputs=(
        TensorSpec("token_ids", "int32", ("T",), optional=True),
        TensorSpec("table", "W", optional=True, rank_free=True),
        TensorSpec("embed_norm", "W", ("H",), optional=True),
        TensorSpec("hidden", "T", ("T", "H")),
        TensorSpec("hidden_norm", "W", ("H",)),
        TensorSpec("residual", "T", ("T", "H"), optional=True),
        TensorSpec("factor", "W", ("1",), optional=True),
    ),
    outputs=(TensorSpec("u", "T", ("T", "width")),),
    attributes=(
        AttributeSpec("eps", float),
        AttributeSpec("segments", int, 1),
        AttributeSpec("rounding", str, "llama"),
    ),
    reference=reference,
    lower=lower,
    traffic=Weights(looked_up=("table",)),
)
