"""DSA-lite's indexers as trainable parameters in a frozen GPT-OSS.

An indexer learns from the attention that it makes sparse. Let p(t, s) be the attention weights of a
row's keys, summed over query heads. The loss of a row is ``KL(p ‖ softmax_s score(t, s))`` over the
keys from which it selects (DeepSeek-V3.2-Exp, equation 3). The first and the recent tokens are
always selected, so they are excluded: p is normalized over the other keys. The weight of a row is
its attention mass on them, where 1 is the attention of all heads.

If other terms train an indexer, its selection is relaxed. The distance of a key's score from that
of the last selected key, in standard deviations of the row's scores, adds ``log σ(4 ·)`` to the
key's attention score. (With an absolute distance equal scores for all keys would be optimal.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specbuild.builder.checkpoint.indexers import HEAD_WEIGHTS, KEYS, QUERIES
from specbuild.builder.training.heads.attention import AttentionInputs, attend
from specbuild.builder.training.heads.backbone import Backbone, Switch
from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores

# The loss computes scores of this many rows at a time; the backward pass recomputes them.
_ROWS = 256
# The width of a relaxed selection, in standard deviations of scores.
_SOFTNESS = 0.25

Mode = Literal["whole", "sparse", "relaxed"]


@dataclass(frozen=True)
class IndexerShape:
    """``heads`` query heads of ``width``; a single one has no head weights (the simple form)."""

    heads: int
    width: int


@dataclass
class SparsePattern:
    """How the layers of all indexers attend, and whether they compute the loss of their scores."""

    top_k: int
    first_tokens: int
    recent_tokens: int
    mode: Mode = "whole"
    learns: bool = False


class LayerIndexer(nn.Module):
    """One layer's indexer in fp32, with the file's names."""

    def __init__(
        self, hidden: int, shape: IndexerShape, pattern: SparsePattern, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape, self.pattern = shape, pattern
        widths = {QUERIES: shape.heads * shape.width, KEYS: shape.width}
        widths |= {HEAD_WEIGHTS: shape.heads} if shape.heads > 1 else {}
        for name, width in widths.items():
            values = torch.randn(hidden, width, generator=generator) * hidden**-0.5
            if name == QUERIES:  # the size of scores must not depend on the width
                values *= shape.width**-0.5
            self.register_parameter(name, nn.Parameter(values))
        self.input: torch.Tensor | None = None
        self.divergence: torch.Tensor | None = None

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return queries, keys and head weights of ``x`` [B, T, H], for ``indexer_scores``."""
        q = (x @ self.get_parameter(QUERIES).to(x.dtype)).unflatten(-1, (self.shape.heads, -1))
        k = x @ self.get_parameter(KEYS).to(x.dtype)
        if self.shape.heads == 1:
            return q, k, None
        return q, k, x @ self.get_parameter(HEAD_WEIGHTS).to(x.dtype)

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the layer's attention [B, Hq, T, D], sparse as :class:`SparsePattern` states."""
        assert self.input is not None
        x, self.input = self.input.detach(), None
        if self.pattern.learns:
            self.divergence = self._divergence(x, inputs)
        if self.pattern.mode == "whole":
            return attend(inputs)
        return attend(inputs, self._attention_bias(x, inputs))

    def _attention_bias(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Return the bias of the attention scores, [B, 1, T, T]."""
        scores = indexer_scores(*self.project(x))
        visible = inputs.visible()
        always_selected = _always_selected(visible, self.pattern)
        selected, last_score = choose(scores.detach(), visible, always_selected, self.pattern.top_k)
        if self.pattern.mode == "sparse":
            return torch.zeros_like(scores).masked_fill(~selected, -torch.inf).unsqueeze(1)
        scale = _SOFTNESS * _deviation(scores.detach(), visible & ~always_selected)
        selectable = F.logsigmoid((scores - last_score) / scale).masked_fill(
            always_selected | last_score.isinf(), 0.0
        )
        return selectable.masked_fill(~visible, -torch.inf).unsqueeze(1)

    def _divergence(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Return the loss, summed over rows."""
        q, k, weights = self.project(x)
        sums = []
        for start in range(0, q.shape[1], _ROWS):
            rows = slice(start, start + _ROWS)
            row_weights = None if weights is None else weights[:, rows]
            part = (q[:, rows], k, row_weights, inputs, rows, self.pattern)
            divergence = checkpoint(
                _row_divergence, *part, use_reentrant=False, preserve_rng_state=False
            )
            sums.append(divergence)
        return torch.stack(sums).sum()


def choose(
    scores: torch.Tensor, visible: torch.Tensor, always_selected: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys to which rows attend, bool [..., T, S], and a score [..., T, 1].

    The keys are those ``always_selected``, and the ``top_k`` other visible keys with the best
    ``scores``; the lower of equal ones. The score is that of the last selected key, −∞ if a row
    selects all keys.
    """
    selectable = scores.masked_fill(always_selected | ~visible, -torch.inf)
    if top_k >= scores.shape[-1]:
        return visible.expand_as(scores), torch.full_like(scores[..., :1], -torch.inf)
    ranked = selectable.sort(dim=-1, descending=True, stable=True)
    best = ranked.indices[..., :top_k]
    selected = torch.zeros_like(visible.expand_as(scores)).scatter(-1, best, True)
    return (selected & visible) | always_selected, ranked.values[..., top_k - 1 : top_k]


def _deviation(scores: torch.Tensor, selectable: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of a row's ``selectable`` scores, [..., T, 1]."""
    count = selectable.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * selectable).sum(-1, keepdim=True) / count
    return (
        (((scores - mean).square() * selectable).sum(-1, keepdim=True) / count)
        .sqrt()
        .clamp(min=1e-6)
    )


def _always_selected(visible: torch.Tensor, pattern: SparsePattern) -> torch.Tensor:
    """Return which of the visible keys [T, S] of a full sequence are always selected."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    rows = torch.arange(visible.shape[0], device=visible.device)[:, None]
    is_recent = rows - keys < pattern.recent_tokens
    return visible & (is_recent | (keys < pattern.first_tokens))


def _row_divergence(  # noqa: PLR0917
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    inputs: AttentionInputs,
    rows: slice,
    pattern: SparsePattern,
) -> torch.Tensor:
    """Return the loss of some rows, with ``q`` [B, R, n, d] and ``k`` [B, T, d]."""
    end = min(rows.stop, k.shape[1])  # later keys are not visible
    visible = inputs.visible()
    selectable = (visible & ~_always_selected(visible, pattern))[rows, :end]
    target = _attention_mass(inputs, rows, visible[rows, :end]) * selectable
    mass = target.sum(-1, keepdim=True)
    scores = indexer_scores(q, k[:, :end], weights).masked_fill(~selectable, -torch.inf)
    log_p = scores.log_softmax(-1).masked_fill(~selectable, 0.0)
    # mass · KL(target/mass ‖ p) = Σ target · (log(target/mass) − log p); rows without mass give 0
    divergence = torch.xlogy(target, target / mass.clamp(min=1e-20)) - target * log_p
    return divergence.masked_fill(~selectable, 0.0).sum()


@torch.no_grad()
def _attention_mass(inputs: AttentionInputs, rows: slice, visible: torch.Tensor) -> torch.Tensor:
    """Return the mean attention weights of some rows over query heads, fp32 [B, R, S].

    The weights of sinks are left out. ``visible`` [R, S] may end before the sequence.
    """
    q = inputs.q[:, :, rows].unflatten(1, (inputs.k.shape[1], -1))
    keys = inputs.k[:, :, : visible.shape[1]].unsqueeze(2)
    scores = (q @ keys.mT).flatten(1, 2).float() * inputs.scale
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = inputs.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
    return weights[..., :-1].mean(1)


class IndexerHeads(nn.Module):
    """The indexers of ``layers``, which have one shape."""

    def __init__(
        self,
        backbone: Backbone,
        layers: tuple[int, ...],
        shape: IndexerShape,
        pattern: SparsePattern,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        self.pattern = pattern
        self.layers = nn.ModuleDict()
        device = next(backbone.model.parameters()).device
        hidden = backbone.model.config.hidden_size
        for index in layers:
            generator = torch.Generator().manual_seed(seed + index)
            indexer = LayerIndexer(hidden, shape, pattern, generator).to(device)
            self.layers[str(index)] = indexer
            attention: Any = backbone.layers[index].self_attn
            attention.head = _Switched(indexer, backbone.switch)
            attention.register_forward_pre_hook(_store_input, with_kwargs=True)

    def divergence(self) -> torch.Tensor:
        """Return the loss of the last forward pass: summed over rows, averaged over layers.

        The call removes it from the layers, which would keep the gradients of the pass.
        """
        layers: list[Any] = list(self.layers.values())
        divergences = [layer.divergence for layer in layers]
        for layer in layers:
            layer.divergence = None
        return torch.stack([part for part in divergences if part is not None]).mean()

    def tensors(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the file."""
        return {
            f"model.layers.{index}.self_attn.{name}": value.detach().cpu().to(dtype).contiguous()
            for index, layer in self.layers.items()
            for name, value in layer.named_parameters()
        }


class _Switched(nn.Module):
    """The indexer's attention if the new heads are on, else plain attention."""

    def __init__(self, indexer: LayerIndexer, switch: Switch) -> None:
        super().__init__()
        self.indexer, self.switch = indexer, switch

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        return self.indexer(inputs) if self.switch.on else attend(inputs)


def _store_input(attention: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Store the attention's input, which the indexer also reads."""
    attention.head.indexer.input = kwargs["hidden_states"]
