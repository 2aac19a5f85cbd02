"""Training with CUDA graphs: equal to single launches, also when resumed, in half the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_engine import EXAMPLE
from safetensors.torch import load_file

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.heads import run as loop
from specbuild.builder.training.heads.graphed import GraphedLearning
from specbuild.builder.training.heads.learning import Learning
from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.builder.training.heads.output import HeadReport
from specbuild.builder.training.heads.train_indexers import train_indexers
from specbuild.builder.training.heads.train_latents import train_latents
from specbuild.builder.training.objective import Batch

LATENTS = EXAMPLE / "mla-32" / "mla_kv.safetensors"
Options = LatentTraining | IndexerTraining


class Notes(SilentProgress):
    """Progress that stores its notes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        """Store a message."""
        self.said.append(message)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def options_of(tmp_path: Path) -> Callable[[str], Options]:
    """Return options for training the example model, with two micro batches a step."""
    model, text = tmp_path / "model", tmp_path / "ids.npy"
    model.mkdir()
    for file in [*(EXAMPLE / "target").iterdir(), LATENTS]:
        (model / file.name).symlink_to(file)
    np.save(text, np.random.default_rng(0).zipf(1.3, 20000) % 4000 + 3)
    shared: dict[str, Any] = {"texts": (text,), "batch_size": 4, "micro_batch_size": 2}
    shared |= {"sequence_length": 256, "device": "cuda", "held_out_fraction": 0.0}
    shared |= {"stored_dtype": "float32", "learning_rate": 2e-3}

    def make(kind: str) -> Options:
        if kind == "mla":
            return LatentTraining(
                model=EXAMPLE / "target", initial=LATENTS, lora_rank=8, steps=6,
                losses=(("logits-kl", 1.0), ("hidden-mse", 0.1)), output=tmp_path / kind, **shared,
            )  # fmt: skip
        return IndexerTraining(
            model=model, heads=2, width=32, top_k=(32,), first_tokens=2, recent_tokens=16, steps=3,
            joint_steps=3, joint_learning_rate=2e-3, output=tmp_path / kind, **shared,
        )  # fmt: skip

    return make


def trained(options: Options) -> tuple[HeadReport, dict[str, torch.Tensor], list[str]]:
    """Return the report, the tensors of all files, and the notes."""
    notes = Notes()
    if isinstance(options, LatentTraining):
        report = train_latents(options, notes)
    else:
        report = train_indexers(options, notes)
    files = sorted(options.output.glob("*.safetensors"))
    assert files
    return report, {n: t for file in files for n, t in load_file(file).items()}, notes.said


def launched_one_by_one(message: list[str]) -> list[str]:
    return [note for note in message if "kernel by kernel" in note]


def assert_alike(one: Any, two: Any) -> None:
    """Compare up to the order in which fused attention adds gradients, which varies."""
    for expected, result in zip(one[0].losses, two[0].losses, strict=True):
        assert result.total == pytest.approx(expected.total, rel=1e-3)
        assert result.terms == pytest.approx(expected.terms, rel=1e-3)
    assert one[1].keys() == two[1].keys()
    for name, value in one[1].items():
        assert (two[1][name] - value).norm() < 1e-3 * value.norm(), name


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_training_with_graphs_equals_single_launches(
    options_of: Callable[[str], Options], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = []
    replay = GraphedLearning.__call__

    def counted(graphed: GraphedLearning, rows: Batch) -> torch.Tensor:
        replays.append(rows)
        return replay(graphed, rows)

    monkeypatch.setattr(GraphedLearning, "__call__", counted)
    result = trained(options_of(kind))
    assert launched_one_by_one(result[2]) == []
    assert len(replays) == 1 + 6 * 2  # one by the trial for the estimate
    monkeypatch.setattr(loop, "may_replay", lambda *_: False)
    expected = trained(replace(options_of(kind), output=options_of(kind).output.with_name("eager")))
    assert len(replays) == 1 + 6 * 2
    assert len(expected[0].losses) == 6
    assert_alike(expected, result)


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_resumed_training_with_graphs_is_equal(
    options_of: Callable[[str], Options], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop after the fifth step; the fourth is the last saved one."""
    whole = trained(options_of(kind))
    options = replace(
        options_of(kind), output=options_of(kind).output.with_name("parts"), save_every=4
    )
    step = loop._step

    def until_killed(run: Any, *others: Any) -> torch.Tensor:
        if run.step == 5:
            raise KeyboardInterrupt
        return step(run, *others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_step", until_killed)
        with pytest.raises(KeyboardInterrupt):
            trained(options)
    parts = trained(replace(options, resume=True))
    assert launched_one_by_one(parts[2]) == []
    assert_alike(whole, parts)


def test_steps_without_a_graph_are_launched_and_reported(
    options_of: Callable[[str], Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note appears once, though the stage runs twice, for the estimate and the training."""
    learn = Learning.__call__

    def waiting(learning: Learning, rows: Batch) -> torch.Tensor:
        result = learn(learning, rows)
        assert result.isfinite().all()
        return result

    replayed = trained(options_of("mla"))
    monkeypatch.setattr(Learning, "__call__", waiting)
    launched = trained(
        replace(options_of("mla"), output=options_of("mla").output.with_name("waiting"))
    )
    assert len(launched_one_by_one(launched[2])) == 1
    assert_alike(launched, replayed)


@pytest.mark.speed
def test_a_step_with_graphs_takes_half_the_time(
    options_of: Callable[[str], Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure full steps, including the optimizer, of 32 sequences of 512 tokens in bf16."""
    options = replace(
        options_of("mla"), batch_size=32, micro_batch_size=None, sequence_length=512,
        dtype="bfloat16", steps=12, losses=(("logits-kl", 1.0),),
    )  # fmt: skip
    times_s: list[float] = []
    step = loop._step

    def timed(*given: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        result = step(*given)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
        return result

    monkeypatch.setattr(loop, "_step", timed)
    medians_s = []
    for name in ("replayed", "launched"):
        monkeypatch.setattr(loop, "may_replay", lambda *_, alike=name == "replayed": alike)
        times_s.clear()
        report, *_ = trained(replace(options, output=options.output.with_name(name)))
        medians_s.append(statistics.median(times_s[4:]))
        print(f"{name}: {medians_s[-1] * 1e3:.1f} ms a step, planned {report.plan.step_s:.4f} s")
    assert medians_s[0] < 0.5 * medians_s[1]
