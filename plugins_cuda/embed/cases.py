"""Named cases of Embed."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_codes
from specbuild.plugins_cuda.linear.group_codes import GROUP_STORAGES
from specbuild.plugins_cuda.linear.packing import pack_rows
from specbuild.plugins_cuda.linear.storage import INT4, Q4_K, Q6_K, Q8, Storage


def chosen_table(
    rng: np.random.Generator, tokens: int, vocab: int, width: int, *, packed: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``token_ids`` [tokens], and a table that is NaN in the rows of other tokens.

    A ``packed`` table has the form of weights; ``vocab`` is then a multiple of 16.
    """
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    table = draw(rng, vocab, width)
    table[np.setdiff1d(np.arange(vocab), ids)] = np.nan
    if packed:
        import torch

        table = pack_rows(torch.from_numpy(table)).contiguous().numpy()
    return ids, table


def embed(
    tokens: int,
    width: int,
    *,
    vocab: int = 60,
    packed: bool = False,
    scale: float = 1.0,
    prefix: str = "",
) -> Case:
    """``tokens`` rows of a table of width ``width``."""

    def make(rng: np.random.Generator) -> Arrays:
        return chosen_table(rng, tokens, vocab, width, packed=packed)

    name = f"{prefix}{tokens} rows of {width}" + ", packed" * packed
    name += f", times {scale:g}" * (scale != 1)
    return Case(name, make, {"scale": scale}, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


def embed_codes(
    tokens: int, width: int, storage: Storage, *, scale: float = 1.0, prefix: str = ""
) -> Case:
    """``tokens`` rows of a quantized table of 64 rows."""

    def make(rng: np.random.Generator) -> Arrays:
        return rng.integers(0, 64, tokens).astype(np.int32), draw_codes(rng, 64, width, storage)

    name = f"{prefix}{tokens} rows of {width}, {storage.name}" + f", times {scale:g}" * (scale != 1)
    return Case(name, make, {"scale": scale}, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    embed(1, 32),
    embed(7, 192),
    embed(33, 96),
    embed(9, 160, vocab=64, packed=True),
    embed(5, 96, scale=73.5),
    embed(9, 160, vocab=64, packed=True, scale=0.3),
)

KERNEL_CASES: tuple[Case, ...] = (
    embed(3, 2880),
    embed(40, 96, vocab=48, packed=True),
    *(embed_codes(11, 320, storage) for storage in GROUP_STORAGES),
    embed_codes(5, 128, INT4, scale=73.5),
    *(embed_codes(300, 2048, storage, prefix="gpu: ") for storage in (INT4, Q8, Q4_K, Q6_K)),
    embed(64, 2880, vocab=2000, prefix="gpu: "),
    embed(2048, 2880, vocab=2000, prefix="gpu: "),
    embed(2048, 2048, vocab=2000, packed=True, prefix="gpu: "),
)
