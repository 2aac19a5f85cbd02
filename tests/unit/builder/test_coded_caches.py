"""``--kv-dtype fp8``: a CPU engine whose keys and values are e4m3 codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from deepseek_checkpoints import write_deepseek
from drafted_outputs import sampled_outputs
from latent_files import write_latents
from llama_checkpoints import VOCAB, write_llama
from mx_rounding import E4M3
from transformers import AutoModelForCausalLM, DynamicCache

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.cli.compare.measurement import lossy_names
from specbuild.cli.main import main
from specbuild.runtime.device import pool_bytes
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

TOKENS = tuple(np.random.default_rng(2).integers(3, VOCAB, 60).tolist())


def built(model: Path, output: Path, **asked: Any) -> Path:
    sizes = {"max_seq_len": 128, "kv_dtype": "fp8"} | asked
    build(BuildOptions.from_flat(model=model, output=output, **sizes), SilentProgress())
    return output


def scored(engine: Path) -> np.ndarray:
    """Logits [T, V] behind every token."""
    rows = Engine.load(engine).decoder.score(TOKENS)
    return np.concatenate([part.logits for part in rows])


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Every value as the number of e4m3 that is nearest to it."""
    grid = torch.tensor([*(-x for x in E4M3[:0:-1]), *E4M3])
    return grid[(values.unsqueeze(-1) - grid).abs().argmin(-1)]


class RoundedCache(DynamicCache):
    """What transformers attends to, rounded as it is kept."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().update(nearest(keys), nearest(values), *rest, **named)


def test_logits_are_transformers_over_a_rounded_cache(tmp_path: Path) -> None:
    """The engine reads prompts of 60 tokens in pages of 16."""
    write_llama(tmp_path / "model")
    found = scored(built(tmp_path / "model", tmp_path / "fp8"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        wanted = theirs(ids, past_key_values=RoundedCache()).logits[0].numpy()
        exact = theirs(ids).logits[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    assert np.abs(found - exact).max() > 10 * np.abs(found - wanted).max()


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-OSS with windows, and a draft, all caches in fp8."""
    folder = tmp_path_factory.mktemp("drafted")
    write_target(folder / "model", vocab=32)
    write_draft(folder / "draft", target_vocab=32, draft_vocab=32)
    return built(folder / "model", folder / "engine", draft=folder / "draft")


@pytest.mark.parametrize("shape", [DraftShape(1, 3, 3), DraftShape(4, 3, 12)], ids=str)
def test_a_draft_changes_no_token(drafted: Path, shape: DraftShape) -> None:
    """Codes of a tree move to where they are committed, as they are."""
    plain, _ = sampled_outputs(drafted, None)
    found, accepted = sampled_outputs(drafted, shape)
    assert found == plain
    assert accepted > 0


def test_caches_take_a_quarter(drafted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(drafted)
    wide = {g.name: g for g in read_manifest(wide_engine(drafted)).cache_groups}
    assert set(wide) == {"full", "sliding", "draft"}
    for group in manifest.cache_groups:
        assert 4 * pool_bytes(group) == pool_bytes(wide[group.name])
    engine = Engine.load(drafted)
    engine.executor.prepare(["target", "draft"])
    assert {pool.numpy().dtype for pool in engine.executor.pools.values()} == {np.dtype("uint8")}
    assert manifest.lossy_groups == ("full", "sliding")
    assert lossy_names(manifest) == ("fp8 caches",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        assert main(["inspect", str(drafted)]) == 0
    assert "float8_e4m3fn (lossy)" in capsys.readouterr().out
    (drafted.parent / "p.jsonl").write_text('{"id": "a", "prompt_ids": [5, 6]}\n')
    asked = ["--prompts", str(drafted.parent / "p.jsonl"), "--max-new-tokens", "2"]
    assert main(["run", str(drafted), *asked]) == 0
    assert "keys and values: fp8 (lossy)" in capsys.readouterr().err


def test_it_is_not_what_transformers_computes(drafted: Path) -> None:
    with pytest.raises(SpecbuildError, match="hold it against an exact engine with compare"):
        verify_engine(drafted, drafted.parent / "model", None, SilentProgress())


def wide_engine(drafted: Path) -> Path:
    folder = drafted.parent
    output = folder / "wide"
    return built(folder / "model", output, draft=folder / "draft", kv_dtype=None)


SPECPV = {
    "specpv": True, "specpv_partial_threshold": 96, "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 1, "specpv_n_window_blocks": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "cuda"}, "full has heads of 16, but CUDA kernels support 32, 64, 96, 128"),
        (SPECPV, "SpecPV scores blocks by keys that are not quantized"),
        ({**SPECPV, "backend": "cuda"}, "select SpecPV's blocks by bf16 keys"),
    ],
)
def test_what_reads_no_codes_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_target(tmp_path / "model")
    write_draft(tmp_path / "draft")
    with pytest.raises(SpecbuildError, match=message):
        built(tmp_path / "model", tmp_path / "engine", draft=tmp_path / "draft", **changes)


def test_latents_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "later")
    write_latents(tmp_path / "later", {1: 16})
    write_deepseek(tmp_path / "made")
    for model in ("later", "made"):
        with pytest.raises(SpecbuildError, match="the cache group latent holds latents"):
            built(tmp_path / model, tmp_path / "engine")
    built(tmp_path / "later", tmp_path / "engine", no_mla=True)
