"""``train mla`` and ``train dsa`` from text to files, on a tiny random target."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_target
from latent_files import write_latents
from left_out import slow
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.heads import run as loop
from specbuild.builder.training.heads import session
from specbuild.builder.training.heads.learning import Learning
from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.builder.training.heads.train_indexers import train_indexers
from specbuild.builder.training.heads.train_latents import train_latents
from specbuild.builder.training.objective import Batch
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.cli.main import main
from specbuild.runtime.errors import SpecbuildError

FILES = ["mla_kv.safetensors", "training_losses.svg", "training_report.json"]
VOCAB = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target"
    write_target(path, layers=2, hidden=32, q_heads=2, kv_heads=1, head_dim=16, vocab=VOCAB)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = np.random.default_rng(0).zipf(1.4, 3000) % 60 + 3
    path = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(path, ids)
    return path


def latent_options(model: Path, text: Path, output: Path, **changes: Any) -> LatentTraining:
    values = {"steps": 12, "batch_size": 4, "sequence_length": 24, "rank": 8, "save_every": 5}
    values |= {"learning_rate": 3e-3, "held_out_fraction": 0.1}
    return LatentTraining(model=model, texts=(text,), output=output, **(values | changes))


def indexer_options(model: Path, text: Path, output: Path, **changes: Any) -> IndexerTraining:
    values = {"steps": 12, "batch_size": 4, "sequence_length": 32, "heads": 2, "width": 8}
    values |= {"top_k": (4, 8), "first_tokens": 1, "recent_tokens": 3, "learning_rate": 1e-2}
    return IndexerTraining(model=model, texts=(text,), output=output, **(values | changes))


def test_training_reduces_the_error_of_latents(model: Path, text: Path, tmp_path: Path) -> None:
    """An engine with the latents and adapted outputs gives the results of their definition."""
    losses = (("logits-kl", 1.0), ("hidden-mse", 0.1))
    write_latents(tmp_path, {0: 8, 1: 8}, hidden=32, kv_width=16)
    options = latent_options(
        model, text, tmp_path / "out", steps=30, learning_rate=1e-2, losses=losses, lora_rank=2,
        initial=tmp_path / FILES[0], rank=None, held_out=(text,), stored_dtype="float32",
        micro_batch_size=2,
    )  # fmt: skip
    report = train_latents(options, SilentProgress())
    assert report.finished and report.steps == 30
    for name, _ in losses:  # Several batches, since they differ.
        values = [point.terms[name] for point in report.losses]
        assert np.mean(values[-5:]) < 0.9 * np.mean(values[:3]), name
    assert report.plan.trained_parameters == 2 * ((32 + 2 * 16) * 8 + 2 * (32 + 32))
    assert report.plan.tokens == 30 * 4 * 24 and report.plan.step_s > 0
    assert 0 < report.plan.activation_bytes < 1 << 24
    assert sorted(p.name for p in options.output.iterdir()) == FILES
    written = (options.output / "training_report.json").read_text()
    assert str(tmp_path) not in written and json.loads(written)["steps"] == 30
    with_latents = tmp_path / "model"
    with_latents.mkdir()
    for file in [*model.iterdir(), options.output / FILES[0]]:
        (with_latents / file.name).symlink_to(file)
    build(
        BuildOptions(
            model=with_latents, output=tmp_path / "e", limits=LimitOptions(max_seq_len=64)
        ),
        SilentProgress(),
    )
    ids = np.random.default_rng(1).integers(3, VOCAB, 40)
    with EngineProbe(tmp_path / "e").sequence(41) as sequence:
        logits = sequence.extend("target", {"token_ids": ids.astype(np.int32)})["logits"]
    target = read_target(with_latents, strict=True)
    reference = ReferenceTarget(model)
    reference.use_latents(target.geometry.latent_dims, target.tensors)
    np.testing.assert_allclose(logits, reference.run(ids).logits, atol=3e-4, rtol=1e-4)


def interrupted(make: Any, options: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run until an interruption after ``steps`` steps, then resume."""
    clock = iter([0.0] * (steps + 1) + [1000.0] * 100)
    with monkeypatch.context() as patched:
        patched.setattr(loop.time, "monotonic", lambda: next(clock))
        begun = replace(options, time_limit_s=100.0, resume=False, finish=False)
        stopped = make(begun, SilentProgress())
    assert not stopped.finished and 0 < stopped.steps <= steps
    assert not options.output.exists()
    return make(replace(options, resume=True), SilentProgress())


def test_resumed_training_of_latents_has_equal_bits(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption is between two saves and between two points of the curve."""
    whole = latent_options(model, text, tmp_path / "whole", steps=8, dtype="bfloat16", lora_rank=2)
    parts = replace(whole, output=tmp_path / "parts")
    one = train_latents(whole, SilentProgress())
    two = interrupted(train_latents, parts, 3, monkeypatch)
    assert one.losses == two.losses and one.perplexities == two.perplexities
    files = [output / FILES[0] for output in (whole.output, parts.output)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not parts.output.with_name("parts.training").exists()
    ended = replace(whole, output=tmp_path / "ended", resume=True, finish=True)
    report = interrupted(train_latents, ended, 3, monkeypatch)
    assert report.finished and report.steps == 3
    assert load_file(ended.output / FILES[0]).keys() == load_file(files[0]).keys()
    assert (ended.output / FILES[0]).read_bytes() != files[0].read_bytes()


def test_training_of_indexers_then_of_both(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage does not change the latents, the second one does.

    The run is resumed in it.
    """
    own = tmp_path / "model"
    own.mkdir()
    for file in model.iterdir():
        (own / file.name).symlink_to(file)
    before = write_latents(own, {1: 24}, hidden=32, kv_width=16)
    whole = indexer_options(own, text, tmp_path / "whole", joint_steps=4, held_out=(text,))
    whole = replace(whole, joint_learning_rate=1e-2)
    report = train_indexers(whole, SilentProgress())
    assert list(report.perplexities) == ["model", "latents", "top 4", "top 8"]
    assert {point.stage for point in report.losses} == {"indexers", "both"}
    falling = [p.terms["attention-kl"] for p in report.losses if p.stage == "indexers"]
    assert falling[-1] < 0.9 * falling[0]
    stored = load_file(whole.output / "dsa_indexer.safetensors")
    name = "model.layers.1.self_attn."
    shapes = {n.removeprefix(name): list(t.shape) for n, t in stored.items()}
    assert shapes == {"dsa_W_q": [32, 16], "dsa_W_k": [32, 8], "dsa_W_h": [32, 2]}
    after = load_file(whole.output / "mla_kv.safetensors")
    files = (before, after)
    products = [f[f"{name}mla_W_c"].float() @ f[f"{name}mla_W_k_lat"].float() for f in files]
    assert 0.001 < (products[0] - products[1]).norm() / products[0].norm() < 0.5
    parts = replace(whole, output=tmp_path / "parts")
    assert interrupted(train_indexers, parts, 14, monkeypatch).losses == report.losses
    for file in ("dsa_indexer.safetensors", "mla_kv.safetensors"):
        assert (whole.output / file).read_bytes() == (parts.output / file).read_bytes()


def test_training_an_indexer_by_logits(model: Path, text: Path, tmp_path: Path) -> None:
    """Use relaxed selection, on the only sequence that the text is long enough for."""
    np.save(tmp_path / "ids.npy", np.load(text)[:32])
    options = indexer_options(
        model, tmp_path / "ids.npy", tmp_path / "out", losses=(("logits-kl", 1.0),), heads=1,
        steps=30, held_out_fraction=0.0,
    )  # fmt: skip
    report = train_indexers(options, SilentProgress())
    assert report.losses[-1].total < 0.8 * report.losses[0].total and report.perplexities == {}
    stored = load_file(options.output / "dsa_indexer.safetensors")
    assert sorted(n.split(".")[-1] for n in stored) == ["dsa_W_k", "dsa_W_q"]


class Waits(TorchDispatchMode):
    """Collect operators that block the host: reads of values, copies, tensors of Python numbers."""

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.all: set[str] = set()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        chosen = "index" in name and any(
            x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None
        )
        self.all.add(name)
        if (
            name.startswith((*self.READING, "lift_fresh"))
            or name == "repeat_interleave.Tensor"
            or chosen
            or len({x.device for x in tensors}) > 1
        ):
            self.found.add(name)
        return out


class SeenError(Exception):
    """Ends a training after its observed micro batch."""


STAGES = {
    "latents": ("mla", {"losses": (("logits-kl", 1.0), ("hidden-mse", 0.1)), "lora_rank": 2}),
    "logits": (
        "mla",
        {"losses": (("logits-mse", 1.0), ("long-logits-l2", 0.1)), "long_context": 8},
    ),
    "indexers": ("dsa", {}),
    "relaxed": ("dsa", {"losses": (("logits-kl", 1.0),)}),
    "both": ("dsa", {"joint_steps": 1}),
    "both relaxed": ("dsa", {"joint_steps": 1, "joint_losses": (("logits-kl", 1.0),)}),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_training_step_never_blocks_the_host(
    model: Path,
    text: Path,
    tmp_path: Path,
    stage: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph cannot capture such operators; the meta device fails if a value is read."""
    own = tmp_path / "model"
    shutil.copytree(model, own)
    write_latents(own, {0: 8, 1: 8}, hidden=32, kv_width=16)
    kind, changes = STAGES[stage]
    changes = changes | {"steps": 1, "sequence_length": 32}
    make, options = {
        "mla": (train_latents, latent_options), "dsa": (train_indexers, indexer_options)
    }[kind]  # fmt: skip
    waits = Waits()

    def watched(learning: Learning, rows: Batch) -> torch.Tensor:
        if learning.stage.name != ("both" if "joint_steps" in changes else learning.stage.name):
            return learn(learning, rows)
        learning.backbone.model.to(device)
        rows = Batch(rows.ids.to(device), rows.counted.to(device))
        with waits, monkeypatch.context() as patched:
            patched.setattr(torch, "get_rng_state", lambda: waits.found.add("get_rng_state"))
            learn(learning, rows)
        raise SeenError

    learn = Learning.__call__
    monkeypatch.setattr(Learning, "__call__", watched)
    with pytest.raises(SeenError):
        make(options(own, text, tmp_path / "out", **changes), SilentProgress())
    assert any("backward" in name for name in waits.all)
    assert waits.found == set()


def _one_of_two(rank: int, port: int, make: Any, options: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    make(options, SilentProgress())


@pytest.mark.parametrize("kind", ["dsa", *slow("mla")])
def test_two_processes_give_the_result_of_one(
    model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    """Shard the layers and halve the rows: sums differ in their order only."""
    make, options, name = {
        "mla": (train_latents, latent_options, FILES[0]),
        "dsa": (train_indexers, indexer_options, "dsa_indexer.safetensors"),
    }[kind]
    changes = {"steps": 3, "stored_dtype": "float32", "checkpointing": True}
    alone = options(model, text, tmp_path / "alone", **changes)
    report = make(alone, SilentProgress())
    together = replace(alone, output=tmp_path / "together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_one_of_two, args=(rank, port, make, together)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    expected, result = (load_file(o.output / name) for o in (alone, together))
    for tensor, value in expected.items():
        torch.testing.assert_close(result[tensor], value, atol=2e-5, rtol=1e-4)
    actual = json.loads((together.output / "training_report.json").read_text())
    assert actual["plan"]["processes"] == 2
    assert actual["plan"]["backbone_bytes"] < 0.8 * report.plan.backbone_bytes
    for one, two in zip(report.losses, actual["losses"], strict=True):
        assert two["total"] == pytest.approx(one.total, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": None}, "expected either --rank, or --initial"),
        ({"rank": 33}, "--rank 33: .* have rank 32 at most"),
        ({"losses": (("logits-k", 1.0),)}, "--loss logits-k: expected each term once, of "),
        ({"losses": (("attention-kl", 1.0),)}, "trains indexers"),
        ({"losses": (("long-logits-l2", 1.0),)}, "never reach the context of 8192"),
        ({"losses": (("logits-kl", 0.0),)}, "the weight of logits-kl is 0.0, expected above 0"),
        ({"hidden_layers": (2,), "losses": (("hidden-mse", 1.0),)}, "the model has no layer 2"),
        ({"sequence_length": 4000}, "tokens"),
        ({"learning_rate": 1e30}, "lower --learning-rate"),
        ({"layers": "1-2"}, "--layers 1-2: 1-2 is not within 0-1"),
        ({"held_out": (Path("no.npy"),)}, "no.npy: no such file"),
    ],
)
def test_rejects_invalid_options_of_latents(
    model: Path, text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        train_latents(latent_options(model, text, tmp_path / "out", **changes), SilentProgress())
    assert not any(tmp_path.iterdir())


def test_processes_have_equal_shares_of_a_batch(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one process would wait for the other in a layer that the other does not reach."""
    left: list[bool] = []
    three = SimpleNamespace(count=3, leads=True, leave=lambda: left.append(True))
    monkeypatch.setattr(session.Workers, "joined", lambda _: three)
    with pytest.raises(SpecbuildError, match="--batch-size 4 is not a multiple of the 3 processes"):
        train_latents(latent_options(model, text, tmp_path / "out"), SilentProgress())
    assert not any(tmp_path.iterdir())


def test_indexers_can_be_trained_if_the_config_requests_them(
    model: Path, text: Path, tmp_path: Path
) -> None:
    asking = tmp_path / "asking"
    shutil.copytree(model, asking)
    config = json.loads((asking / "config.json").read_text())
    config["attention"] = {"enable_dsa_indexer": True}
    (asking / "config.json").write_text(json.dumps(config))
    options = indexer_options(asking, text, tmp_path / "out", steps=1, top_k=(4,))
    assert train_indexers(options, SilentProgress()).finished
    options = latent_options(asking, text, tmp_path / "latents", steps=1)
    assert train_latents(options, SilentProgress()).finished


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "0"}, "layer 0 attends to a window only; use .* layers: 1"),
        ({"joint_steps": 2}, "has no mla_kv.safetensors, whose latents"),
        ({"top_k": (40,)}, "--top-k 40: selects all tokens of sequences of 32"),
        ({"top_k": ()}, "--top-k: got"),
        ({"heads": 0}, "heads is 0, expected 1 or more"),
    ],
)
def test_rejects_invalid_options_of_indexers(
    model: Path, text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        train_indexers(indexer_options(model, text, tmp_path / "out", **changes), SilentProgress())
    assert not list(tmp_path.iterdir())


def test_the_command_prints_its_estimate_first(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "dsa", "--model", str(model), "--text", str(text), "--steps", "2"]
    words += ["--output", str(tmp_path / "out"), "--sequence-length", "32", "--top-k", "4,8"]
    words += ["--first-tokens", "1", "--recent-tokens", "3", "--heads", "2", "--width", "8"]
    assert main(words) == 0
    output = capsys.readouterr().err
    estimate = output.index("estimate: 832 parameters to train")
    assert estimate < output.index("training: 2 steps")
    assert "device-hours" in output and "perplexity, top 8" in output
    assert main(words) == 2
    assert "the output exists" in capsys.readouterr().err
