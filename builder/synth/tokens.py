"""Which token follows which: in the target, and in a draft that agrees with it now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from specbuild.builder.synth.noise import Noise

if TYPE_CHECKING:
    from specbuild.builder.synth.spread import TokenSpread

_STRATA = 32
# A token of a smaller probability would not be the draft's first choice in small vocabularies.
_CONFIDENCES = (0.02, 0.99)


@dataclass(frozen=True)
class TokenRules:
    """``before[v]`` is the token that v follows in the target, int64 [V].

    ``cycle`` int64 [S] is the target's order among the tokens that text consists of, all of them
    once: greedy decoding that begins in it never leaves it.
    """

    before: torch.Tensor
    cycle: torch.Tensor

    def after(self) -> torch.Tensor:
        """The target's next token, int64 [V]."""
        following = torch.empty_like(self.before)
        following[self.before] = torch.arange(len(self.before))
        return following


@dataclass(frozen=True)
class DraftRules:
    """The draft's vocabulary, ascending int64 [Vd], and after which of them it says each, [Vd].

    ``cycle`` is the target's order among them. ``spread`` is the distribution of the next token,
    None where one token follows. ``confidence`` float64 [Vd] is the probability that the draft
    gives each token after its predecessor, None for the same one everywhere.
    """

    vocabulary: torch.Tensor
    before: torch.Tensor
    cycle: torch.Tensor
    spread: TokenSpread | None = None
    confidence: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        """EAGLE3's ``d2t``: target id minus draft id, int64 [Vd]."""
        return self.vocabulary - torch.arange(len(self.vocabulary))


def token_rules(
    noise: Noise, *, vocab: int, first_special: int, in_text: int, ends: tuple[int, ...] = ()
) -> TokenRules:
    """``in_text`` tokens below ``first_special`` form one cycle, all others another.

    Those of ``ends``, which end an output, are not in the first.
    """
    drawn = torch.randperm(first_special, generator=noise.generator("text tokens"))
    text = drawn[~torch.isin(drawn, torch.tensor(ends, dtype=torch.int64))][:in_text]
    outside = torch.ones(vocab, dtype=torch.bool)
    outside[text] = False
    others = outside.nonzero().flatten()
    order = torch.randperm(len(others), generator=noise.generator("other tokens"))
    before = torch.empty(vocab, dtype=torch.int64)
    for cycle in (text, others[order]):
        before[cycle] = cycle.roll(1)
    return TokenRules(before, text)


def draft_rules(noise: Noise, rules: TokenRules, acceptance: float) -> DraftRules:
    """A draft over the tokens of the cycle; after the share ``acceptance`` of them it is right."""
    return _draft_rules(noise, rules, _right(noise, len(rules.cycle), acceptance))


def draft_rules_by_prompt(
    noise: Noise, rules: TokenRules, places: torch.Tensor, acceptances: Sequence[float]
) -> DraftRules:
    """The same, right after another share of the tokens from each of ``places`` on.

    ``places`` int64 [count] are ascending along the cycle, but for where it begins anew.
    """
    size = len(rules.cycle)
    right = torch.empty(size, dtype=torch.bool)
    lengths = (places.roll(-1) - places) % size
    if len(places) == 1:
        lengths[:] = size
    for i, (place, length) in enumerate(zip(places.tolist(), lengths.tolist(), strict=True)):
        segment = (place + torch.arange(length)) % size
        right[segment] = _right(noise, length, acceptances[i], f"agreement {i}")
    return _draft_rules(noise, rules, right)


def _draft_rules(noise: Noise, rules: TokenRules, right: torch.Tensor) -> DraftRules:
    """A draft that is ``right``, bool [S], after some tokens of the cycle.

    After every other one it says what follows another of these, so each token still follows one.
    """
    cycle = rules.cycle
    wrong = (~right).nonzero().flatten()
    if len(wrong) == 1:
        # A lone one would be sent to itself.
        wrong = torch.cat([wrong, (wrong + 1) % len(cycle)])
    wrong = wrong[torch.randperm(len(wrong), generator=noise.generator("wrong drafts"))]
    before = rules.before.clone()
    before[cycle.roll(-1)[wrong]] = cycle[wrong.roll(1)]
    vocabulary = cycle.sort().values
    return DraftRules(vocabulary, before[vocabulary], cycle)


def draft_confidence(
    noise: Noise, rules: TokenRules, draft: DraftRules, *, acceptance: float, auc: float
) -> torch.Tensor:
    """The probability that a draft gives each token, float64 [Vd], higher where it is right.

    Scores of right and of wrong drafts are normal with a distance of d deviations, so a right one
    has the higher score with the probability auc = Φ(d / √2). The probability is that of a right
    draft given its score (Bayes): calibrated for drafts that are right with ``acceptance``.
    """
    distance = math.sqrt(2) * NormalDist().inv_cdf(auc)
    right = draft.before == rules.before[draft.vocabulary]
    generator = noise.generator("confidence")
    score = torch.randn(len(right), generator=generator, dtype=torch.float64)
    score += distance * (right.double() - 0.5)
    sure = torch.sigmoid(distance * score + math.log(acceptance / (1 - acceptance)))
    return sure.clamp(*_CONFIDENCES)


def prompts(noise: Noise, rules: TokenRules, *, count: int, length: int) -> list[list[int]]:
    """Prompts of random tokens of the cycle whose last ones stand evenly along it."""
    drawn, places = prompt_places(noise, rules, count=count, length=length)
    drawn[:, -1] = places
    return rules.cycle[drawn].tolist()


def prompt_places(
    noise: Noise, rules: TokenRules, *, count: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random places in the cycle [count, length], and those of the prompts' ends [count]."""
    size = len(rules.cycle)
    generator = noise.generator("prompts")
    drawn = torch.randint(size, (count, length), generator=generator)
    first = int(torch.randint(size, (1,), generator=generator))
    return drawn, (first + torch.arange(count) * size // count) % size


def _right(noise: Noise, size: int, acceptance: float, name: str = "agreement") -> torch.Tensor:
    """bool [size]: where along the cycle the draft agrees.

    k or more agreements stand between two disagreements with the probability acceptance^k. Of
    every _STRATA such runs one falls into each quantile, so that short outputs show it too.
    """
    if acceptance in (0, 1):
        return torch.full((size,), bool(acceptance))
    generator = noise.generator(name)
    right = torch.ones(size, dtype=torch.bool)
    place = 0
    while place < size:
        quantile = torch.randperm(_STRATA, generator=generator)
        quantile = quantile + torch.rand(_STRATA, generator=generator, dtype=torch.float64)
        runs = ((quantile / _STRATA).log() / math.log(acceptance)).floor().clamp(max=size)
        wrong = place + (runs.long() + 1).cumsum(0) - 1
        right[wrong[wrong < size]] = False
        place = int(wrong[-1]) + 1
    return right
