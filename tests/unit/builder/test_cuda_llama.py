"""A dense Llama is compiled for CUDA, with a draft and without; that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_draft
from llama_checkpoints import write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.files import read_manifest, verify_files
from specbuild.runtime.executors.cuda.check import read_plan

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_llama_compiles(tmp_path: Path, tied: bool, drafted: bool) -> None:
    write_llama(tmp_path / "model", tie_word_embeddings=tied, **SIZES)
    draft = tmp_path / "draft"
    if drafted:
        write_draft(
            draft, target_layers=2, target_hidden=64, target_vocab=64, hidden=64, draft_vocab=32,
            aux_layers=(0, 1), norm_before_fc=tied,
        )  # fmt: skip
    options = BuildOptions.from_flat(
        model=tmp_path / "model", draft=draft if drafted else None, output=tmp_path / "engine",
        backend="cuda", gpu="sm_90a", max_seq_len=64, max_batch_size=1, page_size=16,
    )  # fmt: skip
    report = build(options, SilentProgress())
    assert report.cuda is not None
    manifest = read_manifest(options.output)
    assert manifest.target.tied_head == tied and (manifest.draft is not None) == drafted
    plan = read_plan(options.output, manifest)
    assert plan.programs and plan.kernels
    verify_files(options.output, manifest)
