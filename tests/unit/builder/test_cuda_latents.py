"""Latent caches on the CUDA target: fused graphs against transformers, and interpreted steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from fused_graphs import fused_model, relative_error, run_graph, sequence
from latent_files import write_latents
from plan_host import PlanHost, lowered_engine

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.tuning.inputs import LaunchData, contexts_for
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.errors import SpecbuildError

# Full and sliding layers, widths that kernels pad, and a layer that caches keys and values.
DIMS = {0: 12, 1: 20, 3: 16}
WIDTHS = {0: 16, 1: 32, 3: 16}
PAGE, PAGES = 16, 8
TOLERANCE = 0.03  # relative, of a row of logits in bf16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent") / "target"
    write_target(path)
    write_draft(path.parent / "draft")
    write_latents(path, DIMS)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> LoweredEngine:
    return lowered_engine(
        model, model.parent / "draft", max_seq_len=128, max_batch_size=2, page_size=PAGE,
        draft_top_k=2, draft_depth=3, draft_tokens=5,
    )  # fmt: skip


@pytest.mark.slow
def test_fused_latents_equal_transformers(model: Path) -> None:
    graph = fused_model(model, page_size=PAGE).models["target"]
    ops = Counter(node.op_type for node in graph.graph)
    assert ops["RmsQueryLatent"] == ops["MlaAttention"] == len(DIMS)
    assert ops["RmsQkvRope"] == ops["PagedTreeAttention"] == 1
    reference = ReferenceTarget(model)
    checkpoint = read_target(model, strict=True)
    reference.use_latents(checkpoint.geometry.latent_dims, checkpoint.tensors)
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(5))
    expected = torch.from_numpy(reference.run(ids.numpy()).logits)
    pools = {
        port.name: torch.full(list(port.shape), torch.nan).bfloat16()
        for port in graph.graph.inputs
        if port.name.endswith("_pool")
    }
    assert {n: p.shape[3] for n, p in pools.items() if n.endswith("c_pool")} == {
        "latent_sliding.0.c_pool": 16,
        "latent.1.c_pool": 32,
        "latent.3.c_pool": 16,
    }
    logits = []
    for rows in (range(33), range(33, 34), range(34, 60)):  # chunks that split pages
        view = sequence(rows, PAGE, PAGES)
        feeds = {
            port.name: view[port.name.rpartition(".")[2]]
            for port in graph.graph.inputs
            if port.name.rpartition(".")[2] in view
        }
        feeds |= {
            "token_ids": ids[rows.start : rows.stop].int(),
            "positions": torch.arange(rows.start, rows.stop, dtype=torch.int32),
            "row_start": torch.tensor([0, len(rows)], dtype=torch.int32),
            "ancestor_bits": torch.zeros(len(rows), 1, dtype=torch.int32),
            "logit_rows": torch.arange(len(rows), dtype=torch.int32),
        }
        outputs = run_graph(graph, feeds | pools)
        pools = {n.removesuffix(".out"): v for n, v in outputs.items() if n.endswith(".out")}
        logits.append(outputs["logits"])
    error = relative_error(torch.cat(logits), expected)
    assert error.median() < TOLERANCE
    # If a row's router nearly ties, another expert may be selected.
    assert error.quantile(0.9) < 2 * TOLERANCE


def test_caches_have_one_latent_a_token(engine: LoweredEngine) -> None:
    groups = {group.name: group for group in engine.engine_sizes.target_groups}
    assert set(groups) == {"sliding", "latent", "latent_sliding"}
    assert groups["latent"].latent_widths == (WIDTHS[1], WIDTHS[3])
    assert groups["latent_sliding"].latent_widths == (WIDTHS[0],)
    held = {b.name: b.bytes for b in PlanHost(engine).plan.buffers if b.space == "cache"}
    for name, group in groups.items():
        per_token = sum(sum(group.pool_widths(i).values()) for i in group.layers) * group.kv_heads
        expected = group.pages * group.page_size * per_token * 2
        assert held[f"cache:{name}"] == expected == KvLayout(group).bytes


@pytest.mark.parametrize("program", ["draft-1-3-3", "draft-2-3-5"])
def test_drafts_change_no_token_of_latent_layers(engine: LoweredEngine, program: str) -> None:
    ids = torch.randint(3, 256, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    runs = []
    for name in ("step@1", f"step@1.{program}"):
        host = PlanHost(engine)
        host.admit(0, ids, 20)
        runs.append(host.generate(0, name, 20)[:20])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_tune_can_draw_the_launches_of_latent_layers(engine: LoweredEngine) -> None:
    lowered = next(program for entry, program in engine.programs if entry.name == "step@2")
    drawn = set()
    for call in lowered.ir.calls:
        if call.op.name not in ("MlaAttention", "RmsQueryLatent"):
            continue
        tensors = {name: tensor.info for name, tensor in call.tensors.items()}
        request = LoweringRequest(tensors, call.attributes)
        for context in contexts_for(request, 16):
            data = LaunchData(request, context, np.random.default_rng(1))
            arrays = data.arrays(list(call.inputs))
            for name, array in arrays.items():
                if not name.endswith("_pool"):
                    assert array.shape == call.inputs[name].shape
            assert arrays["c_pool"].shape[0] == data.pages
        drawn.add(call.op.name)
    assert drawn == {"MlaAttention", "RmsQueryLatent"}


def test_rejects_latents_that_kernels_do_not_support(model: Path) -> None:
    geometry = replace(read_target(model, strict=True).geometry, latent_dims=(0, 800, 0, 16))
    geometry = replace(geometry, hidden=64, q_heads=4, head_dim=16)
    with pytest.raises(SpecbuildError, match=r"up to 800 values .* up to 768; use a lower --rank"):
        require_cuda_support(geometry, None)


def test_views_with_latents_of_windowed_layers(tmp_path: Path) -> None:
    """SpecPV's steps re-verify tokens into the latent group and into keys and values."""
    write_target(tmp_path / "t")
    write_latents(tmp_path / "t", {0: 12, 2: 20})
    engine = lowered_engine(
        tmp_path / "t", None, max_seq_len=256, max_batch_size=1, page_size=PAGE,
        specpv=True, specpv_block_size=PAGE, specpv_n_sink_blocks=1,
        specpv_n_retrieval_blocks=2, specpv_n_window_blocks=1, specpv_n_spec_tokens_buf=20,
        specpv_partial_threshold=64, specpv_full_refresh_interval=4,
    )  # fmt: skip
    assert {g.name for g in engine.engine_sizes.target_groups} == {"full", "latent_sliding"}
    refresh = next(low for entry, low in engine.programs if entry.reverified)
    writes = {c.inputs["write_slot"] for c in refresh.ir.calls if c.op.name == "RmsQueryLatent"}
    (view,) = (c for c in refresh.ir.calls if c.op.name == "ViewInputs")
    assert {tensor.storage for tensor in writes} == {view.outputs["row_write_sliding"].storage}
