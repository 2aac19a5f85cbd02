"""The place of a token along a cycle, in a form that a draft can read and advance.

φ(c) is cos and sin of c·f, for half a head's width of frequencies f. Rotating each pair by d·f
changes φ(c) to φ(c + d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.tokens import DraftRules

# The share of each place in the squares of directions of tokens.
READ_SHARE, SAID_SHARE = 0.15, 0.25


def angles_of(noise: Noise, size: int, half: int) -> torch.Tensor:
    """Return f, fp64 [half]: the rotation per place; a cycle of ``size`` is a full rotation."""
    drawn = torch.randperm((size - 1) // 2, generator=noise.generator("turns"))[:half] + 1
    return 2 * math.pi * drawn.double() / size


def places_along(cycle: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the place of each token along the cycle, −1 outside, int64 [V]."""
    places = torch.full((vocab,), -1)
    places[cycle] = torch.arange(len(cycle))
    return places


def phi(angles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return φ of places int64 [n], fp32 [n, D]."""
    angle = torch.outer(places.double(), angles)
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def rotation(angles: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the matrix that maps φ(c) to φ(c + distance): fp32 [D, D]."""
    rotated = distance * angles
    cos, sin = torch.diag(rotated.cos()), torch.diag(rotated.sin())
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1))).float()


@dataclass(frozen=True)
class Places:
    """The directions of tokens for a draft without its own embedding and head.

    Coordinates 1 … D have φ of ``read``, the next D have φ of ``said``, both int64 [V] and −1 for
    none. A draft reads the former, and outputs the token after this one by the latter. The next D
    are free for the draft. ``silent`` is a token without a successor, if there is one.
    """

    angles: torch.Tensor
    read: torch.Tensor
    said: torch.Tensor
    silent: int | None = None

    @property
    def width(self) -> int:
        """D."""
        return 2 * len(self.angles)

    def write(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the places to directions [n, H] of ``tokens`` [n]; squares keep their sum."""
        width, squares = self.width, rows.shape[1] - 1
        rows[:, 1 : 1 + 3 * width] = 0
        shares = torch.zeros(len(tokens))
        held = (self.read, READ_SHARE), (self.said, SAID_SHARE)
        for i, (places, share) in enumerate(held):
            of = places[tokens]
            told = (of >= 0).float()
            part = F.normalize(phi(self.angles, of), dim=1) * told[:, None]
            rows[:, 1 + i * width : 1 + (i + 1) * width] = part * math.sqrt(share * squares)
            shares += share * told
        rest = rows[:, 1 + 3 * width :]
        length = torch.linalg.vector_norm(rest, dim=1)
        rest *= (((1 - shares) * squares).sqrt() / length)[:, None]


def told_places(
    noise: Noise, rules: DraftRules, vocab: int, width: int, silent: int | None = None
) -> Places:
    """Return places for which the draft reads each token at its own, and outputs its successor.

    φ has ``width`` values.
    """
    read = places_along(rules.cycle, vocab)
    says_after = torch.zeros(vocab, dtype=torch.int64)
    says_after[rules.vocabulary] = rules.before
    said = torch.full_like(read, -1)
    said[rules.cycle] = read[says_after[rules.cycle.roll(-1)]]
    return Places(angles_of(noise, len(rules.cycle), width // 2), read, said, silent)
