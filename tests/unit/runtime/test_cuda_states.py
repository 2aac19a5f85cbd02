"""Recurrent states in the device loop: snapshots and preemption, with the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeGpu
from llama_checkpoints import VOCAB, write_llama
from plan_host import lowered_engine
from qwen_predictors import add_qwen_predictor
from test_cuda_interpreted import CHAIN, TREE, InterpretedRunner, engine_of
from toy_engine import run

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.runtime.cache.state_layout import state_layout
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.cache_groups import slot_bytes
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import UnsupportedHereError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.executors.cuda.state_copies import DeviceStateCopies
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import RuntimeSettings

TOKENS, PAGE = 12, 16
SHAPES = [None, CHAIN, TREE]
# The references of products round by the number of rows, unlike the kernels.
NEAR = 0.05


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    """Return the programs of a random Qwen3.5 with its MTP layer."""
    path = tmp_path_factory.mktemp("hybrid") / "model"
    write_llama(
        path, "qwen3_5_text", num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16,
    )  # fmt: skip
    add_qwen_predictor(path, like=1)
    return lowered_engine(
        path, Path("mtp"), max_seq_len=288, max_batch_size=2, page_size=PAGE, kv_pages=24,
        draft_top_k=2, draft_depth=2, draft_tokens=4,
    )  # fmt: skip


def loaded(
    lowered: LoweredEngine, settings: RuntimeSettings | None = None
) -> tuple[Engine, InterpretedRunner]:
    """Return an engine with these programs and settings."""
    engine, runner = engine_of(lowered, state_groups=lowered.engine_sizes.states)
    if settings is not None:
        engine = Engine(engine.manifest, engine.executor, settings)
    return engine, runner


def caching(lowered: LoweredEngine, snapshots: int) -> tuple[Engine, InterpretedRunner]:
    """Return an engine with memory for this number of snapshots."""
    (group,) = lowered.engine_sizes.states
    settings = RuntimeSettings(
        prefix_caching="on",
        state_snapshot_memory=snapshots * slot_bytes(group),
        state_snapshot_interval=64,
    )
    return loaded(lowered, settings)


def prompt(length: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=["none", "chain", "tree"])
@pytest.mark.parametrize(("length", "cached"), [(65, 64), (150, 128), (200, 192)])
def test_a_prompt_resumes_at_its_last_snapshot(
    lowered: LoweredEngine, length: int, cached: int, shape: DraftShape | None
) -> None:
    """The tokens are those of a cold run, also if other requests used the rows and slots before."""
    engine, runner = caching(lowered, 8)
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    (cold,) = run(engine, [prompt(length)], params, speculation=shape).records
    # They leave rows to replay in the rows and slots that the next run uses.
    run(engine, [prompt(20, 1), prompt(30, 2)], params, speculation=CHAIN)
    runner.started.clear()
    (hit,) = run(engine, [prompt(length)], params, speculation=shape).records
    assert (cold.stats.cached_tokens, hit.stats.cached_tokens) == (0, cached)
    assert [name for name in runner.started if name.startswith("prefill")] == ["prefill@64"]
    assert hit.output_ids == cold.output_ids
    assert cold.logprobs is not None and hit.logprobs is not None
    np.testing.assert_allclose(cold.logprobs, hit.logprobs, atol=NEAR)
    assert engine.prefixes is not None
    engine.prefixes.check_integrity()


def test_the_memory_of_evicted_snapshots_is_reused(lowered: LoweredEngine) -> None:
    engine, _ = caching(lowered, 2)
    params = GenerateParams(max_new_tokens=2, ignore_eos=True)
    cold = {seed: run(loaded(lowered)[0], [prompt(150, seed)], params).ids[0] for seed in range(3)}
    for seed in (0, 1, 2, 0, 0, 1):
        assert run(engine, [prompt(150, seed)], params).ids[0] == cold[seed]
        assert engine.prefixes is not None
        engine.prefixes.check_integrity()
    statistics = engine.prefixes.statistics
    assert statistics.hits > 0 and statistics.evicted_snapshots > 0
    assert statistics.state_snapshots - statistics.evicted_snapshots <= 2


@pytest.mark.parametrize("shape", SHAPES, ids=["none", "chain", "tree"])
def test_preemption_does_not_change_tokens_of_a_sequence(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    """Two sequences together need more pages than there are."""
    params = GenerateParams(max_new_tokens=50, ignore_eos=True)
    ids = [prompt(150, 3), prompt(140, 4)]
    alone = [run(loaded(lowered)[0], [each], params, speculation=shape).ids[0] for each in ids]
    engine, _ = loaded(lowered, RuntimeSettings(kv_policy="max-utilization"))
    found = run(engine, ids, params, speculation=shape)
    assert sum(record.stats.preemptions for record in found.records) > 0
    for tokens, expected in zip(found.ids, alone, strict=True):
        assert tokens[:10] == expected[:10]


def test_a_copy_has_the_state_and_the_inputs_of_its_slot(lowered: LoweredEngine) -> None:
    """Slot s is entry s − 1 of every pool. Other slots do not change."""
    (group,) = lowered.engine_sizes.states
    layout, gpu = state_layout(group, lowered.engine_sizes.limits), FakeGpu()
    stream, address = gpu.new_stream(), gpu.allocate(layout.bytes)
    memory = gpu.view(address, layout.bytes)
    random = np.random.default_rng(2)
    memory[:] = random.integers(0, 256, layout.bytes, np.uint8)
    first = memory.copy()
    copies = DeviceStateCopies(gpu, stream, address, layout, 2)
    saved = copies.save(1)
    gpu.synchronize(stream)
    memory[:] = random.integers(0, 256, layout.bytes, np.uint8)
    expected = memory.copy()
    for pool in layout.pools:
        size = int(np.prod(pool.shape[1:])) * (4 if pool.dtype == "float32" else 2)
        kept = {"state": size, "tail": size * group.tail // pool.shape[1], "factor": 0}
        part = kept[pool.name.rpartition(".")[2].removesuffix("_pool")]
        target = pool.offset + size
        expected[target : target + part] = first[pool.offset : pool.offset + part]
    copies.restore(saved, 2)
    gpu.synchronize(stream)
    np.testing.assert_array_equal(memory, expected)
    copies.discard(saved)
    assert {copies.save(1), copies.save(2)} == {0, 1}
    copies.close()


def test_prefix_caching_requires_memory_for_snapshots(lowered: LoweredEngine) -> None:
    engine, _ = loaded(lowered)
    assert isinstance(engine.executor, CudaExecutor)
    settings = RuntimeSettings(prefix_caching="on", state_snapshot_memory=0)
    with pytest.raises(UnsupportedHereError, match=r"no prefix cache .* state_snapshot_memory"):
        Engine(engine.manifest, engine.executor, settings)
    default = Engine(engine.manifest, engine.executor, RuntimeSettings(prefix_caching="auto"))
    assert default.prefixes is not None and default.prefixes.snapshots is not None
