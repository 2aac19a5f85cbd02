"""DSA-lite's indexers as trainable parameters inside a frozen GPT-OSS.

An indexer learns from the attention that it is to make sparse: with p(t, s) the weights of a row's
keys, summed over query heads, the loss of a row is ``KL(p ‖ softmax_s score(t, s))`` over the keys
that it chooses among (DeepSeek-V3.2-Exp, equation 3). Those that are kept in any case, the first
tokens and the recent ones, take no part: p is what falls on the others, and a row counts by its
mass there, 1 being all of the attention of all heads.
Where other terms are to train it, its choice is relaxed: how far a key's score is above or below
that of the last one chosen, in standard deviations of the row's scores, adds ``log σ(4 ·)`` to the
key's attention score. (In absolute terms the best choice would be to score all keys alike.)
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
from specbuild.builder.training.heads.attention import Scene, attend
from specbuild.builder.training.heads.backbone import Backbone, Switch
from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores

# Scores of so many rows are made at a time in the loss; the backward pass makes them again.
_ROWS = 256
# Standard deviations of scores over which a relaxed choice fades.
_SOFTNESS = 0.25

Mode = Literal["whole", "sparse", "relaxed"]


@dataclass(frozen=True)
class IndexerShape:
    """``heads`` query heads of ``width``; a single one has no head weights (the simple form)."""

    heads: int
    width: int


@dataclass
class SparsePattern:
    """How all indexers' layers attend, and whether the loss of their scores is computed."""

    top_k: int
    first_tokens: int
    recent_tokens: int
    mode: Mode = "whole"
    learns: bool = False


class LayerIndexer(nn.Module):
    """One layer's indexer, fp32, under the names of the file."""

    def __init__(
        self, hidden: int, shape: IndexerShape, pattern: SparsePattern, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape, self.pattern = shape, pattern
        widths = {QUERIES: shape.heads * shape.width, KEYS: shape.width}
        widths |= {HEAD_WEIGHTS: shape.heads} if shape.heads > 1 else {}
        for name, width in widths.items():
            drawn = torch.randn(hidden, width, generator=generator) * hidden**-0.5
            if name == QUERIES:  # scores of one size, whatever the width
                drawn *= shape.width**-0.5
            self.register_parameter(name, nn.Parameter(drawn))
        self.input: torch.Tensor | None = None
        self.divergence: torch.Tensor | None = None

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys and head weights of ``x`` [B, T, H], as ``indexer_scores`` takes them."""
        q = (x @ self.get_parameter(QUERIES).to(x.dtype)).unflatten(-1, (self.shape.heads, -1))
        k = x @ self.get_parameter(KEYS).to(x.dtype)
        if self.shape.heads == 1:
            return q, k, None
        return q, k, x @ self.get_parameter(HEAD_WEIGHTS).to(x.dtype)

    def forward(self, scene: Scene) -> torch.Tensor:
        """The attention of the layer, sparse as :class:`SparsePattern` has it: [B, Hq, T, D]."""
        assert self.input is not None
        x, self.input = self.input.detach(), None
        if self.pattern.learns:
            self.divergence = self._divergence(x, scene)
        if self.pattern.mode == "whole":
            return attend(scene)
        return attend(scene, self._joins(x, scene))

    def _joins(self, x: torch.Tensor, scene: Scene) -> torch.Tensor:
        """What joins the attention scores, [B, 1, T, T]."""
        scores = indexer_scores(*self.projected(x))
        seen = scene.visible()
        kept = _kept(seen, self.pattern)
        chosen, last = choose(scores.detach(), seen, kept, self.pattern.top_k)
        if self.pattern.mode == "sparse":
            return torch.zeros_like(scores).masked_fill(~chosen, -torch.inf).unsqueeze(1)
        spread = _SOFTNESS * _spread(scores.detach(), seen & ~kept)
        free = F.logsigmoid((scores - last) / spread).masked_fill(kept | last.isinf(), 0.0)
        return free.masked_fill(~seen, -torch.inf).unsqueeze(1)

    def _divergence(self, x: torch.Tensor, scene: Scene) -> torch.Tensor:
        """The loss, summed over rows."""
        q, k, weights = self.projected(x)
        sums = []
        for start in range(0, q.shape[1], _ROWS):
            rows = slice(start, start + _ROWS)
            own = None if weights is None else weights[:, rows]
            part = (q[:, rows], k, own, scene, rows, self.pattern)
            found = checkpoint(
                _row_divergence, *part, use_reentrant=False, preserve_rng_state=False
            )
            sums.append(found)
        return torch.stack(sums).sum()


def choose(
    scores: torch.Tensor, seen: torch.Tensor, kept: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that rows attend to, bool [..., T, S], and the last chosen one's score [..., T, 1].

    Those ``kept``, and of the others that are ``seen`` the ``top_k`` with the best ``scores``, on
    ties the lower key. A row that chooses all has a last score of −∞.
    """
    free = scores.masked_fill(kept | ~seen, -torch.inf)
    if top_k >= scores.shape[-1]:
        return seen.expand_as(scores), torch.full_like(scores[..., :1], -torch.inf)
    ranked = free.sort(dim=-1, descending=True, stable=True)
    best = ranked.indices[..., :top_k]
    chosen = torch.zeros_like(seen.expand_as(scores)).scatter(-1, best, True)
    return (chosen & seen) | kept, ranked.values[..., top_k - 1 : top_k]


def _spread(scores: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """The standard deviation of a row's ``free`` scores, [..., T, 1]."""
    count = free.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * free).sum(-1, keepdim=True) / count
    return (((scores - mean).square() * free).sum(-1, keepdim=True) / count).sqrt().clamp(min=1e-6)


def _kept(seen: torch.Tensor, pattern: SparsePattern) -> torch.Tensor:
    """Of the keys seen [T, S] of a whole sequence, those that are always attended to."""
    keys = torch.arange(seen.shape[-1], device=seen.device)
    rows = torch.arange(seen.shape[0], device=seen.device)[:, None]
    near = rows - keys < pattern.recent_tokens
    return seen & (near | (keys < pattern.first_tokens))


def _row_divergence(  # noqa: PLR0917
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    scene: Scene,
    rows: slice,
    pattern: SparsePattern,
) -> torch.Tensor:
    """Of some rows. ``q`` [B, R, n, d], ``k`` [B, T, d]."""
    end = min(rows.stop, k.shape[1])  # later keys are not seen
    seen = scene.visible()
    free = (seen & ~_kept(seen, pattern))[rows, :end]
    wanted = _attention_mass(scene, rows, seen[rows, :end]) * free
    mass = wanted.sum(-1, keepdim=True)
    scores = indexer_scores(q, k[:, :end], weights).masked_fill(~free, -torch.inf)
    log_p = scores.log_softmax(-1).masked_fill(~free, 0.0)
    # mass · KL(wanted/mass ‖ p) = Σ wanted · (log(wanted/mass) − log p); rows without any give 0
    found = torch.xlogy(wanted, wanted / mass.clamp(min=1e-20)) - wanted * log_p
    return found.masked_fill(~free, 0.0).sum()


@torch.no_grad()
def _attention_mass(scene: Scene, rows: slice, seen: torch.Tensor) -> torch.Tensor:
    """Attention weights of some rows, the query heads' mean, beside sinks: fp32 [B, R, S].

    ``seen`` [R, S] may end before the sequence.
    """
    q = scene.q[:, :, rows].unflatten(1, (scene.k.shape[1], -1))
    keys = scene.k[:, :, : seen.shape[1]].unsqueeze(2)
    scores = (q @ keys.mT).flatten(1, 2).float() * scene.scale
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = scene.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    joined = torch.cat([scores, sinks], dim=-1).softmax(-1)
    return joined[..., :-1].mean(1)


class IndexerHeads(nn.Module):
    """The indexers of ``layers``, all of one shape."""

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
            attention.register_forward_pre_hook(_remember, with_kwargs=True)

    def divergence(self) -> torch.Tensor:
        """The loss of the last forward pass: summed over rows, the layers' mean.

        Taken from the layers: what they kept would keep the pass's gradients alive too.
        """
        layers: list[Any] = list(self.layers.values())
        found = [layer.divergence for layer in layers]
        for layer in layers:
            layer.divergence = None
        return torch.stack([part for part in found if part is not None]).mean()

    def tensors(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """What the file holds."""
        return {
            f"model.layers.{index}.self_attn.{name}": value.detach().cpu().to(dtype).contiguous()
            for index, layer in self.layers.items()
            for name, value in layer.named_parameters()
        }


class _Switched(nn.Module):
    """An indexer's attention where the new heads compute, and the plain one elsewhere."""

    def __init__(self, indexer: LayerIndexer, switch: Switch) -> None:
        super().__init__()
        self.indexer, self.switch = indexer, switch

    def forward(self, scene: Scene) -> torch.Tensor:
        return self.indexer(scene) if self.switch.on else attend(scene)


def _remember(attention: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """The attention's own input, which the indexer reads too."""
    attention.head.indexer.input = kwargs["hidden_states"]
