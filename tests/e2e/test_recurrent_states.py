"""Engines with recurrent states: requests join, leave and are preempted, and no token changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft
from command_line import Command
from llama_checkpoints import HIDDEN, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions, SpecPvOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, StateGroup
from specbuild.runtime.errors import RequestError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

TREE, CHAIN = DraftShape(4, 3, 12), DraftShape(1, 3, 3)
BATCH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3.5, a random draft, and their engine with few pages."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    write_llama(folder / "model", "qwen3_5_text")
    write_draft(
        folder / "draft", target_layers=4, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    build(options_of(folder), SilentProgress())
    return folder


def options_of(folder: Path, **changes: object) -> BuildOptions:
    limits = LimitOptions(max_seq_len=96, max_batch_size=BATCH, kv_pages=9)
    drafting = DraftOptions(top_k=4, depth=3, tokens=12)
    arguments = {"draft": folder / "draft", "output": folder / "engine", **changes}
    return BuildOptions(model=folder / "model", limits=limits, drafting=drafting, **arguments)


def states_of(engine: Engine) -> tuple[StateGroup, dict[str, np.ndarray]]:
    """Return the cache group, and its pools by name."""
    (group,), executor = engine.manifest.state_groups, engine.executor
    assert isinstance(executor, CpuExecutor)
    return group, {
        name: pool.numpy()
        for name, pool in executor.pools.items()
        if name.startswith(f"{group.name}.")
    }


def records_of(
    engine: Engine, shape: DraftShape | None, *, temperature: float = 0.0
) -> list[RunRecord]:
    """Return the records of prompts of several lengths, more than run at once."""
    random = np.random.default_rng(5)
    lengths = (3, 20, 12, 1, 9, 33)
    prompts = [Prompt(str(n), prompt_ids=tuple(random.integers(2, VOCAB, n))) for n in lengths]
    sampling = SamplingParams(temperature=temperature, seed=3)
    params = GenerateParams(max_new_tokens=50, ignore_eos=True, sampling=sampling)
    events = engine.generate(prompts, params, speculation=shape)
    records = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [records[i] for i in range(len(prompts))]


def ids_of(records: list[RunRecord]) -> list[tuple[int, ...]]:
    return [record.output_ids for record in records]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_preemptions_change_no_token(folder: Path, temperature: float) -> None:
    reserved = Engine.load(folder / "engine")
    plain = ids_of(records_of(reserved, None, temperature=temperature))
    on_demand = Engine.load(folder / "engine", RuntimeSettings(kv_policy="max-utilization"))
    preemptions = accepted = 0
    for engine in (reserved, on_demand):
        for shape in (None, CHAIN, TREE):
            records = records_of(engine, shape, temperature=temperature)
            assert ids_of(records) == plain, shape
            preemptions += sum(record.stats.preemptions for record in records)
            steps = sum(record.stats.steps for record in records)
            accepted += sum(map(len, plain)) - len(plain) - steps
    assert preemptions > 0 and accepted > 0


def test_each_sequence_releases_its_slot(folder: Path) -> None:
    engine = Engine.load(folder / "engine")
    stream = engine.generate([Prompt("one", prompt_ids=(3, 4))], speculation=TREE)
    next(iter(stream))
    pool = engine._kv.pools["recurrent"]
    assert pool.free_pages == BATCH - 1
    stream.close()
    assert pool.free_pages == BATCH
    records_of(engine, TREE)
    assert pool.free_pages == BATCH


def test_the_zero_slot_stays_zero_and_the_discarded_one_is_not_read(folder: Path) -> None:
    engine = Engine.load(folder / "engine")
    plain = ids_of(records_of(engine, TREE))
    group, pools = states_of(engine)
    for pool in pools.values():
        assert not pool[0].any()
        assert pool[group.discarded].any()
        pool[group.discarded] = np.nan
    assert ids_of(records_of(engine, TREE)) == plain


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_state_after_drafted_steps_equals_plain_steps(folder: Path, shape: DraftShape) -> None:
    """The results are equal up to the rounding of ONNX Runtime's products of several rows."""
    results = []
    for speculation in (None, shape):
        engine = Engine.load(folder / "engine")
        params = GenerateParams(max_new_tokens=60, ignore_eos=True)
        prompt = Prompt("one", prompt_ids=(5, 9, 2, 17))
        (end,) = (
            event
            for event in engine.generate([prompt], params, speculation=speculation)
            if isinstance(event, FinishEvent)
        )
        _, pools = states_of(engine)
        results.append((end.record.output_ids, {name: pool[1] for name, pool in pools.items()}))
    (plain_ids, plain), (ids, drafted) = results
    assert ids == plain_ids
    for name, expected in plain.items():
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(drafted[name], expected, atol=2e-5)


def test_suffix_decoding_changes_no_token(folder: Path, tmp_path: Path) -> None:
    options = BuildOptions.from_flat(
        model=folder / "model", output=tmp_path / "engine", drafter="suffix", max_seq_len=192,
        suffix_max_tokens=8, suffix_min_token_prob=0.0,
    )  # fmt: skip
    build(options, SilentProgress())
    engine, outputs = Engine.load(options.output), []
    params = GenerateParams(max_new_tokens=120, ignore_eos=True)
    for drafter in ("none", "suffix"):
        prompt = Prompt("one", prompt_ids=(4, 9, 2, 7) * 5)
        (end,) = (
            event
            for event in engine.generate([prompt], params, drafter=drafter)
            if isinstance(event, FinishEvent)
        )
        outputs.append(end.record.output_ids)
        steps = end.record.stats.steps
    assert outputs[0] == outputs[1]
    assert steps < len(outputs[0]) - 1


def test_inspect_shows_the_states(folder: Path, command: Command) -> None:
    facts = json.loads(command("inspect", folder / "engine", "--json").out)
    # Four heads of 8 × 8 in fp32, and three inputs of 64 channels, in each of three layers.
    slot = 3 * (4 * 8 * 8 + 3 * 64) * 4
    memory = facts["predicted_memory"]
    assert memory["slot_bytes"] == {"recurrent": slot}
    assert memory["state_bytes"] == {"recurrent": (BATCH + 2) * slot}
    text = command("inspect", folder / "engine").out
    assert "recurrent states" in text and "4 × 8×8" in text and str(slot) in text
    larger = command("inspect", folder / "engine", "--max-batch-size", 9, "--json").out
    memory = json.loads(larger)["predicted_memory"]
    assert memory["state_bytes"] == {"recurrent": 11 * slot}


def test_tensorrt_rejects_states(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = options_of(folder, output=tmp_path / "engine", backend="tensorrt-rtx")
    with pytest.raises(SpecbuildError, match=r"3 layers with a recurrent state.*TensorRT"):
        build(options, SilentProgress())


def test_commands_without_support_for_states_reject_them(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with pytest.raises(
        SpecbuildError, match=r"states have keys of 8, CUDA kernels take multiples of 16"
    ):
        build(options_of(folder, output=output, backend="cuda"), SilentProgress())
    with pytest.raises(SpecbuildError, match=r"--specpv: .* a recurrent state"):
        specpv = SpecPvOptions(enabled=True)
        build(options_of(folder, output=output, specpv=specpv), SilentProgress())


def test_prefix_caching_requires_memory_for_snapshots(folder: Path) -> None:
    with pytest.raises(UnsupportedHereError, match=r"no prefix cache .* state_snapshot_memory"):
        Engine.load(folder / "engine", RuntimeSettings(prefix_caching="on"))
    assert Engine.load(folder / "engine", RuntimeSettings(prefix_caching="auto")).prefixes is None
    for changes, message in (
        ({"state_snapshot_interval": 100}, "must be a multiple of 64"),
        ({"state_snapshot_interval": 0}, "must be a multiple of 64"),
        ({"state_snapshot_memory": -1}, "must be 0 or above"),
    ):
        with pytest.raises(RequestError, match=message):
            RuntimeSettings(**changes)
