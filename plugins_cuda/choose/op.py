"""Choose: the target's token at each row, by argmax or with Gumbel noise of (seed, position)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.plugins_cuda.choose.body import (
    PHILOX_KEY_STEPS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    body,
)
from specbuild.plugins_cuda.choose.lowering import lower
from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.traffic import NoTraffic

if TYPE_CHECKING:
    import torch

_WORD = 0xFFFFFFFF


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute Philox4x32-10 (Salmon et al., SC 2011) of int64 words with 32 bits: four in, four
    out.
    """
    c, k = list(counter), list(key)
    for _ in range(PHILOX_ROUNDS):
        # The product of two 32-bit words overflows int64, so the multiplier is split.
        high, low = [], []
        for word, multiplier in zip((c[0], c[2]), PHILOX_MULTIPLIERS, strict=True):
            upper, lower = word * (multiplier >> 16), word * (multiplier & 0xFFFF)
            high.append((upper + (lower >> 16)) >> 16)
            low.append((((upper & 0xFFFF) << 16) + lower) & _WORD)
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
        k = [(word + step) & _WORD for word, step in zip(k, PHILOX_KEY_STEPS, strict=True)]
    return c


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return noise [R, vocab]: key (seed, 0), counter (position, v // 4, 0, 0), word v % 4.

    With u = ((x >> 9) + ½)·2⁻²³ the noise is −log(−log u), in fp32.
    """
    import torch

    block = torch.arange((vocab + 3) // 4, device=seed.device).expand(len(seed), -1)
    zero = torch.zeros_like(block)
    counter = [position.long().unsqueeze(1).expand_as(block), block, zero, zero]
    words = philox(counter, [seed.long().unsqueeze(1).expand_as(block), zero])
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab]
    u = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def kept_tokens(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the tokens that remain after top-k and then top-p: bool [R, V].

    ``scaled`` are the logits after temperature; ties go to the lower id. top-k 0 keeps all. top-p
    keeps the smallest prefix of the renormalized, sorted distribution that reaches p, and at least
    one token.
    """
    import torch

    ordered = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = top_k.long().where(top_k > 0, scaled.shape[1]).unsqueeze(1)
    in_top_k = rank < limit
    p = ordered.values.masked_fill(~in_top_k, -torch.inf).softmax(dim=-1)
    before = p.cumsum(dim=-1) - p
    in_top_p = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    keep = in_top_k & (in_top_p | (rank == 0))
    return torch.zeros_like(keep).scatter(1, ordered.indices, keep)


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    floor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token [R] of ``logits`` [R, V], and its log-probability under the raw logits.

    At temperature 0 it is the argmax, with the lowest id on ties. Otherwise it is the Gumbel-max
    sample ``argmax_v (logit_v / temperature + gumbel(seed, position, v))`` over the remaining
    tokens. ``temperature``, ``top_p`` fp32 [R]; ``top_k``, ``seed`` (>= 0), ``position`` int32 [R].

    min_p: if ``floor`` fp32 [R] of a row is below 0, tokens with logits below the largest + floor
    are removed before top-k. With floor = temperature · log(min_p) these are the tokens whose
    probability is below min_p times the largest. 0, or no floor, removes none.
    """
    import torch

    raw = logits.float()
    greedy = temperature == 0
    kept = raw
    if floor is not None:
        threshold = (raw.max(dim=1).values + floor).where(floor < 0, -torch.inf)
        kept = raw.masked_fill(raw < threshold.unsqueeze(1), -torch.inf)
    scaled = kept / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    noisy = scaled + gumbel_noise(seed, position, raw.shape[1])
    noisy = noisy.masked_fill(~kept_tokens(scaled, top_k, top_p), -torch.inf)
    score = torch.where(greedy.unsqueeze(1), raw, noisy)
    choice = score.argmax(dim=-1)
    logprob = raw.log_softmax(dim=-1).gather(1, choice.unsqueeze(1)).squeeze(1)
    return choice.int(), logprob


OP = OpSpec(
    name="Choose",
    doc="Logits to the target's token at each row: argmax, or sampled with positional noise.",
    inputs=(
        TensorSpec("logits", "float32", ("R", "vocab")),
        TensorSpec("temperature", "float32", ("R",)),
        TensorSpec("top_k", "int32", ("R",)),
        TensorSpec("top_p", "float32", ("R",)),
        TensorSpec("seed", "int32", ("R",)),
        TensorSpec("position", "int32", ("R",)),
        TensorSpec("floor", "float32", ("R",), optional=True),
    ),
    outputs=(
        TensorSpec("choice", "int32", ("R",)),
        TensorSpec("logprob", "float32", ("R",)),
    ),
    attributes=(),
    reference=reference,
    body=body,
    lower=lower,
    traffic=NoTraffic("logits were written by the launch in front and stay in the L2 cache"),
)
