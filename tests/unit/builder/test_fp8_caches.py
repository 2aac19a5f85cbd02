"""``--kv-dtype fp8``: a CPU engine whose keys and values are e4m3."""

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


def built(model: Path, output: Path, **changes: Any) -> Path:
    sizes = {"max_seq_len": 128, "kv_dtype": "fp8"} | changes
    build(BuildOptions.from_flat(model=model, output=output, **sizes), SilentProgress())
    return output


def scored(engine: Path) -> np.ndarray:
    """Return the logits [T, V] after every token."""
    rows = Engine.load(engine).decoder.score(TOKENS)
    return np.concatenate([part.logits for part in rows])


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Round every value to the nearest number of e4m3."""
    grid = torch.tensor([*(-x for x in E4M3[:0:-1]), *E4M3])
    return grid[(values.unsqueeze(-1) - grid).abs().argmin(-1)]


class RoundedCache(DynamicCache):
    """A cache of transformers that rounds keys and values."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().update(nearest(keys), nearest(values), *rest, **named)


def test_logits_equal_transformers_with_a_rounded_cache(tmp_path: Path) -> None:
    """The engine processes a prompt of 60 tokens in pages of 16."""
    write_llama(tmp_path / "model")
    result = scored(built(tmp_path / "model", tmp_path / "fp8"))
    reference_model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    ).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        expected = reference_model(ids, past_key_values=RoundedCache()).logits[0].numpy()
        exact = reference_model(ids).logits[0].numpy()
    np.testing.assert_allclose(result, expected, atol=1e-3)
    assert np.abs(result - exact).max() > 10 * np.abs(result - expected).max()


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-OSS with windows, and a draft; all caches are fp8."""
    folder = tmp_path_factory.mktemp("drafted")
    write_target(folder / "model", vocab=32)
    write_draft(folder / "draft", target_vocab=32, draft_vocab=32)
    return built(folder / "model", folder / "engine", draft=folder / "draft")


@pytest.mark.parametrize("shape", [DraftShape(1, 3, 3), DraftShape(4, 3, 12)], ids=str)
def test_a_draft_changes_no_token(drafted: Path, shape: DraftShape) -> None:
    """Accepted tokens of a tree are copied as stored."""
    plain, _ = sampled_outputs(drafted, None)
    result, accepted = sampled_outputs(drafted, shape)
    assert result == plain
    assert accepted > 0


def test_caches_need_a_quarter_of_the_memory(
    drafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    arguments = ["--prompts", str(drafted.parent / "p.jsonl"), "--max-new-tokens", "2"]
    assert main(["run", str(drafted), *arguments]) == 0
    assert "keys and values: fp8 (lossy)" in capsys.readouterr().err


def test_logits_differ_from_transformers_with_an_exact_cache(drafted: Path) -> None:
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
def test_rejects_features_that_do_not_read_fp8_caches(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_target(tmp_path / "model")
    write_draft(tmp_path / "draft")
    with pytest.raises(SpecbuildError, match=message):
        built(tmp_path / "model", tmp_path / "engine", draft=tmp_path / "draft", **changes)


def test_rejects_latents(tmp_path: Path) -> None:
    write_target(tmp_path / "later")
    write_latents(tmp_path / "later", {1: 16})
    write_deepseek(tmp_path / "made")
    for model in ("later", "made"):
        with pytest.raises(SpecbuildError, match="the cache group latent holds latents"):
            built(tmp_path / model, tmp_path / "engine")
    built(tmp_path / "later", tmp_path / "engine", no_mla=True)
