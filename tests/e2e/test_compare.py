"""``specbuild compare``: two engines on one text, against the losses of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_target
from command_line import Command
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress

LENGTH = 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random models with equal sizes."""
    folder = tmp_path_factory.mktemp("two")
    for i in (0, 1):
        write_target(folder / f"target{i}", seed=i)
    return folder / "target0", folder / "target1"


@pytest.fixture(scope="module")
def engines(checkpoints: tuple[Path, Path]) -> tuple[Path, Path]:
    """The engines of both models."""
    built = []
    for checkpoint in checkpoints:
        output = checkpoint.parent / f"engine-{checkpoint.name}"
        limits = LimitOptions(max_seq_len=64)
        build(BuildOptions(model=checkpoint, output=output, limits=limits), SilentProgress())
        built.append(output)
    return built[0], built[1]


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    """A file with three rows of ids."""
    file = tmp_path / "ids.npy"
    np.save(file, np.random.default_rng(5).integers(3, 90, (3, LENGTH)))
    return file


def test_losses_equal_those_of_transformers(
    command: Command,
    checkpoints: tuple[Path, Path],
    engines: tuple[Path, Path],
    ids_file: Path,
) -> None:
    context = 5
    result = command(
        "compare", *engines, "--text", ids_file, "--length", LENGTH, "--context", context,
        "--max-new-tokens", 4, "--rounds", 1, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    (report,) = result.records
    ids = torch.from_numpy(np.load(ids_file))
    logits = []
    for checkpoint in checkpoints:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).float()
        with torch.no_grad():
            logits.append(model(ids).logits[:, context:-1].double().flatten(0, 1))
    following = ids[:, context + 1 :].flatten()
    losses = [F.cross_entropy(rows, following) for rows in logits]
    p, q = (rows.log_softmax(-1) for rows in logits)
    divergence = (p.exp() * (p - q)).sum(-1)
    fidelity = report["fidelity"]
    assert fidelity["tokens"] == len(following) == sum(b["rows"] for b in report["by_position"])
    assert fidelity["perplexity"] == pytest.approx(losses[0].exp().item(), rel=1e-4)
    assert fidelity["perplexity_other"] == pytest.approx(losses[1].exp().item(), rel=1e-4)
    assert fidelity["divergence"] == pytest.approx(divergence.mean().item(), rel=1e-3)
    agree = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert fidelity["agreement"] == pytest.approx(agree)
    assert report["speed_ratio"] > 0 and report["reference"]["tokens_per_s"] > 0


def test_an_engine_equals_itself(
    command: Command, engines: tuple[Path, Path], ids_file: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "divergence.svg"
    result = command(
        "compare", engines[0], engines[0], "--text", ids_file, "--length", LENGTH,
        "--max-new-tokens", 0, "--plot", picture,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "100.00 %" in result.out and "1.00000 ± 0.00000" in result.out
    assert "<svg" in picture.read_text()


def test_reports_an_impossible_comparison_in_one_line(
    command: Command, engines: tuple[Path, Path], tiny_engine: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words")
    outside = tmp_path / "outside.npy"
    np.save(outside, np.array([1, 10**6]))
    few = tmp_path / "few.npy"
    np.save(few, np.array([3, 4, 5, 6]))
    floats = tmp_path / "floats.npy"
    np.save(floats, np.zeros(4))
    pickled = tmp_path / "pickled.npy"
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    for arguments, words in (
        ((*engines, "--text", text), "no tokenizer"),
        ((*engines, "--text", outside), "outside the vocabulary"),
        ((*engines, "--text", floats), "whole numbers"),
        ((*engines, "--text", pickled), "cannot be read"),
        ((*engines, "--text", tmp_path / "none.txt"), "cannot be read"),
        ((*engines, "--text", outside, "--length", 65), "64 tokens at most"),
        ((*engines, "--text", few, "--context", 3), "two tokens behind a context of 3"),
        ((engines[0], tiny_engine, "--text", text), "vocabularies"),
    ):
        result = command("compare", *arguments)
        assert result.code == 2, result.err
        assert words in result.err and "\n" not in result.err.strip()
