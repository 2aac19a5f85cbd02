"""Named cases of MlaAttention: the launches of PagedTreeAttention over a latent pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.plugins_cuda.paged_tree_attention.described import BUSHY, Branch, Launch, chain_of


@dataclass(frozen=True)
class LatentLaunch:
    """A launch, and the geometry of a layer with a latent cache.

    With ``rope`` None, keys are rebuilt (MLA-lite). A number means absorbed queries (MLA): each
    slot holds ``latent`` values, of which the last ``rope`` are not part of the value, and every
    query head has a separate value head. ``pages_skipped`` shifts the view of sequence b by so many
    pages, and by one more for each of its pages: the pages of a partial view are not adjacent.
    """

    launch: Launch
    kv_heads: int = 2
    group: int = 2
    width: int = 16
    v_width: int = 16
    latent: int = 24
    rope: int | None = None
    biases: bool = True
    pages_skipped: int | None = None

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def _weight_scale(self) -> float:
        """The scale that keeps keys of a wide latent as large as those of a narrow one."""
        return min(0.3, 1.5 * self.latent**-0.5)

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's attributes."""
        return {"scale": self.width**-0.5, "window": self.launch.window}

    def arrays(self, rng: np.random.Generator) -> Arrays:
        """Return the op's inputs; slots that no sequence uses are NaN."""
        drawn = self.launch.arrays(rng)
        shape, pool = drawn[0], drawn[1]
        assert shape is not None and pool is not None
        used = len(self.launch.rows())

        def normal(*sizes: int, scale: float = 1.0) -> np.ndarray:
            return (scale * rng.standard_normal(sizes)).astype(np.float32)

        rebuilt = self.rope is None
        width = self.width if rebuilt else self.latent
        q = normal(len(shape), self.q_heads, width)
        q[used:] = np.nan
        v_latent, v_heads = self.latent - (self.rope or 0), self.kv_heads
        w_v = normal(
            v_latent, v_heads if rebuilt else self.q_heads, self.v_width, scale=self._weight_scale
        )
        b_v = normal(*w_v.shape[1:]) if self.biases else None
        keys: Arrays = (None, None)
        tables: Arrays = (None, None)
        if rebuilt:
            w_k = normal(self.latent, self.kv_heads, self.width, scale=self._weight_scale)
            keys = (w_k, normal(*w_k.shape[1:]) if self.biases else None)
            tables = rope_tables(self.width, self._last_position(drawn[3]) + 1)
        sinks = normal(self.q_heads) if self.launch.sinks else None
        views, selected = drawn[3:8], drawn[9]
        begins = self._page_positions(drawn[3]) if rebuilt else None
        return q, pool, *keys, w_v, b_v, *tables, *views, sinks, selected, begins

    def _page_positions(self, table: np.ndarray | None) -> np.ndarray | None:
        """Return int32 [B, P], or None if view slots equal positions."""
        if self.pages_skipped is None:
            return None
        assert table is not None
        batch, _, pages = table.shape
        page = np.arange(pages) * 2 + self.pages_skipped * np.arange(1, batch + 1)[:, None]
        return (page * self.launch.page_size).astype(np.int32)

    def _last_position(self, table: np.ndarray | None) -> int:
        begins = self._page_positions(table)
        if begins is None:
            return max(branch.slots for branch in self.launch.branches)
        return int(begins.max()) + self.launch.page_size

    def case(self, name: str) -> Case:
        """Return this launch as a case; padding rows are unspecified."""
        compare = {"attended": np.s_[: len(self.launch.rows())]}
        # Keys, weights and sums of latents are rounded to bf16.
        return Case(name, self.arrays, self.attributes, compare=compare, kernel_atol=3e-2)


def rope_tables(width: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines, fp32 [positions, width / 2], of a fast rotation."""
    angle = np.outer(np.arange(positions), 50.0 ** (-2 * np.arange(width // 2) / width))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def latent_launch(
    branches: Sequence[Branch],
    *,
    latent: int = 24,
    rope: int | None = None,
    biases: bool = True,
    pages_skipped: int | None = None,
    heads: tuple[int, int] = (2, 2),
    widths: tuple[int, int] = (16, 16),
    **changes: Any,
) -> LatentLaunch:
    """Create a launch. ``heads``: KV heads, query heads per KV head. ``widths``: query, value."""
    launch = Launch(branches, kv_heads=1, group=1, width=latent, v_width=1, **changes)
    return LatentLaunch(launch, *heads, *widths, latent, rope, biases, pages_skipped)


_LAUNCHES = {
    "one token, nothing before it": latent_launch(
        [Branch(0, 1)], padding_rows=0, padding_pages=0
    ),
    "decode": latent_launch([Branch(13, 1)], padding_rows=0),
    "decode, ragged batch": latent_launch([Branch(13, 1), Branch(0, 1), Branch(31, 1)]),
    "prefill from nothing": latent_launch([Branch(0, 19)]),
    "prefill chunk after context": latent_launch([Branch(6, 9), Branch(0, 3)]),
    "prefill without sinks and biases": latent_launch([Branch(3, 9)], sinks=False, biases=False),
    "prefill, window shorter than the context": latent_launch([Branch(11, 9)], window=5),
    "decode, window of one": latent_launch([Branch(9, 1), Branch(2, 1)], window=1),
    "verify tree": latent_launch([Branch(10, 0, BUSHY)]),
    "verify tree at the very start": latent_launch([Branch(0, 0, BUSHY)]),
    "verify trees, ragged": latent_launch(
        [Branch(10, 0, BUSHY), Branch(3, 0, (-1,)), Branch(25, 0, chain_of(5))]
    ),
    "window of two inside the tree": latent_launch([Branch(5, 0, BUSHY), Branch(1, 2)], window=2),
    "sequences without rows": latent_launch([Branch(4, 0), Branch(6, 2, BUSHY), Branch(0, 0)]),
    "chain, then tree": latent_launch([Branch(5, 4, BUSHY), Branch(0, 7, chain_of(3))], window=6),
    "bits 31 and 32": latent_launch([Branch(6, 0, chain_of(35)), Branch(2, 0, BUSHY)]),
    "grouped query 8 of width 64": latent_launch(
        [Branch(40, 0, BUSHY), Branch(70, 1)],
        heads=(2, 8), widths=(64, 64), latent=96, page_size=16,
    ),
    "latent narrower than a head, values narrower than keys": latent_launch(
        [Branch(7, 2, BUSHY)], heads=(1, 4), widths=(24, 8), latent=10
    ),
    "selected slots": latent_launch([Branch(20, 3, BUSHY), Branch(4, 2)], selected=6),
    "view that begins late": latent_launch([Branch(13, 1), Branch(6, 2, BUSHY)], pages_skipped=3),
    "one view with gaps": latent_launch([Branch(9, 2, BUSHY)], pages_skipped=0, window=6),
    "absorbed: decode": latent_launch(
        [Branch(13, 1)], rope=8, heads=(1, 4), biases=False, sinks=False
    ),
    "absorbed: trees, ragged": latent_launch(
        [Branch(10, 0, BUSHY), Branch(3, 2), Branch(25, 0, chain_of(5))],
        rope=8, heads=(1, 4), biases=False, sinks=False,
    ),
    "absorbed: window, sinks, biases": latent_launch(
        [Branch(9, 3, BUSHY)], rope=4, heads=(1, 6), widths=(16, 5), window=4
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = tuple(launch.case(name) for name, launch in _LAUNCHES.items())

_KERNEL_LAUNCHES = {
    "example geometry, 6 on 2 heads of 32": latent_launch(
        [Branch(37, 0, BUSHY), Branch(64, 1), Branch(0, 3)],
        heads=(2, 3), widths=(32, 32), latent=48, page_size=16,
    ),
    "selected slots, some rows whole": latent_launch(
        [Branch(150, 3, BUSHY), Branch(64, 2), Branch(3, 1)],
        heads=(2, 3), widths=(32, 32), latent=48, page_size=16, selected=90, whole_rows=1,
    ),
    "selected slots, two words": latent_launch(
        [Branch(20, 0, chain_of(35))], heads=(2, 3), widths=(32, 32), latent=48, page_size=16,
        selected=50,
    ),
    "selected slots of a view, some rows whole": latent_launch(
        [Branch(70, 3, BUSHY), Branch(64, 2)], heads=(2, 3), widths=(32, 32), latent=48,
        page_size=16, selected=60, whole_rows=1, pages_skipped=1,
    ),
    "absorbed: 6 heads, a tree": latent_launch(
        [Branch(100, 0, BUSHY), Branch(66, 1)], rope=16, heads=(1, 6), widths=(16, 32),
        latent=80, biases=False, page_size=16,
    ),
    "absorbed: a branch over the end of a page": latent_launch(
        [Branch(100, 0, (-1, -1, 0, *range(2, 40))), Branch(150, 0, BUSHY)], rope=16, heads=(1, 3),
        widths=(16, 16), latent=80, biases=False, page_size=64,
    ),
    "absorbed: values of 256, 5 heads": latent_launch(
        [Branch(40, 0, BUSHY), Branch(20, 2)], rope=16, heads=(1, 5), widths=(16, 256),
        latent=80, page_size=16,
    ),
    "absorbed: a chunk of more rows than a CTA projects": latent_launch(
        [Branch(90, 41), Branch(0, 30)], rope=16, heads=(1, 2), widths=(16, 16),
        latent=48, page_size=16,
    ),
}  # fmt: skip

# Sizes that are slow in the emulator.
_SLOW_LAUNCHES = {
    "heads of 64, a latent of 80": latent_launch(
        [Branch(130, 0, BUSHY), Branch(70, 2)],
        heads=(3, 8), widths=(64, 64), latent=80, page_size=32,
    ),
    "without sinks and biases": latent_launch(
        [Branch(75, 2), Branch(190, 0, chain_of(3))],
        heads=(2, 4), widths=(64, 64), latent=32, page_size=64, sinks=False, biases=False,
    ),
    "window of 40, trees": latent_launch(
        [Branch(120, 0, BUSHY), Branch(3, 1), Branch(62, 3)],
        heads=(4, 2), widths=(16, 16), latent=64, page_size=16, window=40,
    ),
    "window of two inside the tree, two words": latent_launch(
        [Branch(61, 0, (*BUSHY, *range(9, 40))), Branch(1, 2)],
        heads=(2, 3), widths=(32, 32), latent=32, page_size=16, window=2,
    ),
    "weights beyond the registers": latent_launch(
        [Branch(60, 1), Branch(29, 0, BUSHY)],
        heads=(2, 2), widths=(64, 64), latent=560, page_size=16,
    ),
    "longer than the context's splits": latent_launch(
        [Branch(2300, 1)], heads=(1, 4), widths=(16, 16), latent=16, page_size=64,
        padding_rows=0,
    ),
    "absorbed: 72 heads, window": latent_launch(
        [Branch(300, 1)], rope=32, heads=(1, 72), widths=(16, 16), latent=96, biases=False,
        sinks=False, page_size=64, window=200, padding_rows=0,
    ),
    "absorbed: contexts of one split and of several": latent_launch(
        [Branch(330, 0, chain_of(2)), Branch(17, 1), Branch(600, 0, (-1, 0, 0, 2))],
        rope=16, heads=(1, 3), widths=(16, 16), latent=208, biases=False, page_size=16,
    ),
    "absorbed: sequences of one row": latent_launch(
        [Branch(590, 1), Branch(17, 1), Branch(330, 1)], rope=16, heads=(1, 3), widths=(16, 16),
        latent=80, biases=False, page_size=64, padding_rows=0,
    ),
}  # fmt: skip


def _real(branches: Sequence[Branch], latent: int = 512, **changes: Any) -> LatentLaunch:
    """Create a launch with GPT-OSS's heads and pages."""
    sizes = {"page_size": 64, **changes}
    return latent_launch(branches, heads=(8, 8), widths=(64, 64), latent=latent, **sizes)


def _deepseek(
    branches: Sequence[Branch], heads: int = 64, value: int = 64, **changes: Any
) -> LatentLaunch:
    """Create a launch with a latent of 512, a rotated key of 64, and values of width ``value``."""
    return latent_launch(
        branches, heads=(1, heads), widths=(64, value), latent=576, rope=64, biases=False,
        sinks=False, page_size=64, **changes,
    )  # fmt: skip


_GPU_LAUNCHES = {
    "decode at 1k": _real([Branch(1023, 1)], padding_rows=0),
    "decode at 32k": _real([Branch(32767, 1)], padding_rows=0),
    "decode at 32k, latent of 256": _real([Branch(32767, 1)], 256, padding_rows=0),
    "decode at 8k, latent of 768": _real([Branch(8191, 1)], 768, padding_rows=0),
    "decode at 4k, window": _real([Branch(4090, 1)], window=128, padding_rows=0),
    "verify a chain of 4 at 1k": _real([Branch(1000, 0, chain_of(4))], padding_rows=0),
    "verify a tree of 10 at 8k": _real([Branch(8100, 0, BUSHY)], padding_rows=0),
    "verify a tree of 10, window": _real([Branch(1000, 0, BUSHY)], window=128, padding_rows=0),
    "16 sequences at 1k": _real([Branch(960 + 8 * b, 1) for b in range(16)], padding_rows=0),
    "verify 16 sequences, ragged": _real(
        [Branch(100 + 211 * b, 0, chain_of(1 + b % 4)) for b in range(16)]
    ),
    "a view of 4.4k, chains of 4": _real(
        [Branch(4400 - 37 * b, 0, chain_of(4)) for b in range(2)], page_size=16, pages_skipped=900
    ),
    "a view of 4.4k beside 48 re-verified rows": _real(
        [Branch(4400, 0, chain_of(4)), Branch(9000, 48, chain_of(4))], pages_skipped=3
    ),
    "selected: 2116 of 131k": _real([Branch(131071, 1)], selected=2148, padding_rows=0),
    "selected: a chain of 4 at 131k": _real(
        [Branch(131000, 0, chain_of(4))], selected=2148, padding_rows=0
    ),
    "selected: 8 chains of 4 at 8k, latents of 256, some whole": _real(
        [Branch(8000 + 31 * b, 0, chain_of(4)) for b in range(8)], 256, selected=2148, whole_rows=1
    ),
    "prompt chunk of 500 at 1k": _real([Branch(1000, 500)]),
    "prompt chunks, ragged, window": _real([Branch(0, 300), Branch(777, 130)], window=128),
    "absorbed: decode at 1k": _deepseek([Branch(1023, 1)], padding_rows=0),
    "absorbed: decode at 131k": _deepseek([Branch(131071, 1)], padding_rows=0),
    "absorbed: decode 3 sequences, up to 131k": _deepseek(
        [Branch(131071, 1), Branch(900, 1), Branch(40000, 1)], padding_rows=0
    ),
    "absorbed: a tree of 10 at 8k": _deepseek([Branch(8100, 0, BUSHY)], padding_rows=0),
    "absorbed: chains of 4, ragged": _deepseek(
        [Branch(700 + 2900 * b, 0, chain_of(4)) for b in range(5)], padding_rows=3
    ),
    "absorbed: 128 heads, 4 sequences": _deepseek(
        [Branch(900 + 60 * b, 1) for b in range(4)], 128, padding_rows=0
    ),
    "absorbed: DeepSeek-V3, a chain of 4 at 4k": _deepseek(
        [Branch(4090, 0, chain_of(4))], 128, 128, padding_rows=0
    ),
    "absorbed: Youtu, a tree of 10 at 2k": _deepseek([Branch(2000, 0, BUSHY)], 16, 128),
    "absorbed: GLM-4.7-Flash, 8 chains of 4": _deepseek(
        [Branch(100 + 411 * b, 0, chain_of(4)) for b in range(8)], 20, 256
    ),
    "absorbed: GLM-4.7-Flash, a chunk of 500 at 1k": _deepseek([Branch(1000, 500)], 20, 256),
    "absorbed: Youtu, chunks, ragged": _deepseek([Branch(0, 300), Branch(777, 130)], 16, 128),
}

KERNEL_CASES: tuple[Case, ...] = (
    *(launch.case(name) for name, launch in _KERNEL_LAUNCHES.items()),
    *(launch.case(f"gpu: small: {name}") for name, launch in _SLOW_LAUNCHES.items()),
    *(launch.case(f"gpu: {name}") for name, launch in _GPU_LAUNCHES.items()),
)
