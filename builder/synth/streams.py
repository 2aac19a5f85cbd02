"""The residual stream of a synthetic target: a constant in coordinate 0, the token in the rest.

Every embedding has the same length, so that norming multiplies all by the same factor: a draft can
rely on it.
"""

from __future__ import annotations

import math

import torch

from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.places import Places
from specbuild.builder.synth.spread import TokenSpread

CONSTANT = 8.0  # of every embedding's coordinate 0; the others have an rms of 1


def token_directions(
    noise: Noise, tokens: torch.Tensor, hidden: int, places: Places | TokenSpread | None = None
) -> torch.Tensor:
    """Return the directions of ``tokens`` int64 [n]: fp32 [n, H], first 0, squares sum to H − 1.

    ``places`` define a part of it if a draft needs them; a ``TokenSpread`` defines all of it.
    """
    if isinstance(places, TokenSpread):
        return places.directions(noise, tokens, hidden)
    rows = noise.normal("model.embed_tokens.weight", tokens, hidden)
    rows[:, 0] = 0
    rows.mul_(math.sqrt(hidden - 1) / torch.linalg.vector_norm(rows, dim=1, keepdim=True))
    if places is not None:
        places.write(rows, tokens)
    return rows


def embeddings(
    noise: Noise, tokens: torch.Tensor, hidden: int, places: Places | TokenSpread | None = None
) -> torch.Tensor:
    """Return rows of the embedding, bf16 [n, H]."""
    rows = token_directions(noise, tokens, hidden, places)
    rows[:, 0] = CONSTANT
    return rows.bfloat16()


def embedding_rms(hidden: int) -> float:
    """Return the divisor of every embedding in a norm."""
    return math.sqrt((CONSTANT**2 + hidden - 1) / hidden)
