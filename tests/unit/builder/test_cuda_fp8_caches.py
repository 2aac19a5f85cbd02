"""``--kv-dtype fp8`` in CUDA plans, interpreted on the CPU: contents of caches, and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_pair
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.plugins_cuda.kv_write.codes import as_codes
from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.engine_dir.manifest import DraftShape

TREE = DraftShape(2, 2, 4)
PROMPT = np.random.default_rng(8).integers(3, 256, 40).tolist()
TOKENS = 16
# Unlike the kernels, the references round differently with the number of rows.
NEAR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    write_pair(path)
    return path


def lowered(folder: Path, draft: DraftShape | None = None, **changes: Any) -> LoweredEngine:
    sizes: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 2, "page_size": 16}
    if draft is not None:
        sizes |= vars(draft)
    path = folder / "draft" if draft else None
    return lowered_engine(folder / "target", path, **sizes, **changes)


def first_layer(host: PlanHost) -> dict[str, torch.Tensor]:
    """Return the pools of layer 0, by part, without page 0."""
    group = next(g for g in host.engine.engine_sizes.groups if 0 in g.layers)
    layout = KvLayout(group)
    memory = host.memory.buffer(layout.name)
    dtype = torch.uint8 if group.coded else torch.bfloat16
    by_key = {}
    for pool in layout.pools:
        if pool.layer == 0:
            size = int(np.prod(pool.shape)) * dtype.itemsize
            held = memory[pool.offset : pool.offset + size].view(dtype)
            by_key[pool.part] = held.view(pool.shape)[1:]
    return by_key


def test_caches_need_half_the_memory_and_store_rounded_values(folder: Path) -> None:
    """Compare layer 0, whose input is equal, bit for bit."""
    hosts = [PlanHost(lowered(folder, kv_dtype=dtype)) for dtype in ("fp8", None)]
    half, whole = (
        {b.name: b.bytes for b in host.plan.buffers if b.space == "cache"} for host in hosts
    )
    assert {name: 2 * size for name, size in half.items()} == whole
    assert set(half) == {"cache:full", "cache:sliding"}
    for host in hosts:
        host.give_pages(0)
        host.score(0, PROMPT)
    coded, wide = map(first_layer, hosts)
    assert set(coded) == {"k", "v"}
    for part, pool in coded.items():
        assert pool.any()
        assert torch.equal(pool, as_codes(wide[part])), part


@pytest.mark.slow
def test_a_draft_changes_no_token(folder: Path) -> None:
    """Rejected rows are overwritten, and accepted ones are copied as stored."""
    engine = lowered(folder, TREE, kv_dtype="fp8")
    assert all(group.coded for group in engine.engine_sizes.groups)
    plain, drafted = (tokens(engine, shape) for shape in (None, TREE))
    at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
    if at is None:
        return
    host = PlanHost(engine)
    host.give_pages(0)
    logits = host.score(0, [*PROMPT, *plain[:at]])[-1]
    assert abs(logits[plain[at]] - logits[drafted[at]]) < NEAR


def tokens(engine: LoweredEngine, shape: DraftShape | None) -> list[int]:
    host = PlanHost(engine)
    host.port("ignore_eos").fill_(1)
    first, _ = host.admit(0, PROMPT, TOKENS)
    return [first, *host.generate(0, step_name(1, shape), TOKENS - 1)][:TOKENS]
