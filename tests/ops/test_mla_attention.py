"""MlaAttention against path replay: each row expands the latents of its literal token path.

The replay materializes every key and value, and rotates keys as complex numbers by their index in
the path. It computes a dense softmax in float64, without absorption, masks or slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from forms import one_sequence, portable
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import branches

from specbuild.plugins_cuda.cases import Arrays
from specbuild.plugins_cuda.mla_attention.cases import LatentLaunch, latent_launch
from specbuild.plugins_cuda.paged_tree_attention.body import WHOLE
from specbuild.plugins_cuda.paged_tree_attention.cases import BUSHY, Branch, chain_of
from specbuild.plugins_cuda.registry import op_named

OP = op_named("MlaAttention")
Attend = Callable[[LatentLaunch, Arrays], np.ndarray]


def by_reference(launch: LatentLaunch, arrays: Arrays) -> np.ndarray:
    tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
    result: np.ndarray = OP.reference(*tensors, **launch.attributes).numpy()
    return result[: len(launch.launch.rows())]


def by_body(launch: LatentLaunch, arrays: Arrays) -> np.ndarray:
    run = one_sequence if len(launch.launch.branches) == 1 else portable
    finite = [np.nan_to_num(a, nan=1e30) if a is not None else None for a in arrays]
    return run(OP, finite, launch.attributes)[0][: len(launch.launch.rows())]


def by_padded_body(launch: LatentLaunch, arrays: Arrays) -> np.ndarray:
    finite = [np.nan_to_num(a, nan=1e30) if a is not None else None for a in arrays]
    return portable(OP, finite, launch.attributes)[0][: len(launch.launch.rows())]


each_form = pytest.mark.parametrize("attend", [by_reference, by_body, by_padded_body])


def rotated(key: np.ndarray, position: int) -> np.ndarray:
    """Return a head's key after the half-split rotation, as a product of complex numbers."""
    half = len(key) // 2
    angle = position * 50.0 ** (-2 * np.arange(half) / len(key))
    pair = (key[:half] + 1j * key[half:]) * np.exp(1j * angle)
    return np.concatenate([pair.real, pair.imag])


def replayed(latent: LatentLaunch, arrays: Arrays) -> np.ndarray:
    launch = latent.launch
    q, pool, w_k, b_k, w_v, b_v, _, _, table = arrays[:9]
    sinks, selected, begins = arrays[13:]
    assert q is not None and pool is not None and w_v is not None and table is not None
    size, rows = launch.page_size, []
    for row, (sequence, branch, slot, lineage) in enumerate(launch.rows()):
        slots = list(range(min(slot + 1, branch.tree_start)))
        slots += [branch.tree_start + node for node in lineage]
        places = list(range(len(slots)))  # A token's position is its index in the path.
        if begins is not None:
            committed = [begins[sequence, s // size] + s % size for s in range(branch.slots)]
            root = committed[branch.tree_start] if lineage else 0
            places = [committed[s] for s in slots[: len(slots) - len(lineage)]]
            places += [root + depth for depth in range(len(lineage))]
        path = list(zip(places, slots, strict=True))
        path = path[-launch.window :] if launch.window else path
        if selected is not None:
            named = selected[row, 0].tolist()
            path = [e for e in path if e[1] in named or named[0] == WHOLE]
        cached = [pool[table[sequence, 0, s // size], 0, s % size].astype(np.float64)
                  for _, s in path]  # fmt: skip
        rows.append([])
        for head in range(q.shape[1]):
            keys = cached
            if w_k is not None:
                of = head // latent.group
                bias = 0.0 if b_k is None else b_k[of]
                keys = [
                    rotated(c @ w_k[:, of] + bias, place)
                    for c, (place, _) in zip(cached, path, strict=True)
                ]
            of = head // (q.shape[1] // w_v.shape[1])
            values = [c[: len(w_v)] @ w_v[:, of] + (0 if b_v is None else b_v[of]) for c in cached]
            scores = [q[row, head] @ key * latent.width**-0.5 for key in keys]
            sink = [float(sinks[head])] if sinks is not None else []
            most = max(scores + sink)
            total = sum(np.exp(score - most) for score in scores + sink)
            shares = [np.exp(score - most) / total for score in scores]
            rows[-1].append(sum(w * v for w, v in zip(shares, values, strict=True)))
    return np.array(rows)


@st.composite
def launches(draw: st.DrawFn) -> LatentLaunch:
    rope = draw(st.sampled_from([None, None, 3]))
    absorbed = rope is not None
    launch = latent_launch(
        draw(st.lists(branches(), min_size=1, max_size=3)),
        latent=draw(st.sampled_from([5, 12, 20])),
        rope=rope,
        pages_skipped=None if absorbed else draw(st.sampled_from([None, 0, 3])),
        biases=draw(st.booleans()),
        heads=(1 if absorbed else draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))),
        widths=(8, draw(st.sampled_from([8, 5]))),
        page_size=draw(st.sampled_from([1, 4, 16])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 40])),
        sinks=draw(st.booleans()),
        selected=draw(st.sampled_from([0, 0, 5])),
        whole_rows=draw(st.sampled_from([None, 0])),
        padding_rows=draw(st.integers(0, 2)),
        padding_pages=draw(st.integers(0, 1)),
    )
    if launch.launch.rows():
        return launch
    more = [*launch.launch.branches, Branch(3, 1)]
    return replace(launch, launch=replace(launch.launch, branches=more))


@settings(max_examples=25, deadline=None)
@given(launches(), st.integers(0, 2**32 - 1))
def test_reference_equals_path_replay(launch: LatentLaunch, seed: int) -> None:
    arrays = launch.arrays(np.random.default_rng(seed))
    expected = replayed(launch, arrays)
    np.testing.assert_allclose(by_reference(launch, arrays), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(launches(), st.integers(0, 2**32 - 1))
def test_body_equals_path_replay(launch: LatentLaunch, seed: int) -> None:
    arrays = launch.arrays(np.random.default_rng(seed))
    expected = replayed(launch, arrays)
    np.testing.assert_allclose(by_body(launch, arrays), expected, atol=1e-5, rtol=1e-4)


MANY_ROWS = latent_launch([Branch(9, 0, BUSHY), Branch(0, 6), Branch(4, 2, chain_of(3))])


@each_form
def test_the_value_bias_has_the_weight_of_the_visible_keys(attend: Attend) -> None:
    """With equal scores, n visible tokens and a sink s, a bias of 1 gives n / (n + e^s)."""
    arrays = list(MANY_ROWS.arrays(np.random.default_rng(1)))
    used = len(MANY_ROWS.launch.rows())
    arrays[0][:used] = 0
    arrays[4], arrays[5] = np.zeros_like(arrays[4]), np.ones_like(arrays[5])
    sink = np.exp(arrays[13].astype(np.float64))
    rows = MANY_ROWS.launch.rows()
    for totals, (_, branch, slot, lineage) in zip(attend(MANY_ROWS, arrays), rows, strict=True):
        seen = min(slot + 1, branch.tree_start) + len(lineage)
        expected = np.broadcast_to((seen / (seen + sink))[:, None], totals.shape)
        np.testing.assert_allclose(totals, expected, rtol=1e-5)


@each_form
def test_siblings_of_a_tree_have_equal_rotations(attend: Attend) -> None:
    """Two nodes of one depth with equal latents and queries have equal results in any slots."""
    launch = latent_launch([Branch(10, 0, (-1, 0, 0, 0))], page_size=16, padding_rows=0)
    arrays = list(launch.arrays(np.random.default_rng(2)))
    page = int(arrays[8][0, 0, 0])
    arrays[1][page, 0, 12:14] = arrays[1][page, 0, 11]
    arrays[0][2:4] = arrays[0][1]
    result = attend(launch, arrays)
    np.testing.assert_allclose(result[2:4], np.stack([result[1]] * 2), atol=1e-6, rtol=1e-6)


@each_form
def test_a_sequence_does_not_rotate_keys_of_another(attend: Attend) -> None:
    """Put a deep tree next to a wide one: a sequence is padded with rows of the other."""
    alone = latent_launch([Branch(9, 0, (-1, -1, -1))], page_size=16, padding_rows=0)
    arrays = alone.arrays(np.random.default_rng(3))
    other = latent_launch([Branch(4, 0, chain_of(5))], page_size=16, padding_rows=0)
    more = other.arrays(np.random.default_rng(4))
    both = replace(alone, launch=replace(
        alone.launch, branches=[*alone.launch.branches, *other.launch.branches]
    ))  # fmt: skip
    joined = list(arrays)
    first = len(arrays[1])
    moved = np.where(more[8] > 0, more[8] + first, 0)
    width = max(arrays[8].shape[2], moved.shape[2])
    pad = [np.pad(t, ((0, 0), (0, 0), (0, width - t.shape[2]))) for t in (arrays[8], moved)]
    for index in (0, 1, 10, 11, 12):
        joined[index] = np.concatenate([arrays[index], more[index]])
    joined[8] = np.concatenate(pad).astype(np.int32)
    joined[9] = np.array([0, 3, 8], np.int32)
    joined[6], joined[7] = (max(a, b, key=len) for a, b in zip(arrays[6:8], more[6:8], strict=True))
    np.testing.assert_allclose(
        attend(both, joined)[:3], attend(alone, arrays), atol=1e-6, rtol=1e-5
    )
