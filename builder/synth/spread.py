"""Tokens that are followed by any of several: a target of a given entropy, and a draft's distance.

The tokens of text form groups of K that follow one another: after token j of a group comes one of
the K tokens of the next group. Their logits are a common value plus offsets c[(i − j) mod K] of
token i, so the distribution is the softmax of c after every token, and its entropy is that of the
softmax. Greedy decoding takes i = j, which is the permutation of ``TokenRules``.

An embedding is the sum of a direction of the token's group and one of its number j in the group;
K orthogonal directions serve all groups. The head's row of a token adds the direction of the group
before it, and for each j the offset times the direction of j.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.tokens import TokenRules
from specbuild.runtime.errors import SpecbuildError

# Shares of an embedding's squares that tell the group and the number in it.
GROUP, NUMBER = math.sqrt(1 / 3), math.sqrt(2 / 3)
# How far the logits of a group are above the logarithm of the summed weights of all other tokens.
MARGIN = 10.0
_MAX_TOKENS = 64  # of a group
_SLACK = 0.7  # nats by which the entropy of a group's equal tokens exceeds the requested one
_SAMPLES = 4096
_STEPS = 40  # of a bisection


@dataclass(frozen=True)
class TokenSpread:
    """``group`` and ``number`` int64 [V] of each token; tokens outside of text have own groups.

    ``target`` and ``draft`` are the offsets c fp32 [K] of the target and of a draft.
    """

    group: torch.Tensor
    number: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor

    def directions(self, noise: Noise, tokens: torch.Tensor, hidden: int) -> torch.Tensor:
        """Embeddings of ``tokens`` int64 [n] without the constant: fp32 [n, H], as in streams."""
        numbers = self.number_directions(noise, hidden)[self.number[tokens]]
        return GROUP * self.group_directions(noise, tokens, hidden) + NUMBER * numbers

    def group_directions(self, noise: Noise, tokens: torch.Tensor, hidden: int) -> torch.Tensor:
        """fp32 [n, H], orthogonal to the directions of numbers, with squares that sum to H − 1."""
        rows = noise.normal("model.embed_tokens.weight", self.group[tokens], hidden)
        rows[:, 0] = 0
        axes = self.number_directions(noise, hidden)
        rows -= rows @ axes.T @ axes / (hidden - 1)
        return rows * (math.sqrt(hidden - 1) / torch.linalg.vector_norm(rows, dim=1, keepdim=True))

    def number_directions(self, noise: Noise, hidden: int) -> torch.Tensor:
        """fp32 [K, H]: orthogonal, 0 in front, with squares that sum to H − 1."""
        drawn = noise.normal("numbers in a group", torch.arange(len(self.target)), hidden)
        basis = torch.linalg.qr(drawn[:, 1:].T).Q.T * math.sqrt(hidden - 1)
        return torch.cat([torch.zeros(len(basis), 1), basis], dim=1)

    def offsets(self, before: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The offset of a token after each number of the group before it, fp32 [n, K].

        ``before`` int64 [n] are the tokens that it follows in greedy decoding.
        """
        count = len(values)
        return values[(self.number[before][:, None] - torch.arange(count)) % count]

    def head(self, noise: Noise, before: torch.Tensor, hidden: int) -> torch.Tensor:
        """Rows of the target's head for tokens that follow ``before`` int64 [n]: fp32 [n, H]."""
        others = self.common_logit(len(self.group), self.target, 1 / hidden)
        rows = self.group_directions(noise, before, hidden) * (others / GROUP)
        weights = self.offsets(before, self.target) / NUMBER
        return (rows + weights @ self.number_directions(noise, hidden)) / hidden

    @staticmethod
    def common_logit(vocab: int, offsets: torch.Tensor, variance: float) -> float:
        """The logit of a group's tokens, before offsets, that exceeds all others by ``MARGIN``.

        Logits of other groups are normal: ``variance`` is theirs over the square of this logit.
        """
        gain = float(offsets.exp().mean().log() - offsets.exp().sum().log())
        logit = 0.0
        for _ in range(_STEPS):
            logit = min(math.log(vocab) + gain + MARGIN + variance * logit**2 / 2, 1 / variance)
        return logit


def token_spread(
    rules: TokenRules, *, entropy: float, tv: float, draft_space: int | None
) -> TokenSpread:
    """The groups of the tokens of text, with this mean entropy (nats) and total variation distance.

    ``draft_space`` is the number of dimensions in which a draft tells tokens apart, None without a
    draft: its offsets are disturbed by the directions of groups.

    Raises SpecbuildError if no group size or no draft has these values.
    """
    text = len(rules.cycle)
    sizes = [k for k in (2, 4, 8, 16, 32, _MAX_TOKENS) if math.log(k) >= entropy + _SLACK]
    size = next((k for k in sizes if text % k == 0), None)
    if entropy <= 0 or size is None:
        raise SpecbuildError(
            f"--target-entropy {entropy:g}: choose a value above 0 and below "
            f"{math.log(_MAX_TOKENS) - _SLACK:.1f} nats; the {text} tokens of text form groups"
        )
    target = _offsets_of(size, entropy)
    draft = target if draft_space is None else _draft_offsets(target, tv, draft_space)
    return TokenSpread(*_groups(rules, size), target, draft)


def _groups(rules: TokenRules, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Group and number of every token, so that the successors of a group are a group."""
    count = len(rules.cycle) // size
    group = torch.arange(len(rules.before)) + count
    number = torch.zeros(len(rules.before), dtype=torch.int64)
    place = torch.arange(len(rules.cycle))
    group[rules.cycle], number[rules.cycle] = place % count, place // count
    return group, number


def _offsets_of(size: int, entropy: float) -> torch.Tensor:
    """Offsets −λ·i whose softmax has this entropy, with mean 0."""
    numbers = torch.arange(size, dtype=torch.float64)

    def entropy_of(slope: float) -> float:
        p = torch.softmax(-slope * numbers, dim=0)
        return -float(torch.special.xlogy(p, p).sum())

    slope = _bisect(lambda value: -entropy_of(value), -entropy, 30.0)
    offsets = -slope * numbers
    return (offsets - offsets.mean()).float()


def _draft_offsets(target: torch.Tensor, tv: float, space: int) -> torch.Tensor:
    """Offsets of a draft whose mean total variation distance from the target is ``tv``.

    Its distribution is a mixture of the target's and of one whose tokens are half a group further.
    """
    p = torch.softmax(target.double(), dim=0)
    further = p.roll(len(p) // 2)
    drawn = torch.randn(_SAMPLES, len(p), generator=torch.Generator().manual_seed(1))

    def offsets_of(share: float) -> torch.Tensor:
        offsets = ((1 - share) * p + share * further).log()
        return offsets - offsets.mean()

    def distance(share: float) -> float:
        offsets = offsets_of(share)
        disturbed = float(offsets.norm()) * GROUP / (NUMBER * math.sqrt(space))
        q = torch.softmax(offsets + disturbed * drawn, dim=1)
        return float((q - p).abs().sum(dim=1).mean()) / 2

    least, most = distance(0.0), distance(1.0)
    if not least <= tv <= most:
        raise SpecbuildError(
            f"--draft-tv {tv:g}: a draft of these sizes has a distance from {least:.2f} to "
            f"{most:.2f} at this entropy"
        )
    return offsets_of(_bisect(distance, tv, 1.0)).float()


def _bisect(rising: Callable[[float], float], value: float, high: float) -> float:
    """Return where a rising function has a value, between 0 and ``high``."""
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > value else (middle, high)
    return (low + high) / 2
