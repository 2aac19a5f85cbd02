"""The ops of a device step, together, against a speculative decoder of plain lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from device_step import RING, Arrays, DeviceStep, RunOp
from emulation import has_compiler, run_lowering
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from step_world import Sequence, World, grow

from specbuild.builder.backends.cuda.tuning.kernel_case import SMALL_TARGET, bits, values
from specbuild.plugins_cuda.advance.cases import PLAIN_CASES
from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.launches import LoweringRequest, TensorInfo
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}
EOS = (3, 17)
SHAPES = ((1, 1, 1), (1, 4, 4), (3, 3, 7), (2, 4, 9), (4, 2, 6), (3, 1, 3), (3, 4, 12))


def reference(
    name: str, inputs: Mapping[str, torch.Tensor | None], attributes: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    op = op_named(name)
    assert set(inputs) <= {spec.name for spec in op.inputs}
    results: Any = op.reference(*(inputs.get(s.name) for s in op.inputs), **op.complete(attributes))
    results = results if isinstance(results, tuple) else (results,)
    return {s.name: t for s, t in zip(op.outputs, results, strict=True) if t is not None}


def by_reference(
    name: str, inputs: Mapping[str, np.ndarray | None], attributes: Mapping[str, Any]
) -> Arrays:
    tensors = {n: None if a is None else torch.from_numpy(a) for n, a in inputs.items()}
    return {n: t.numpy().copy() for n, t in reference(name, tensors, attributes).items()}


def by_kernels(
    name: str, inputs: Mapping[str, np.ndarray | None], attributes: Mapping[str, Any]
) -> Arrays:
    """Run the op's kernels in the emulator; the reference gives the shapes of its outputs."""
    op = op_named(name)
    bf16 = {spec.name for spec in op.inputs if spec.dtype in ("T", "C")}
    tensors = {
        n: torch.from_numpy(a).bfloat16() if n in bf16 else torch.from_numpy(a)
        for n, a in inputs.items()
        if a is not None
    }
    outputs = reference(name, tensors, attributes)
    infos = {n: TensorInfo(tuple(t.shape), NAMES[t.dtype]) for n, t in (tensors | outputs).items()}
    assert op.lower is not None
    request = LoweringRequest(infos, op.complete(attributes), target=SMALL_TARGET)
    result = run_lowering(
        op,
        op.lower(request),
        {n: bits(t) for n, t in tensors.items()},
        {n: bits(t) for n, t in outputs.items()},
    )
    return {n: values(result[n], t.dtype).copy() for n, t in outputs.items()}


def sequences_of(world: World, rng: np.random.Generator) -> list[Sequence]:
    """Draw prompts with a first token, and limits that fall within a step."""
    sequences = []
    for b in range(3):
        all_tokens = rng.integers(0, world.vocab, 2 + 5 * b).tolist()
        all_tokens.append(world.next_token(tuple(all_tokens)))
        limit = len(all_tokens) + int(rng.integers(4, 30))
        sequences.append(Sequence(world, all_tokens, limit, frozenset(EOS if b else ())))
    return sequences


def check_step(device: DeviceStep, sequences: list[Sequence], ring: Arrays, steps: int) -> None:
    state = device.state
    for b, sequence in enumerate(sequences):
        assert bool(state["done"][b]) == sequence.done
        assert (state["length"][b], state["root"][b]) == (sequence.length, sequence.all_tokens[-1])
    assert ring["ring_step"] == steps == state["step"][0]
    for b in range(len(sequences), device.batch):
        assert (state["length"][b], state["done"][b], ring["ring_count"][b]) == (0, 1, 0)


def check_tree(
    device: DeviceStep, b: int, world: World, context: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    """Assert that the pool is that of the algorithm, and that the tree has its best nodes."""
    pool = grow(world, context, shape[0], shape[1])
    found = device.last_pool
    assert found["pool_tokens"][b].tolist() == [node.context[-1] for node in pool]
    assert found["pool_parents"][b].tolist() == [node.parent for node in pool]
    np.testing.assert_allclose(found["pool_scores"][b], [n.score for n in pool], atol=1e-4)
    tree = device.last_tree
    assert int(tree["count"][b]) == shape[2] + 1
    spelled = {(): 0}
    for slot in range(1, shape[2] + 1):
        words = tree["ancestor_bits"][b, slot]
        path = [j for j in range(1, slot + 1) if int(words[j // 32]) >> (j % 32) & 1]
        spelled[tuple(tree["tree_tokens"][b, path].tolist())] = slot
    ranked = sorted(range(len(pool)), key=lambda i: (-pool[i].score, i))[: shape[2]]
    assert set(spelled) - {()} == {pool[i].context[len(context) :] for i in ranked}


def decode(run: RunOp, seed: int, *, steps: int) -> list[Sequence]:
    """Run steps of changing shapes, sometimes one or two without a draft."""
    world, rng = World(seed), np.random.default_rng(seed)
    sequences = sequences_of(world, rng)
    device = DeviceStep(world, run, batch=4, capacity=8, pages=20)
    device.state["eos_ids"][: len(EOS)] = EOS
    for b, sequence in enumerate(sequences):
        device.admit(b, list(sequence.all_tokens), sequence.limit, ignore_eos=not sequence.eos)
    plain = 0
    for number in range(1, steps + 1):
        fits = int(device.state["pending_count"].max()) < 8
        plain = plain + 1 if fits and plain < 2 and rng.random() < 0.3 else 0
        shape = None if plain else SHAPES[int(rng.integers(len(SHAPES)))]
        before = [tuple(s.all_tokens) for s in sequences]
        lively = [not s.done for s in sequences]
        ring = device.step(shape)
        for b, sequence in enumerate(sequences):
            context = tuple(sequence.all_tokens)
            tokens, accepted = sequence.step(shape)
            count = int(ring["ring_count"][b])
            assert ring["ring_tokens"][b, :count].tolist() == tokens
            assert ring["ring_accepted"][b] == accepted
            logprobs = [world.logprob((*context, *tokens[:i])) for i in range(len(tokens))]
            np.testing.assert_allclose(ring["ring_logprobs"][b, :count], logprobs, rtol=1e-6)
            if shape is not None and lively[b]:
                check_tree(device, b, world, before[b], shape)
        check_step(device, sequences, ring, number)
    return sequences


@examples(15)
@given(st.integers(0, 2**31))
def test_references_generate_the_tokens_of_plain_lists(seed: int) -> None:
    for sequence in decode(by_reference, seed, steps=14):
        start = len(sequence.all_tokens) - len(sequence.emitted)
        for i in range(start, len(sequence.all_tokens)):
            assert sequence.all_tokens[i] == sequence.world.next_token(
                tuple(sequence.all_tokens[:i])
            )


def test_the_steps_cover_all_endings() -> None:
    """These steps include long and empty accepted paths, ends of sequences, and limits."""
    ends = [s for seed in range(12) for s in decode(by_reference, seed, steps=14)]
    assert any(s.emitted[-1] in s.eos for s in ends)
    assert any(len(s.all_tokens) == s.limit for s in ends)
    assert any(len(s.emitted) > 20 for s in ends)


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kernels_generate_the_tokens_of_plain_lists(seed: int) -> None:
    decode(by_kernels, seed, steps=8)


@pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")
@pytest.mark.parametrize("case", PLAIN_CASES, ids=lambda case: case.name)
def test_advance_without_a_draft(case: Case) -> None:
    op = op_named("Advance")
    arrays = case.make(np.random.default_rng(5))
    inputs = {s.name: a for s, a in zip(op.inputs, arrays, strict=True)}
    wanted, result = (run("Advance", inputs, case.attributes) for run in (by_reference, by_kernels))
    plain = {
        f"{name}_out" for name in ("length", "root", "done", "step", "ring_tokens",
                                   "ring_logprobs", "ring_accepted", "ring_count", "ring_step")
    }  # fmt: skip
    marked = {"marks_out"} if inputs["marks"] is not None else set()
    assert set(result) == set(wanted) == plain | marked
    for name, array in wanted.items():
        np.testing.assert_array_equal(result[name], array, err_msg=name)


def test_the_oldest_rows_are_dropped_if_the_draft_is_full() -> None:
    world = World(4)
    device = DeviceStep(world, by_reference, batch=1, capacity=3, pages=20)
    all_tokens = [5, 6]
    all_tokens.append(world.next_token(tuple(all_tokens)))
    device.admit(0, all_tokens, 40, ignore_eos=True)
    for _ in range(RING + 1):
        device.step(None)
        all_tokens.append(world.next_token(tuple(all_tokens)))
    assert device.state["pending_count"][0] == 3
    assert device.state["pending_tokens"][0].tolist() == all_tokens[-3:]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("Advance", {"path": (2, 9), "accepted": (2,)}, "paths of 9 slots"),
        ("LevelInputs", {"pool_tokens": (2, 11)}, "a pool of 11"),
        ("ExtendInputs", {"pending_captured": (2, 3, 12)}, "rows of 24 bytes"),
    ],
)
def test_lowering_rejects_sizes_that_do_not_fit(
    name: str, sizes: Mapping[str, tuple[int, ...]], message: str
) -> None:
    op = op_named(name)
    axes = {"B": 2, "T": 6, "BK": 6, "T0": 6, "FK": 9, "K": 3, "M": 12, "H": 16, "C": 16, "W": 1}
    axes |= {"P": 4, "D1": 3, "DM1": 3, "S": 4, "BM": 2, "R1": 3, "B1": 3, "words": 1}
    axes |= {"R": 2, "F": 1, "vocab": 5}
    shapes = {
        s.name: tuple(int(a) if a.isdigit() else axes[a] for a in s.axes)
        for s in (*op.inputs, *op.outputs)
    }
    dtypes = {s.name: "bfloat16" if s.dtype == "T" else s.dtype for s in (*op.inputs, *op.outputs)}
    infos = {n: TensorInfo(sizes.get(n, shape), dtypes[n]) for n, shape in shapes.items()}
    attributes = {"page_size": 4, "level": 2, "depth": 2, "last": 0, "extended": 1}
    declared = {a.name for a in op.attributes}
    given_attributes = {n: v for n, v in attributes.items() if n in declared}
    assert op.lower is not None
    with pytest.raises(SpecbuildError, match=message):
        op.lower(LoweringRequest(infos, op.complete(given_attributes)))


def view_inputs(lengths: list[int], exact: list[int], *, threshold: int, room: int):
    """Return the outputs for sequences with a root each, in a full step; pages have 8 slots."""
    batch = len(lengths)

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table = ints([[1 + 8 * b + p for p in range(8)] for b in range(batch)])
    op = op_named("ViewInputs")
    found = op.reference(
        ints([7] * batch), ints(lengths), torch.ones(batch, 1, dtype=torch.int32),
        ints([0] * batch), None, ints([1] * batch), ints([0] * batch), ints([1] * batch),
        ints(exact), ints([-1] * batch), ints([2] * batch),
        torch.zeros(batch, 16, dtype=torch.int32), table, None,
        page_size=8, block_size=8, sink_tokens=8, window_blocks=1, threshold=threshold, room=room,
    )  # fmt: skip
    return dict(zip((spec.name for spec in op.outputs), found, strict=True))


@pytest.mark.parametrize(("room", "fed"), [(9, [1, 1]), (8, [1, 0])])
def test_chains_may_fill_the_last_row(room: int, fed: list[int]) -> None:
    found = view_inputs([40, 40], [36, 35], threshold=16, room=room)
    assert found["fed_again"].tolist() == fed


def test_blocks_are_selected_above_the_threshold_only() -> None:
    found = view_inputs([32, 33], [30, 30], threshold=32, room=16)
    assert found["blocks"].tolist() == [-1, 2]
