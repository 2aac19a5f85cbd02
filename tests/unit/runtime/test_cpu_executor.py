"""ONNX Runtime on a hand-built graph: pools in place, external weights, small overhead."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from engine_directory import PAGES, SIZE, VOCAB, WIDTH, write_engine
from toy_engine import prompt

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import EngineFileError, RequestError, UnsupportedHereError
from specbuild.runtime.executors.cpu.executor import CpuExecutor, allocate_pool, session_options
from specbuild.runtime.executors.cpu.graphs import read_graphs
from specbuild.runtime.request import FinishEvent, GenerateParams
from specbuild.runtime.settings import RuntimeSettings


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


def executor_of(path: Path, threads: int = 1) -> CpuExecutor:
    described = read_manifest(path)
    weights = open_weights(path, described)
    return CpuExecutor(described, read_graphs(path, described), weights, threads=threads)


def feeds_of(ids: list[int], slots: list[int]) -> dict[str, np.ndarray]:
    return {
        "token_ids": np.array(ids, np.int32),
        "full.write_slot": np.array(slots, np.int32),
        "full.page_table": np.ones((1, 1, 1, 1), np.int32),
        "logit_rows": np.arange(len(ids), dtype=np.int32),
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_pools_persist_between_calls(tmp_path: Path, threads: int) -> None:
    weights = write_engine(tmp_path / "engine", seed=3)
    executor = executor_of(tmp_path / "engine", threads)
    pool = np.zeros((PAGES * SIZE, WIDTH), np.float64)
    for ids, slots in (([3, 7], [4, 9]), ([5], [6]), ([1, 2, 28], [4, 17, 79])):
        x = weights["embedding"][ids]
        pool[slots] = x
        expected = (x + pool.sum(0)) @ weights["head"]
        logits = executor.run("target", feeds_of(ids, slots))["logits"]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        choice = executor.run("choose", {"logits": logits})["choice"]
        assert choice.tolist() == expected.argmax(1).tolist()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_pool_allocates_written_pages_only() -> None:
    pool = allocate_pool("full", "float32", (64, 64, 16, 256))  # 64 MiB, 1 MiB a head
    before = resident_bytes()
    pool[:, 1, 0, :8] = 1.0
    assert resident_bytes() - before < pool.nbytes / 16, "one page of memory a head"
    assert pool.sum() == 64 * 8


def resident_bytes() -> int:
    """Return the private memory of this process that is not backed by a file."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * resource.getpagesize()


def test_outputs_remain_valid_during_the_next_run(engine: Path) -> None:
    executor = executor_of(engine)
    logits = executor.run("target", feeds_of([3, 4], [4, 5]))["logits"]
    before = logits.copy()
    for _ in range(3):
        executor.run("choose", {"logits": logits})
        executor.run("choose", {"logits": before[:1]})
    np.testing.assert_array_equal(logits, before)


def test_inputs_of_another_layout_or_type_are_converted(engine: Path) -> None:
    executor = executor_of(engine)
    feeds = feeds_of([3, 4, 5], [4, 5, 6])
    plain = executor.run("target", feeds)["logits"].copy()
    strange = {name: array.astype(np.int64) for name, array in feeds.items()}
    strange["token_ids"] = np.array([3, 0, 4, 0, 5], np.int32)[::2]
    np.testing.assert_array_equal(executor.run("target", strange)["logits"], plain)


def test_an_input_array_changed_in_place_is_read_again(engine: Path) -> None:
    executor = executor_of(engine)
    feeds = feeds_of([3], [4])
    first = executor.run("target", feeds)["logits"].copy()
    feeds["token_ids"][0] = 9
    second = executor.run("target", feeds)["logits"].copy()
    feeds["token_ids"][0] = 3
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(executor.run("target", feeds)["logits"], first)


def test_a_session_is_created_when_its_role_first_runs(engine: Path) -> None:
    executor = executor_of(engine)
    assert executor.loaded_roles == ()
    executor.run("choose", {"logits": np.ones((1, VOCAB), np.float32)})
    assert executor.loaded_roles == ("choose",)


def test_the_error_names_an_invalid_graph(engine: Path) -> None:
    described = read_manifest(engine)
    executor = CpuExecutor(
        described, {"graphs/choose.onnx": b"no graph"}, open_weights(engine, described)
    )
    with pytest.raises(EngineFileError, match=r"graphs/choose\.onnx: ONNX Runtime .* refuses it"):
        executor.run("choose", {"logits": np.ones((1, VOCAB), np.float32)})


def test_an_engine_directory_generates(engine: Path) -> None:
    loaded = Engine.load(engine)
    events = list(loaded.generate([prompt([1, 2, 3])], GenerateParams(max_new_tokens=5)))
    assert isinstance(events[-1], FinishEvent)
    record = events[-1].record
    assert len(record.output_ids) == 5 or record.finish_reason == "eos"
    assert record.text is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cuda"}, "built for cpu"), ({"threads": 0}, "threads is 0")],
)
def test_the_error_names_missing_libraries(engine: Path, options: dict, message: str) -> None:
    with pytest.raises(UnsupportedHereError, match=message):
        Engine.load(engine, RuntimeSettings(**options))


def test_text_and_stop_strings_need_a_tokenizer(engine: Path) -> None:
    loaded = Engine.load(engine)
    from specbuild.runtime.request import Prompt

    with pytest.raises(RequestError, match="no tokenizer"):
        loaded.generate([Prompt("a", prompt="hello")], GenerateParams())
    with pytest.raises(RequestError, match="need a tokenizer"):
        loaded.generate([prompt([1])], GenerateParams(stop=("x",)))


def test_sessions_have_the_requested_threads() -> None:
    assert session_options(3).intra_op_num_threads == 3
