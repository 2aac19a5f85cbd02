"""Synthetic engines with indexers (DSA): greedy text does not depend on selected tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from synthetic_models import (
    CHAIN,
    MAX_SEQ_LEN,
    PROMPTS,
    run,
    successors,
    tiny,
    written_prompts,
)

from specbuild.builder.options import BuildOptions, DsaOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.synth import build_engine, prompts_beside
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest


@pytest.mark.slow
def test_layers_with_indexers_select_tokens(tmp_path: Path) -> None:
    model = tiny(0.7, indexer=16, unique_layers=2)
    options = BuildOptions(
        Path("tiny"),
        tmp_path / "e",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=PROMPTS),
        dsa=DsaOptions(top_k=4, threshold=4, recent_tokens=9),
    )
    build_engine(model, options, SilentProgress())
    manifest = read_manifest(options.output)
    assert manifest.target.indexer is not None and manifest.target.indexer.layers == (1, 3)
    assert {g.name for g in manifest.cache_groups} == {"full", "sliding", "indexer", "draft"}
    target, _ = successors(model)
    for record in run(
        Engine.load(options.output), written_prompts(prompts_beside(options.output)), CHAIN
    ):
        sequence = (record.prompt_ids[-1], *record.output_ids)
        assert all(target[a] == b for a, b in itertools.pairwise(sequence))
        assert record.stats.dsa is not None
        assert record.stats.dsa.narrowed_steps + record.stats.dsa.checked_steps > 0
