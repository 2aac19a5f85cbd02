"""Small random models on two ranks, against transformers, one GPU, and other batches.

With one GPU, both ranks run on it. Drafts, other sequences and chunk boundaries change no bit, as
on one GPU.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import test_dense_gpu as dense
import torch
from dense_models import build_dense
from example_engine import CHAIN, TREE, build_example, on_gpu, outputs, records
from rank_engines import example_token_prompts, on_ranks
from test_transformers_gpu import check_errors, near_tie, scores

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams

pytestmark = pytest.mark.timeout(600)

GEOMETRIES = (
    "llama, heads of 64", "qwen3, heads of 128", "qwen3_moe, mxfp4", "qwen3_moe, bf16",
    "llama, biases, as many KV heads",
)  # fmt: skip
# The width of a dense layer, with full blocks on both ranks.
INNER = 576


@dataclass(frozen=True)
class Model:
    """A checkpoint, its engine on two ranks, and the folder of the engine for one GPU."""

    path: Path
    geometry: str
    engine: Engine


@pytest.fixture(scope="module", params=GEOMETRIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("ranks")
    path, output = build_dense(folder, request.param, inner=INNER, tensor_parallel=2)
    with on_ranks(output) as engine:
        yield Model(path, request.param, engine)


def test_the_error_of_scores_is_that_of_bf16(model: Model) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    greedy = GenerateParams(max_new_tokens=dense.TOKENS, ignore_eos=True)
    (record,) = records(model.engine, dense.prompts()[1:2], greedy, None)
    ids = (*(dense.prompts()[1].prompt_ids or ()), *record.output_ids)
    expected = dense.forward(model.path, ids)
    check_errors(scores(model.engine, expected), expected)
    rows = np.arange(dense.LENGTHS[1] - 1, len(ids) - 1)
    chosen = np.array(record.output_ids)
    lost = expected.fp32[rows].max(axis=1) - expected.fp32[rows, chosen]
    assert lost.max() < near_tie(expected)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_and_other_sequences_change_no_bit(model: Model, shape: DraftShape) -> None:
    plain = dense.alone(model.engine, None)
    together = records(model.engine, dense.prompts(), dense.params(), None)
    assert outputs(together) == plain
    assert dense.alone(model.engine, shape) == plain


def test_scores_equal_one_gpu_up_to_rounding(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, output = build_dense(tmp_path_factory.mktemp("one"), model.geometry, inner=INNER)
    ids = tuple(int(t) for t in np.random.default_rng(3).integers(3, dense.VOCAB, 200))
    actual = np.concatenate([scored.logits for scored in model.engine.decoder.score(ids)])
    with on_gpu(output) as engine:
        desired = np.concatenate([scored.logits for scored in engine.decoder.score(ids)])
    expected = dense.forward(model.path, ids)
    error = [np.sqrt(np.square(result - expected.fp32).mean()) for result in (actual, desired)]
    # Both round at the same points; only the order of sums over K differs.
    assert error[0] < 1.3 * error[1] + 1e-4
    same = (actual.argmax(axis=1) == desired.argmax(axis=1)).mean()
    assert same > 0.9


def test_the_draft_changes_no_bit_of_the_example(tmp_path: Path) -> None:
    """Use MXFP4 experts, sinks and windows, and a draft whose tokens are often accepted."""
    output = build_example(tmp_path / "engine", tensor_parallel=2)
    prompts = example_token_prompts(4)
    greedy = GenerateParams(max_new_tokens=48, ignore_eos=True)
    with on_ranks(output) as engine:
        plain = records(engine, prompts, greedy, None)
        drafted = records(engine, prompts, greedy, TREE)
        assert outputs(drafted) == outputs(plain)
        assert sum(r.stats.mean_acceptance_length for r in drafted) > 1.5 * len(prompts)
    with on_gpu(build_example(tmp_path / "one")) as engine:
        alone = records(engine, prompts, greedy, None)
    # Sums have another order: the texts are equal up to a near tie.
    agreed = [
        next(
            (i for i, (a, b) in enumerate(zip(x.output_ids, y.output_ids, strict=True)) if a != b),
            48,
        )
        for x, y in zip(plain, alone, strict=True)
    ]
    assert sum(agreed) > 24 * len(prompts)


# A step with a fault between the launches of two ranks; a kernel waits at most ``limit_ms``.
_FAULT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from rank_engines import example_token_prompts, on_ranks
from example_engine import outputs, records
from specbuild.runtime.request import GenerateParams

def tokens():
    params = GenerateParams(max_new_tokens=4)
    return outputs(records(engine, example_token_prompts(1), params, None))

def stop(entry):
    executor.ranks[1].runner.start = start
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # the main thread receives the signal and stops this thread a little later
    start(entry)

with on_ranks(Path({engine!r})) as engine:
    executor = engine.executor
    executor.fill("exchange.limit_ms", {limit_ms})
    wanted = tokens()
    start = executor.ranks[1].runner.start
    executor.ranks[1].runner.start = {fault}
    try:
        assert tokens() == wanted
        print("all tokens", flush=True)
    except Exception as error:
        print("error:", error, flush=True)
        os._exit(3)
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's engine on two ranks."""
    return build_example(tmp_path_factory.mktemp("example") / "engine", tensor_parallel=2)


def fault(engine: Path, kind: str, limit_ms: int, stopped_s: float = 0.0) -> tuple[int, str, float]:
    """Return a process's exit code and output, and the seconds from its fault to its end."""
    code = _FAULT.format(path=sys.path, engine=str(engine), limit_ms=limit_ms, fault=kind)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        if stopped_s:
            while Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert run.poll() is None
                time.sleep(0.05)
            time.sleep(stopped_s)
            run.send_signal(signal.SIGCONT)
        continued = time.monotonic()
        output, _ = run.communicate(timeout=60)
    return run.returncode, output, time.monotonic() - continued


def test_a_rank_that_is_never_launched_ends_the_process(example: Path) -> None:
    code, output, _ = fault(example, "lambda entry: None", 1500)
    assert code == 3
    assert "GPU 0 waited" in output
    assert "for GPU 1 in exchange 0 of prefill" in output


def test_a_stop_shorter_than_the_limit_changes_no_token(example: Path) -> None:
    code, output, _ = fault(example, "stop", 8000, stopped_s=2.0)
    assert (code, output) == (0, "all tokens\n")


def test_a_stop_longer_than_the_limit_ends_the_process(example: Path) -> None:
    code, output, seconds = fault(example, "stop", 1000, stopped_s=4.0)
    assert code == 3
    assert "GPU 0 waited" in output
    assert seconds < 25
