"""LazyGatedDelta: verified and then committed rows have the bits of rows launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering, tensor_info
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from specbuild.builder.backends.cuda.tuning.inputs import LaunchData
from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits
from specbuild.plugins_cuda.gated_delta.cases import padded_paths
from specbuild.plugins_cuda.gated_delta.op import reference as gated_delta
from specbuild.plugins_cuda.launches import LoweringRequest, Tactic, TensorInfo
from specbuild.plugins_cuda.lazy_gated_delta.cases import ancestors, chain
from specbuild.plugins_cuda.lazy_gated_delta.op import OP, reference
from specbuild.plugins_cuda.tree_select.op import pack_bits

KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 1, 2, 16, 4
KEYS, VALUES = KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH
CHANNELS = 2 * KEYS + VALUES
ROW_WIDTH = CHANNELS + VALUES + 2 * VALUE_HEADS
NODES, BATCH = 6, 2
POOLS = ("tail_pool", "state_pool", "factor_pool")
EPS = 1e-6


@dataclass
class World:
    """Pools of two sequences, and the rows that the last launch left to commit."""

    pools: dict[str, torch.Tensor]
    paths: list[list[int]]

    def copy(self) -> World:
        return World({n: t.clone() for n, t in self.pools.items()}, [list(p) for p in self.paths])


def new_world() -> World:
    nan = float("nan")
    pools = {
        "tail_pool": torch.full((BATCH, TAPS - 1 + NODES, CHANNELS), nan, dtype=torch.bfloat16),
        "state_pool": torch.full((BATCH, VALUE_HEADS, WIDTH, WIDTH), nan),
        "factor_pool": torch.full((BATCH, NODES, VALUES + KEYS + VALUE_HEADS), nan),
    }
    return World(pools, [[], []])


def weights() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    return {
        "conv_weight": normal(CHANNELS, 1, TAPS).bfloat16(),
        "decay_scale": -normal(VALUE_HEADS).exp(),
        "dt_bias": normal(VALUE_HEADS),
        "norm": normal(WIDTH).bfloat16(),
    }


WEIGHTS = weights()


def random_rows(seed: int, count: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, ROW_WIDTH, generator=drawn).bfloat16()


Compute = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
RunOp = Callable[..., dict[str, np.ndarray]]


def by_kernel(
    inputs: dict[str, torch.Tensor],
    stores: int,
    run: RunOp = run_lowering,
    tactic: Tactic | None = None,
) -> dict[str, torch.Tensor]:
    outputs = {"output": torch.empty(len(inputs["rows"]), VALUES, dtype=torch.bfloat16)}
    outputs |= {f"{name}_out": inputs[name] for name in POOLS}
    arrays = {name: bits(tensor) for name, tensor in inputs.items()}
    results = {name: bits(tensor) for name, tensor in outputs.items()}
    tensors = {name: tensor_info(array) for name, array in (arrays | results).items()}
    attributes = {"key_heads": KEY_HEADS, "eps": EPS, "stores": stores}
    assert OP.lower is not None
    request = LoweringRequest(tensors, attributes, "decode", SMALL_TARGET, tactic or {})
    lowering = OP.lower(request)
    by_name = run(OP, lowering, arrays, results)
    return {
        name: torch.from_numpy(by_name[name].view(np.int16)).view(torch.bfloat16)
        if tensor.dtype == torch.bfloat16
        else torch.from_numpy(by_name[name])
        for name, tensor in outputs.items()
    }


def by_reference(inputs: dict[str, torch.Tensor], stores: int) -> dict[str, torch.Tensor]:
    results = reference(*inputs.values(), key_heads=KEY_HEADS, eps=EPS, stores=stores)
    return dict(zip((spec.name for spec in OP.outputs), results, strict=True))


def launch(
    compute: Compute,
    world: World,
    trees: Sequence[tuple[torch.Tensor, Sequence[int], int]],
    *,
    stores: bool = False,
    padding: int = 0,
) -> list[torch.Tensor]:
    """Run the (rows, parents, position) of each sequence and return the outputs.

    Nothing is committed after this launch unless ``world.paths`` is set. Up to ``padding`` rows of
    no sequence follow.
    """
    counts = [len(rows) for rows, _, _ in trees]
    most = max(map(len, world.paths))
    path = np.full((BATCH, NODES), 7777, np.int32)
    for b, accepted in enumerate(world.paths):
        path[b, : len(accepted)] = accepted
    assert most <= NODES
    seen = [pack_bits(torch.from_numpy(ancestors(p))) for _, p, _ in trees if len(p)]
    positions = [
        position + (i if stores else 0) for rows, _, position in trees for i in range(len(rows))
    ]
    padding = min(padding, BATCH * NODES - sum(counts))
    unused = torch.full((padding, ROW_WIDTH), float("nan"), dtype=torch.bfloat16)
    inputs = {
        "rows": torch.cat([*(rows for rows, _, _ in trees), unused]),
        **WEIGHTS,
        "positions": torch.tensor(positions + [0] * padding, dtype=torch.int32),
        "row_start": torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        "ancestor_bits": F.pad(
            torch.cat([words[:, :1] for words in seen]).int(), (0, 0, 0, padding)
        ),
        "state_slot": torch.tensor([1, 0], dtype=torch.int32),
        "replay_path": torch.from_numpy(path),
        "replay_count": torch.tensor([len(p) for p in world.paths], dtype=torch.int32),
        **world.pools,
    }
    results = compute(inputs, int(stores))
    world.pools = {name: results[f"{name}_out"].clone() for name in POOLS}
    world.paths = [[], []]
    return list(results["output"].split([*counts, padding])[:BATCH])


def equal(actual: torch.Tensor, desired: torch.Tensor) -> None:
    assert actual.dtype == desired.dtype
    np.testing.assert_array_equal(bits(actual), bits(desired))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@st.composite
def parents_of(draw: st.DrawFn) -> list[int]:
    if draw(st.booleans()):
        return chain(NODES)
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, NODES))]


@st.composite
def stories(draw: st.DrawFn) -> list[list[tuple[list[int], int]]]:
    """Draw the steps of both sequences: the parents of the nodes, and the accepted node."""
    step = st.tuples(parents_of(), st.integers(0, NODES - 1))
    return [[draw(step), draw(step)] for _ in range(draw(st.integers(1, 3)))]


def check_story(
    compute: Compute,
    story: list[list[tuple[list[int], int]]],
    seed: int,
    verify: Compute | None = None,
    *,
    padding: int = 0,
) -> None:
    """Assert that outputs, and states after accepted rows, have the bits of launches of one row."""
    world, single = new_world(), new_world()
    prompts = [random_rows(seed + b, 1 + (seed + 2 * b) % 5) for b in range(BATCH)]
    launch(compute, world, [(p, chain(len(p)), 0) for p in prompts], stores=True)
    for place in range(max(map(len, prompts))):
        turn = [(p[place : place + 1], chain(len(p[place : place + 1])), place) for p in prompts]
        launch(compute, single, turn, stores=True)
    length = [len(p) for p in prompts]
    for number, trees in enumerate(story):
        rows = [random_rows(seed + 10 * number + b + 99, NODES) for b in range(BATCH)]
        verified = [
            (rows[b][: len(parents)], parents, length[b]) for b, (parents, _) in enumerate(trees)
        ]
        waiting = list(world.paths)
        outputs = launch(verify or compute, world, verified, padding=padding)
        paths = [path_to(parents, node) if parents else [] for parents, node in trees]
        for b, path in enumerate(paths):
            for node in path:
                turn = [(rows[b][:0], [], 0)] * BATCH
                turn[b] = (rows[b][node : node + 1], [-1], length[b])
                paths_before = list(single.paths)
                (output,) = [o for o in launch(compute, single, turn) if len(o)]
                equal(output[0], outputs[b][node])
                single.paths = paths_before
                single.paths[b] = [0]
                length[b] += 1
        world.paths = [
            path if parents else before
            for path, (parents, _), before in zip(paths, trees, waiting, strict=True)
        ]
    # An empty prompt would be a separate launch, so one more row commits both.
    last = [(random_rows(seed + 1000 + b, 1), [-1], length[b]) for b in range(BATCH)]
    for actual, desired in zip(
        launch(compute, world, last), launch(compute, single, last), strict=True
    ):
        equal(actual, desired)
    equal(world.pools["state_pool"], single.pools["state_pool"])
    equal(world.pools["tail_pool"][:, :TAPS], single.pools["tail_pool"][:, :TAPS])


STORY = [[(chain(NODES), 2), ([-1, 0, 0, 1, 2, 2], 5)], [(chain(NODES), 0), (chain(NODES), 5)]]


@settings(max_examples=25, deadline=None)
@given(stories(), st.integers(0, 10**6))
@example(STORY, 1)
@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_the_kernel_has_the_bits_of_single_rows(
    story: list[list[tuple[list[int], int]]], seed: int
) -> None:
    check_story(by_kernel, story, seed)


TACTICS: list[Tactic] = [{"ctas": ctas, "warms": warms} for ctas in (1, 2) for warms in (0, 1)]


@pytest.mark.parametrize("tactic", TACTICS, ids=["one", "one, warm", "two", "two, warm"])
@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_every_tactic_has_the_bits_of_the_default(tactic: Tactic) -> None:
    """A tactic verifies rows that the default computes one by one; the next launch commits them."""
    by_tactic = partial(by_kernel, tactic=tactic)
    for seed in range(3):
        check_story(by_kernel, STORY, seed, verify=by_tactic)
        check_story(by_tactic, STORY, seed, verify=by_kernel)


@settings(max_examples=25, deadline=None)
@given(stories(), st.integers(0, 10**6))
def test_the_reference_has_the_bits_of_single_rows(
    story: list[list[tuple[list[int], int]]], seed: int
) -> None:
    check_story(by_reference, story, seed)


def in_chunks(inputs: dict[str, torch.Tensor], stores: int) -> dict[str, torch.Tensor]:
    """Verify chains by the chunked form of transformers, as other engines do."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    assert stores == 0
    results = by_reference(inputs, 0)
    for b in range(BATCH):
        first, last = inputs["row_start"][b : b + 2].tolist()
        slot = int(inputs["state_slot"][b])
        rows = inputs["rows"][first:last]
        window = torch.cat([results["tail_pool_out"][slot, : TAPS - 1], rows[:, :CHANNELS]]).float()
        weight = inputs["conv_weight"].float()
        mixed = F.silu(F.conv1d(window.T[None], weight, groups=CHANNELS)[0].T.bfloat16())
        q, k, v = mixed.split([KEYS, KEYS, VALUES], dim=1)
        q, k = (x.unflatten(1, (KEY_HEADS, -1)).repeat_interleave(VALUE_HEADS, 1) for x in (q, k))
        beta, decay = rows[:, CHANNELS + VALUES :].split(VALUE_HEADS, dim=1)
        g = inputs["decay_scale"] * F.softplus(decay.float() + inputs["dt_bias"])
        verified, _ = qwen.torch_chunk_gated_delta_rule(
            *(x[None].bfloat16() for x in (q, k, v.unflatten(1, (VALUE_HEADS, -1)))),
            g=g[None], beta=beta.sigmoid()[None], output_final_state=False,
            initial_state=results["state_pool_out"][slot][None], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        norm = qwen.Qwen3_5RMSNormGated(WIDTH, eps=EPS).bfloat16()
        norm.weight.data = inputs["norm"]
        gate = rows[:, CHANNELS : CHANNELS + VALUES].unflatten(1, (VALUE_HEADS, -1))
        with torch.no_grad():
            results["output"][first:last] = norm(verified[0], gate).flatten(1)
    return results


def test_chunked_verification_has_other_bits() -> None:
    """The chunked form cannot verify drafts: it would accept other tokens than single rows give."""
    chains = [[(chain(NODES), 3), (chain(NODES), 5)]] * 3
    check_story(by_reference, chains, 3)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        for seed in range(40):  # Few outputs differ, since they are rounded to bf16.
            check_story(by_reference, chains, seed, verify=in_chunks)
    # Both compute the same function.
    world, start = new_world(), new_world()
    prompts = [(random_rows(b, 4), chain(4), 0) for b in range(BATCH)]
    launch(by_reference, start, prompts, stores=True)
    world = start.copy()
    verified = [(random_rows(7 + b, NODES), chain(NODES), 4) for b in range(BATCH)]
    for actual, desired in zip(
        launch(by_reference, start, verified), launch(in_chunks, world, verified), strict=True
    ):
        torch.testing.assert_close(actual, desired, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("accepted", [0, 2, NODES - 1])
def test_the_reference_equals_gated_delta_and_its_norm(accepted: int) -> None:
    """Run a prompt, the accepted rows of a step, and one more row.

    GatedDelta is tested separately.
    """
    world, rows = new_world(), random_rows(3, 4 + NODES + 1)
    none: tuple[torch.Tensor, list[int], int] = (rows[:0], [], 0)
    outputs = launch(by_reference, world, [(rows[:4], chain(4), 0), none], stores=True)[0]
    verified = launch(by_reference, world, [(rows[4 : 4 + NODES], chain(NODES), 4), none])[0]
    world.paths[0] = list(range(accepted + 1))
    last = launch(by_reference, world, [(rows[-1:], [-1], 5 + accepted), none])[0]
    outputs = torch.cat([outputs, verified[: accepted + 1], last])

    accepted_rows = torch.cat([rows[: 5 + accepted], rows[-1:]])
    joined = torch.cat([accepted_rows[:, :CHANNELS], accepted_rows[:, CHANNELS + VALUES :]], dim=1)
    empty = torch.zeros(1, dtype=torch.int32)
    mixed, _, _ = gated_delta(
        joined,
        *(WEIGHTS[name] for name in ("conv_weight", "decay_scale", "dt_bias")),
        torch.from_numpy(padded_paths([range(len(accepted_rows))])),
        empty,
        empty,
        torch.zeros(1, TAPS - 1, CHANNELS, dtype=torch.bfloat16),
        torch.zeros(1, VALUE_HEADS, WIDTH, WIDTH),
        key_heads=KEY_HEADS,
    )
    wide = mixed.float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).bfloat16()
    gate = F.silu(accepted_rows[:, CHANNELS : CHANNELS + VALUES].float())
    wanted = ((normed * WEIGHTS["norm"]).flatten(1).float() * gate).bfloat16()
    torch.testing.assert_close(outputs, wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
def test_tactics_agree_on_the_launches_that_tune_draws() -> None:
    shapes = {
        "rows": (2 * NODES, ROW_WIDTH),
        **{name: tuple(weight.shape) for name, weight in WEIGHTS.items()},
        "positions": (2 * NODES,),
        "row_start": (BATCH + 1,),
        "ancestor_bits": (2 * NODES, 1),
        "state_slot": (BATCH,),
        "replay_path": (BATCH, NODES),
        "replay_count": (BATCH,),
        **{name: tuple(pool.shape) for name, pool in new_world().pools.items()},
        "output": (2 * NODES, VALUES),
    }
    kinds = {"T": "bfloat16", "float32": "float32", "int32": "int32"}
    tensors = {name: TensorInfo(s, kinds[OP.tensor(name).dtype]) for name, s in shapes.items()}
    attributes = {"key_heads": KEY_HEADS, "eps": EPS, "stores": 0}
    request = LoweringRequest(tensors, attributes, "decode", SMALL_TARGET)
    names = [spec.name for spec in OP.inputs]
    arrays = LaunchData(request, 64, np.random.default_rng(1)).arrays(names)
    assert (arrays["positions"] > 0).all() and (arrays["replay_count"] > 0).all()
    results = {f"{name}_out": arrays[name] for name in POOLS}
    results["output"] = np.zeros(shapes["output"], np.uint16)
    assert OP.lower is not None and OP.tactics is not None
    of_tactic = [
        run_lowering(OP, OP.lower(replace(request, tactic=tactic)), arrays, results)
        for tactic in OP.tactics(request)
    ]
    assert len(of_tactic) == len(TACTICS)
    for others in of_tactic[1:]:
        for name, array in of_tactic[0].items():
            np.testing.assert_array_equal(others[name], array)
    written = of_tactic[0]["output"].astype(np.uint32) << 16
    assert np.isfinite(written.view(np.float32)).all()
