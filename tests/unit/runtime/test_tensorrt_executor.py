"""The TensorRT executor under the decoding loop: engines walked by references on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fused_graphs import run_graph, sequence
from hypothesis import given
from hypothesis import strategies as st
from plugin_engine import Built, build_plugins, executor_of
from toy_engine import run

from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.feeds import (
    chosen_profile,
    from_device,
    padded,
    sizes_of,
    to_device,
)
from specbuild.runtime.manifest import DraftShape, Port, Role, ShapeProfile, SizeRange
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

TREE = DraftShape(2, 3, 5)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1])


@pytest.fixture(scope="module")
def built(target_path: Path, draft_path: Path) -> Iterator[Built]:
    with pytest.MonkeyPatch.context() as patch:
        yield build_plugins(
            target_path, draft_path, patch,
            max_seq_len=64, max_batch_size=2, page_size=16,
            draft_top_k=2, draft_depth=3, draft_tokens=5,
        )  # fmt: skip


@pytest.mark.parametrize(
    "sampled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_drafts_change_no_token(built: Built, sampled: bool) -> None:
    """Padded to profiles, over pools that stay on the device, replayed from graphs."""
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=5) if sampled else SamplingParams()
    params = GenerateParams(max_new_tokens=6, sampling=sampling)
    results = {}
    for name, speculation in (("none", None), ("chain", DraftShape(1, 2, 2)), ("tree", TREE)):
        executor, gpu, sessions = executor_of(built)
        engine = Engine(built.manifest, executor)
        results[name] = run(engine, PROMPTS, params, speculation=speculation)
        assert gpu.graphs > 0, "profiles that ran twice are recorded"
        assert ("draft" in sessions) == (name != "none")
        executor.close()
        assert gpu.closed and not gpu.held
    assert results["chain"].ids == results["none"].ids
    assert results["tree"].ids == results["none"].ids
    alone = [
        run(Engine(built.manifest, executor_of(built)[0]), [p], params, speculation=None).ids[0]
        for p in PROMPTS
    ]
    assert alone == results["none"].ids


def test_tokens_are_those_of_one_pass_over_the_whole_sequence(built: Built) -> None:
    """No pages, steps or padding: all rows at once, by the references."""
    executor, _, _ = executor_of(built)
    params = GenerateParams(max_new_tokens=8)
    (tokens,) = run(Engine(built.manifest, executor), PROMPTS[:1], params, speculation=TREE).ids
    ids = [*PROMPTS[0], *tokens]
    model, pages = built.models["target"], 1 + -(-len(ids) // 16)
    feeds = {
        "token_ids": torch.tensor(ids, dtype=torch.int32),
        "positions": torch.arange(len(ids), dtype=torch.int32),
        "row_start": torch.tensor([0, len(ids)], dtype=torch.int32),
        "ancestor_bits": torch.zeros(len(ids), 1, dtype=torch.int32),
        "logit_rows": torch.arange(len(ids), dtype=torch.int32),
    }
    for port in model.graph.inputs:
        _, _, part = str(port.name).rpartition(".")
        if part in ("page_table", "row_slot", "tree_start", "write_slot"):
            feeds[str(port.name)] = sequence(range(len(ids)), 16, pages)[part]
        elif str(port.name) not in feeds:
            shape = [len(ids) if str(getattr(s, "value", s)) == "T" else int(s) for s in port.shape]
            feeds[str(port.name)] = torch.zeros(shape, dtype=torch.bfloat16)
    logits = run_graph(model, feeds)["logits"]
    assert logits.argmax(1)[len(PROMPTS[0]) - 1 : -1].tolist() == tokens


def test_a_profile_is_walked_once_and_recorded_once(built: Built) -> None:
    executor, gpu, sessions = executor_of(built)
    rng = np.random.default_rng(1)
    feeds = {
        "logits": rng.standard_normal((2, built.manifest.target.vocab), np.float32),
        "temperature": np.zeros(2, np.float32),
        "top_k": np.zeros(2, np.int32),
        "top_p": np.ones(2, np.float32),
        "seed": np.arange(2, dtype=np.int32),
        "position": np.arange(2, dtype=np.int32),
    }
    for _ in range(4):
        feeds["logits"] = rng.standard_normal(feeds["logits"].shape, np.float32)
        got = executor.run("choose", feeds)
        np.testing.assert_array_equal(got["choice"], feeds["logits"].argmax(1))
    assert sessions["choose"].queued == 2 and gpu.graphs == 3
    plain, plain_gpu, _ = executor_of(built, recorded=False)
    for _ in range(3):
        np.testing.assert_array_equal(plain.run("choose", feeds)["choice"], got["choice"])
    assert plain_gpu.graphs == 0


def test_what_no_profile_holds_is_refused(built: Built) -> None:
    executor, _, _ = executor_of(built)
    rows = 1 + max(p.axes["R"].most for p in built.manifest.roles["choose"].profiles)
    feeds = {
        "logits": np.zeros((rows, built.manifest.target.vocab), np.float32),
        **{n: np.zeros(rows, np.float32) for n in ("temperature", "top_p")},
        **{n: np.zeros(rows, np.int32) for n in ("top_k", "seed", "position")},
    }
    with pytest.raises(SpecbuildError, match=f"role choose has no profile for R {rows}"):
        executor.run("choose", feeds)
    feeds["seed"] = feeds["seed"][1:]
    with pytest.raises(SpecbuildError, match="axis R is"):
        executor.run("choose", feeds)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20))
def test_bf16_round_trips(values: list[float]) -> None:
    port = Port("hidden", "bfloat16", ("T",))
    array = np.array(values, np.float32)
    bits = to_device(array, port)
    assert bits.dtype == np.uint16
    once = from_device(bits, port)
    np.testing.assert_array_equal(to_device(once, port)[~np.isnan(once)], bits[~np.isnan(once)])
    assert (np.isnan(once) == np.isnan(array)).all()
    finite = np.isfinite(array) & np.isfinite(once) & (np.abs(array) > 1e-37)
    wanted = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(once[finite], wanted[finite])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True),
    rows=st.integers(1, 45),
    value=st.integers(0, 3),
)
def test_the_first_profile_that_holds_the_sizes_is_taken(
    sizes: list[int], rows: int, value: int
) -> None:
    ports = (Port("token_ids", "int32", ("T",)), Port("top_k", "int32", ()))
    profiles = tuple(
        ShapeProfile(f"{n} {k}", {"T": SizeRange(n, n, n), "top_k": SizeRange(k, k, k)})
        for n in sorted(sizes)
        for k in (1, 2)
    )
    role = Role("r", ports, (), (), {}, profiles)
    feeds = {"token_ids": np.arange(rows, dtype=np.int32), "top_k": np.array(value, np.int32)}
    found = sizes_of(ports, feeds)
    assert found == {"T": rows, "top_k": value}
    fits = [n for n in sorted(sizes) if n >= rows]
    if not fits or value not in (1, 2):
        with pytest.raises(SpecbuildError, match="has no profile for T"):
            chosen_profile("r", role, found)
        return
    assert profiles[chosen_profile("r", role, found)].name == f"{fits[0]} {value}"


def test_what_is_added_is_absent() -> None:
    starts = padded(np.array([0, 2, 5], np.int32), Port("row_start", "int32", (5,)), (5,))
    assert starts.tolist() == [0, 2, 5, 5, 5]
    scores = padded(np.ones((1, 2), np.float32), Port("scores", "float32", ("B", "M")), (2, 3))
    assert scores.tolist() == [[1, 1, -np.inf], [-np.inf] * 3]
    slots = padded(np.array([[7]], np.int32), Port("full.from_slot", "int32", (1, 2)), (1, 2))
    assert slots.tolist() == [[7, -1]]
    with pytest.raises(SpecbuildError, match="holds"):
        padded(np.zeros(3, np.int32), Port("token_ids", "int32", (2,)), (2,))
