"""Latent caches on the CUDA target: fused graphs against transformers, and interpreted steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoints import write_draft, write_target
from fused_graphs import fused_model, relative_error, run_graph, sequence
from latent_files import write_latents
from plan_host import PlanHost, lowered_engine

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.checkpoint.target import read_target
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.runtime.kv_layout import KvLayout

# Full and sliding layers, widths that kernels widen, and a layer that keeps keys and values.
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
def test_fused_latents_compute_what_transformers_computes(model: Path) -> None:
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
    # A row whose router is nearly undecided may take another expert.
    assert error.quantile(0.9) < 2 * TOLERANCE


def test_caches_hold_a_latent_a_token(engine: LoweredEngine) -> None:
    groups = {group.name: group for group in engine.plan.target_groups}
    assert set(groups) == {"sliding", "latent", "latent_sliding"}
    assert groups["latent"].latent_widths == (WIDTHS[1], WIDTHS[3])
    assert groups["latent_sliding"].latent_widths == (WIDTHS[0],)
    held = {b.name: b.bytes for b in PlanHost(engine).plan.buffers if b.space == "cache"}
    for name, group in groups.items():
        per_token = sum(sum(group.pool_widths(i).values()) for i in group.layers) * group.kv_heads
        wanted = group.pages * group.page_size * per_token * 2
        assert held[f"cache:{name}"] == wanted == KvLayout(group).bytes


@pytest.mark.parametrize("program", ["draft-1-3-3", "draft-2-3-5"])
def test_no_draft_changes_a_token_of_latent_layers(engine: LoweredEngine, program: str) -> None:
    ids = torch.randint(3, 256, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    runs = []
    for name in ("step@1", f"step@1.{program}"):
        host = PlanHost(engine)
        host.admit(0, ids, 20)
        runs.append(host.generate(0, name, 20)[:20])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
