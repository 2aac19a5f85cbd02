"""GatedDelta against transformers, and its bits: n rows at once equal n launches of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
import torch
from body_session import session_of, value_like
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.plugins_cuda.gated_delta.body import body
from specbuild.plugins_cuda.gated_delta.cases import padded_paths
from specbuild.plugins_cuda.gated_delta.op import OP, reference

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, TAPS = 2, 6, 8, 12, 4
KEYS = KEY_HEADS * KEY_WIDTH
CHANNELS = 2 * KEYS + VALUE_HEADS * VALUE_WIDTH
SLOTS = 8
DISCARDED = SLOTS - 1
DYNAMIC = {"inputs": (0,), "path_rows": (0, 1), "read_slot": (0,), "write_slot": (0,)}

Launch = Callable[..., list[np.ndarray]]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@cache
def weights() -> tuple[np.ndarray, ...]:
    return normal(1, CHANNELS, 1, TAPS), -np.exp(normal(2, VALUE_HEADS)), normal(3, VALUE_HEADS)


def empty_pools() -> tuple[np.ndarray, np.ndarray]:
    tails = np.zeros((SLOTS, TAPS - 1, CHANNELS), np.float32)
    return tails, np.zeros((SLOTS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH), np.float32)


@cache
def session() -> ort.InferenceSession:
    rows, slots = np.zeros((2, CHANNELS + 2 * VALUE_HEADS), np.float32), np.zeros(2, np.int32)
    arrays = [rows, *weights(), np.zeros((2, 2), np.int32), slots, slots, *empty_pools()]
    values = [
        value_like(spec.name, array, dynamic=DYNAMIC.get(spec.name, ()))
        for spec, array in zip(OP.inputs, arrays, strict=True)
    ]
    return session_of(values, lambda b: body(b, values, {"key_heads": KEY_HEADS}))


def launched(
    rows: np.ndarray,
    paths: Sequence[Sequence[int]],
    read: Sequence[int],
    write: Sequence[int],
    pools: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the outputs of the rows, and both pools, by ONNX Runtime."""
    slots = np.array(read, np.int32), np.array(write, np.int32)
    arrays = [rows, *weights(), padded_paths(paths), *slots, *pools]
    feeds = {spec.name: array for spec, array in zip(OP.inputs, arrays, strict=True)}
    outputs: list[np.ndarray] = session().run(None, feeds)
    return outputs


def in_steps(
    rows: np.ndarray, path: Sequence[int], read: int, pools: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's output of a path, the tail and the state, by launches of one row."""
    outputs = []
    for row in path:
        output, *pools = launched(rows[row : row + 1], [[0]], [read], [1], pools)
        outputs.append(output[0])
        read = 1
    return np.array(outputs), pools[0][read], pools[1][read]


def by_chunks(
    rows: np.ndarray,
    paths: Sequence[Sequence[int]],
    read: Sequence[int],
    write: Sequence[int],
    pools: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Compute :func:`launched` by transformers' chunked form, as other engines verify."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    outputs = np.zeros((len(rows), VALUE_HEADS, VALUE_WIDTH), np.float32)
    tails, states = (pool.copy() for pool in pools)
    for path, source, target in zip(paths, read, write, strict=True):
        q, k, v, g, beta, tail = prepared(rows[list(path)], pools[0][source])
        start = torch.from_numpy(pools[1][source])[None]
        given, state = qwen.torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        outputs[list(path)] = given[0].numpy()
        tails[target], states[target] = tail, state[0].numpy()
    return [outputs, tails, states]


def prepared(rows: np.ndarray, tail: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values, decays, betas [1, T, heads, …] and the tail, in torch."""
    conv_weight, decay_scale, dt_bias = map(torch.from_numpy, weights())
    mixed, beta, decay = torch.from_numpy(rows).split([CHANNELS, VALUE_HEADS, VALUE_HEADS], dim=1)
    window = torch.cat([torch.from_numpy(tail), mixed])
    convolved = torch.nn.functional.conv1d(window.T[None], conv_weight, groups=CHANNELS)[0].T
    q, k, v = torch.nn.functional.silu(convolved).split([KEYS, KEYS, CHANNELS - 2 * KEYS], dim=1)
    times = VALUE_HEADS // KEY_HEADS
    q, k = (x.unflatten(1, (KEY_HEADS, -1)).repeat_interleave(times, 1)[None] for x in (q, k))
    g = decay_scale * torch.nn.functional.softplus(decay + dt_bias)
    v = v.unflatten(1, (VALUE_HEADS, -1))[None]
    return q, k, v, g[None], beta.sigmoid()[None], window[-(TAPS - 1) :].numpy()


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_the_reference_equals_the_recurrence_of_transformers(count: int) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    rows = normal(count, count, CHANNELS + 2 * VALUE_HEADS)
    tails, states = (normal(7 + count, *pool.shape) for pool in empty_pools())
    q, k, v, g, beta, tail = prepared(rows, tails[2])
    expected, state = qwen.torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=torch.from_numpy(states[2])[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    arrays = [rows, *weights(), padded_paths([range(count)])]
    arrays += [np.array([2], np.int32), np.array([3], np.int32), tails, states]
    output, new_tails, new_states = reference(*map(torch.from_numpy, arrays), key_heads=KEY_HEADS)
    torch.testing.assert_close(output, expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(new_states[3], state[0], atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(new_tails[3].numpy(), tail)


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Draw the parents of the nodes, root first, and an accepted node of up to 4 trees."""
    trees = []
    for _ in range(draw(st.integers(1, 4))):
        nodes = draw(st.integers(1, 16))
        is_chain = draw(st.booleans())
        parents = [-1]
        for node in range(1, nodes):
            parents.append(node - 1 if is_chain else draw(st.integers(0, node - 1)))
        trees.append((parents, draw(st.integers(0, nodes - 1))))
    return trees


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def check_verification(launch: Launch, trees: list[tuple[list[int], int]], seed: int) -> None:
    """Assert that rows of trees and states after accepted rows have the bits of single rows."""
    width = CHANNELS + 2 * VALUE_HEADS
    pools: Sequence[np.ndarray] = empty_pools()
    prompts = normal(seed, 5 * len(trees), width)
    slots = list(range(2, 2 + len(trees)))
    starts = [range(5 * b, 5 * b + 1 + (seed + b) % 5) for b in range(len(trees))]
    before = [in_steps(prompts, path, 0, pools) for path in starts]
    _, *pools = launch(prompts, starts, [0] * len(trees), slots, pools)
    for slot, (_, tail, state) in zip(slots, before, strict=True):
        np.testing.assert_array_equal(pools[0][slot], tail)
        np.testing.assert_array_equal(pools[1][slot], state)

    first = np.cumsum([0, *(len(parents) for parents, _ in trees)])
    rows = normal(seed + 1, int(first[-1]), width)
    paths, of_path = [], []
    for b, (parents, _) in enumerate(trees):
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            paths.append([int(first[b]) + node for node in path_to(parents, leaf)])
            of_path.append(slots[b])
    outputs, *unwritten = launch(rows, paths, of_path, [DISCARDED] * len(paths), pools)
    for pool, unchanged in zip(unwritten, pools, strict=True):
        np.testing.assert_array_equal(pool[:DISCARDED], unchanged[:DISCARDED])
    for path, slot in zip(paths, of_path, strict=True):
        np.testing.assert_array_equal(outputs[path], in_steps(rows, path, slot, pools)[0])

    accepted = [
        [int(first[b]) + node for node in path_to(parents, node)]
        for b, (parents, node) in enumerate(trees)
    ]
    _, *after = launch(rows, accepted, slots, slots, pools)
    for path, slot in zip(accepted, slots, strict=True):
        _, tail, state = in_steps(rows, path, slot, pools)
        np.testing.assert_array_equal(after[0][slot], tail)
        np.testing.assert_array_equal(after[1][slot], state)


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(0, 10**6))
def test_trees_have_the_bits_of_single_rows(trees: list[tuple[list[int], int]], seed: int) -> None:
    check_verification(launched, trees, seed)


def test_chunked_verification_has_other_bits() -> None:
    """The chunked form cannot verify drafts: it would accept other tokens than decoding."""
    chain = [([-1, 0, 1, 2], 2)]
    check_verification(launched, chain, 1)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_verification(by_chunks, chain, 1)


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_chunk_boundaries_of_a_prompt_change_no_bit(cut: int) -> None:
    rows, pools = normal(4, 130, CHANNELS + 2 * VALUE_HEADS), empty_pools()
    whole = launched(rows, [range(130)], [0], [1], pools)
    first, *pools = launched(rows[:cut], [range(cut)], [0], [1], pools)
    later, *pools = launched(rows[cut:], [range(130 - cut)], [1], [1], pools)
    np.testing.assert_array_equal(np.concatenate([first, later]), whole[0])
    for pool, expected in zip(pools, whole[1:], strict=True):
        np.testing.assert_array_equal(pool[1], expected[1])
