"""``specbuild bench modes``: engines of one checkpoint, built once and compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from command_line import Command
from indexer_files import write_derived_indexers
from latent_files import write_factors
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from specbuild.runtime.engine_dir.files import read_manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
RANK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its latents and indexers, a draft, a text, and a build file."""
    folder = tmp_path_factory.mktemp("modes")
    write_target(folder / "target", max_positions=4096)
    write_draft(folder / "draft")
    weights = folder / "target" / "model.safetensors"
    write_factors(folder / "target", weights, range(4), RANK)
    write_derived_indexers(folder / "target", weights, (1, 3), 16)
    np.save(folder / "ids.npy", np.random.default_rng(3).integers(3, 90, 220))
    (folder / "modes.yaml").write_text(
        f"model: {folder}/target\ndraft: {folder}/draft\nmax-seq-len: 256\nmax-batch-size: 1\n"
        "dsa-threshold: 90\ndsa-top-k: 16\nspecpv-partial-threshold: 90\n"
        "specpv-n-retrieval-blocks: 1\nspecpv-n-window-blocks: 1\nspecpv-n-sink-blocks: 1\n"
    )
    return folder


def arguments(folder: Path, modes: str, *more: object) -> tuple[object, ...]:
    """Return the arguments of a short run."""
    return (
        "bench", "modes", modes, "--build", folder / "modes.yaml", "--engines",
        folder / "engines", "--text", folder / "ids.npy", "--context", 40, "--context", 160,
        "--judged", 24, "--max-new-tokens", 12, "--rounds", 1, *more,
    )  # fmt: skip


@pytest.mark.slow
def test_modes_report_the_sizes_of_their_engines(command: Command, checkpoint: Path) -> None:
    picture = checkpoint / "modes.svg"
    modes = "base,eagle3,specpv,mla,dsa,mla+dsa"
    result = command(*arguments(checkpoint, modes, "--plot", picture, "--json"))
    assert result.code == 0, result.err
    (report,) = result.records
    assert [m["title"] for m in report["modes"]] == [
        "base", "EAGLE3", "+ SpecPV", "+ MLA", "+ DSA", "+ MLA + DSA",
    ]  # fmt: skip
    assert all(mode["built"] for mode in report["modes"])
    manifests = {
        m["mode"]: read_manifest(checkpoint / "engines" / m["mode"]) for m in report["modes"]
    }
    assert [m for m in manifests if manifests[m].draft is None] == ["base"]
    assert [m for m in manifests if manifests[m].specpv] == ["specpv"]
    assert [m for m in manifests if manifests[m].dsa] == ["dsa", "mla+dsa"]
    assert [m for m in manifests if any(manifests[m].target.latent_dims)] == ["mla", "mla+dsa"]
    caches = {m["mode"]: m["cache_bytes_per_token"] for m in report["modes"]}
    assert caches["mla"] < caches["eagle3"] < caches["dsa"] and caches["base"] < caches["eagle3"]
    rows = {(r["mode"], r["context"]): r for r in report["rows"]}
    assert len(rows) == len(report["rows"]) == 12
    for context in (40, 160):
        base = rows["base", context]
        assert (base["agreement"], base["over_first"], base["tokens_per_step"]) == (1, 1, 1)
        # The draft does not change the perplexity, nor does a lossy mode below its threshold.
        same = ["eagle3", "specpv", "dsa"] if context == 40 else ["eagle3"]
        for mode in same:
            assert rows[mode, context]["perplexity"] == pytest.approx(base["perplexity"], rel=1e-5)
            assert rows[mode, context]["agreement"] == 1
    assert rows["mla", 40]["perplexity"] != pytest.approx(rows["base", 40]["perplexity"], rel=1e-5)
    assert "<svg" in picture.read_text()
    ids = torch.from_numpy(np.load(checkpoint / "ids.npy"))[None, : 160 + 24]
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "target", dtype=torch.float32).float()
    with torch.no_grad():
        logits = model(ids).logits[0, 159:-1].double()
    loss = F.cross_entropy(logits, ids[0, 160:])
    assert rows["base", 160]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.slow
def test_engines_are_reused_until_the_checkpoint_changes(
    command: Command, checkpoint: Path
) -> None:
    folder = checkpoint.parent / "changing"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("engines"))
    text = (folder / "modes.yaml").read_text().replace(str(checkpoint), str(folder))
    (folder / "modes.yaml").write_text(text)

    def built(modes: str) -> list[bool]:
        result = command(*arguments(folder, modes, "--json"))
        assert result.code == 0, result.err
        return [mode["built"] for mode in result.records[0]["modes"]]

    assert built("base") == [True]
    assert built("base,eagle3") == [False, True]
    write_draft(folder / "draft", seed=9)
    assert built("base,eagle3") == [False, True]
    (folder / "modes.yaml").write_text(text.replace("max-seq-len: 256", "max-seq-len: 240"))
    rebuilt = command(*arguments(folder, "eagle3"))
    assert rebuilt.code == 0 and "building eagle3" in rebuilt.err
    assert "after 160 tokens" in rebuilt.out and "cache bytes per token" in rebuilt.out


def test_reports_an_impossible_comparison_in_one_line(command: Command, checkpoint: Path) -> None:
    folder = checkpoint.parent / "bare"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("engines", "mla_kv*"))
    text = (folder / "modes.yaml").read_text().replace(str(checkpoint), str(folder))
    (folder / "modes.yaml").write_text(text)
    for words, message in (
        (arguments(folder, "base,eagle4"), "MODES got 'eagle4'"),
        (arguments(folder, "base+mla"), "MODES got 'base+mla'"),
        (arguments(folder, "mla,mla"), "a mode is named twice"),
        (arguments(folder, "mla+dsa"), "no mla_kv.safetensors"),
        (arguments(folder, "base", "--context", 250), "the engines take 256"),
        (arguments(folder, "base", "--context", 215), "--text"),
        (arguments(folder, "base", "--no-spec"), "No such option"),
        (("bench", "modes", "base"), "--build"),
    ):
        result = command(*words)
        assert result.code == 2 and message in result.err, result.err
        assert "internal" not in result.err
    (folder / "modes.yaml").write_text(text.replace("draft:", "max-rows:"))
    assert "max_rows" in command(*arguments(folder, "base")).err
    (folder / "modes.yaml").write_text(f"model: {folder}/target\n")
    assert "give the build file a draft" in command(*arguments(folder, "eagle3")).err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_loss_of_each_mode_on_the_example_is_within_its_limit(
    command: Command, tmp_path: Path
) -> None:
    """Perplexity of each mode on held-out text of the corpus, with the example's weights."""
    shutil.copytree(EXAMPLE / "target", tmp_path / "target")
    for heads in ("mla-32", "dsa"):
        for file in (EXAMPLE / heads).glob("*.safetensors"):
            shutil.copy(file, tmp_path / "target")
    (tmp_path / "modes.yaml").write_text(
        f"model: {tmp_path}/target\ndraft: {EXAMPLE}/draft\nmax-seq-len: 2048\n"
        "max-batch-size: 1\ndsa-threshold: 512\ndsa-top-k: 256\nspecpv-partial-threshold: 512\n"
        "specpv-n-retrieval-blocks: 16\n"
    )
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text() + (EXAMPLE / "train_target.py").read_text())
    result = command(
        "bench", "modes", "base,eagle3,specpv,mla,dsa,mla+dsa",
        "--build", tmp_path / "modes.yaml", "--engines", tmp_path / "engines", "--text", text,
        "--context", 256, "--context", 1024,
        "--judged", 128, "--max-new-tokens", 64, "--rounds", 3, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = {(r["mode"], r["context"]): r for r in result.records[0]["rows"]}
    for context in (256, 1024):
        base = rows["base", context]
        assert rows["eagle3", context]["agreement"] == 1
        # The default draft depends on costs that are measured on this machine.
        assert rows["eagle3", context]["tokens_per_step"] >= 1
        for mode in ("specpv", "mla", "dsa", "mla+dsa"):
            assert rows[mode, context]["perplexity"] < 1.3 * base["perplexity"]
            assert rows[mode, context]["agreement"] > 0.6
