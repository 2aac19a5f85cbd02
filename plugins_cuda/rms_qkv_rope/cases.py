"""Named cases of RmsQkvRope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.linear.cases import draw, draw_packed
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage

_POSITIONS = 50


@dataclass(frozen=True)
class Heads:
    q: int = 4
    kv: int = 2
    width: int = 32


_TINY = Heads(q=6, kv=2, width=32)
GPT_OSS = Heads(q=64, kv=8, width=64)
LLAMA_8B = Heads(q=32, kv=8, width=128)


def _cosines(angles: np.ndarray, *, growth: bool) -> np.ndarray:
    """Return scaled cosines of ``angles`` [positions, D/2]; with ``growth``, then the factors of
    queries.
    """
    cosines = np.cos(angles) * np.float32(1.34)
    if not growth:
        return cosines
    count, half = angles.shape
    factors = np.zeros((-(-count // half), half), np.float32)
    factors.flat[:count] = 1 + np.arange(count) // 8 / 16
    return np.concatenate([cosines, factors])


def project(
    tokens: int,
    columns: int,
    heads: Heads = _TINY,
    *,
    norm: bool = True,
    bias: bool = True,
    page_size: int = 16,
    padding: int = 0,
    rounding: str = "gpt_oss",
    head_norms: bool = False,
    whole: bool = False,
    values: bool = False,
    growth: bool = False,
    storage: Storage = BF16,
    prefix: str = "",
) -> Case:
    """Return a case of ``tokens`` rows; the last ``padding`` of them write to page 0.

    ``whole``: one norm covers all queries, and one all keys. ``values``: values are normed too.
    ``growth``: queries are multiplied by a factor per position.
    """
    live = tokens - padding
    pages = 2 + -(-live // page_size)

    def make(rng: np.random.Generator) -> Arrays:
        rows = (heads.q + 2 * heads.kv) * heads.width
        slots = page_size + rng.permutation((pages - 1) * page_size)[:live]
        slots = np.concatenate([slots, rng.integers(0, page_size, padding)])
        angles = rng.uniform(0, 6.3, (_POSITIONS, heads.width // 2)).astype(np.float32)
        positions = rng.integers(0, _POSITIONS, tokens)
        positions[live:] = 0
        # The pools of another layer, where nothing is written.
        pool = (pages, heads.kv or 2, page_size, heads.width)
        normed = [heads.width * (count if whole else 1) for count in (heads.q, heads.kv)]
        return (
            draw(rng, tokens, columns, scale=3.0 if norm else 1.0),
            draw(rng, columns) if norm else None,
            draw_packed(rng, rows, columns, storage),
            draw(rng, rows) if bias else None,
            1 + draw(rng, normed[0], scale=0.2) if head_norms and heads.q else None,
            1 + draw(rng, normed[1], scale=0.2) if head_norms and heads.kv else None,
            _cosines(angles, growth=growth),
            np.sin(angles) * np.float32(1.34),
            positions.astype(np.int32),
            slots.astype(np.int32),
            draw(rng, *pool),
            draw(rng, *pool),
        )

    extras = (
        (", norm" if rounding == "gpt_oss" else f", {rounding} norm") * norm
        + ", bias" * bias
        + f", {padding} padding" * (padding > 0)
        + ", normed heads" * head_norms
        + " together" * whole
        + " and values" * values
        + ", growing queries" * growth
        + f", {storage.name}" * storage.scaled
    )
    name = (
        f"{prefix}{tokens} rows of {columns}, {heads.q}/{heads.kv} heads of {heads.width}, "
        f"pages of {page_size}{extras}"
    )
    return Case(
        name,
        make,
        {
            "q_heads": heads.q,
            "kv_heads": heads.kv,
            "eps": 1e-5,
            "rounding": rounding,
            "head_rounding": "offset" if rounding == "offset" else "llama",
            "value_norm": int(values),
            "growth": _POSITIONS if growth else 0,
        },
        atol=1e-4,
        compare={"k_pool_out": np.s_[1:], "v_pool_out": np.s_[1:]},
        # A product that rounds the other way counts twice after the rotation's subtraction, and
        # twice as much with norm weights of that size.
        kernel_atol=8e-2 if head_norms else 3e-2,
    )


CASES: tuple[Case, ...] = (
    project(1, 192),
    project(5, 96, padding=2),
    project(8, 160, Heads(q=2, kv=1, width=16), norm=False, bias=False),
    project(3, 32, bias=False, page_size=32),
    project(4, 96, bias=False, padding=1, rounding="llama"),
    project(6, 64, Heads(q=3, kv=1, width=48), padding=2, rounding="llama", head_norms=True),
    project(4, 64, Heads(q=3, kv=1, width=32), padding=1, rounding="offset", head_norms=True),
    project(5, 64, norm=False, bias=False, padding=1, head_norms=True, whole=True),
    project(5, 64, bias=False, padding=1, head_norms=True, values=True),
    project(5, 64, Heads(q=4, kv=2, width=16), bias=False, padding=1, growth=True),
    project(5, 64, bias=False, rounding="llama", head_norms=True, growth=True),
    project(5, 64, Heads(q=3, kv=0, width=32), bias=False, padding=1, head_norms=True),
    project(4, 96, Heads(q=2, kv=0, width=48), growth=True),
)

KERNEL_CASES: tuple[Case, ...] = (
    project(3, 160, padding=1, storage=MXFP4),
    project(11, 544, padding=3),
    project(20, 224, Heads(q=3, kv=1, width=48), page_size=64),
    project(37, 96, norm=False, bias=False, padding=4),
    project(40, 1888, padding=5),
    project(70, 1280, norm=False),
    project(2, 1056, Heads(q=8, kv=1, width=64), page_size=64),
    # LLaMA's norm and head norms in every form: one row, many tokens, panels, without a norm.
    project(1, 1056, Heads(q=2, kv=2, width=128), bias=False, rounding="llama", head_norms=True),
    project(20, 1056, Heads(q=5, kv=1, width=80), padding=3, rounding="llama", head_norms=True),
    project(45, 1280, Heads(q=3, kv=1, width=16), rounding="llama", head_norms=True),
    project(5, 96, Heads(q=1, kv=1, width=96), norm=False, bias=False, head_norms=True),
    # One norm of all heads: wider than a warp, of many tokens, and of keys only.
    project(3, 96, Heads(q=12, kv=3, width=80), norm=False, head_norms=True, whole=True),
    project(20, 1056, Heads(q=5, kv=2, width=128), bias=False, head_norms=True, whole=True),
    project(4, 96, Heads(q=0, kv=2, width=32), bias=False, head_norms=True, whole=True),
    project(3, 96, Heads(q=8, kv=4, width=512), bias=False, head_norms=True, values=True),
    project(21, 1056, bias=False, rounding="llama", growth=True),
    # Queries of layers that read the cache of another layer.
    project(20, 1056, Heads(q=3, kv=0, width=64), bias=False, head_norms=True),
    # Keys and values of rows without queries.
    project(4, 96, Heads(q=0), padding=1, rounding="llama", head_norms=True),
    project(3, 160, Heads(q=0), norm=False),
    project(20, 1056, Heads(q=0, kv=3, width=64), bias=False, rounding="llama", head_norms=True),
    project(
        5,
        2880,
        Heads(q=0, kv=8, width=64),
        bias=False,
        page_size=64,
        rounding="llama",
        head_norms=True,
        prefix="gpu: ",
    ),
    project(18, 1056, rounding="llama"),
    *(project(t, 2880, GPT_OSS, page_size=64, prefix="gpu: ") for t in (1, 4, 8, 64, 256)),
    *(
        project(t, 5760, GPT_OSS, norm=False, bias=False, page_size=64, prefix="gpu: ")
        for t in (1, 4, 8)
    ),
    project(200, 2880, GPT_OSS, page_size=64, padding=8, prefix="gpu: "),
    *(
        project(
            t,
            4096,
            LLAMA_8B,
            bias=False,
            page_size=64,
            rounding="llama",
            head_norms=normed,
            prefix="gpu: ",
        )
        for t in (1, 8, 24, 64, 200)
        for normed in (False, True)
    ),
    *(
        project(
            t, 5760, GPT_OSS, norm=False, bias=False, page_size=64, storage=form, prefix="gpu: "
        )
        for form in (MXFP4, FP8)
        for t in (5, 64)
    ),
)
