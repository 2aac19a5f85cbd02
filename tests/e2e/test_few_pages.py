"""An engine with fewer pages than its sequences could need, and page 0, which is never read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Command

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

# A sequence of 96 tokens and its tree needs 7 pages of 16.
PAGES = 9
# A masked key has weight 0: the product with NaN would be NaN, with a finite value it is 0.
POISON = 1e30


@pytest.fixture(scope="module")
def engine_directory(
    tmp_path_factory: pytest.TempPathFactory, text_target: Path, text_draft: Path
) -> Path:
    output = tmp_path_factory.mktemp("few") / "engine"
    options = BuildOptions(
        model=text_target,
        draft=text_draft,
        output=output,
        limits=LimitOptions(max_seq_len=96, max_batch_size=4, kv_pages=PAGES),
        drafting=DraftOptions(top_k=4, depth=4, tokens=12),
    )
    build(options, SilentProgress())
    return output


def records_of(engine: Engine, speculation: DraftShape | None) -> list[RunRecord]:
    """Return the records of prompts of several lengths, more than fit into the pages at once."""
    random = np.random.default_rng(5)
    lengths = (3, 20, 12, 1, 9, 33)
    prompts = [Prompt(str(n), prompt_ids=tuple(random.integers(4, 250, n))) for n in lengths]
    params = GenerateParams(max_new_tokens=50, ignore_eos=True)
    found = engine.generate(prompts, params, speculation=speculation)
    records = {e.request: e.record for e in found if isinstance(e, FinishEvent)}
    return [records[i] for i in range(len(prompts))]


def outputs(engine: Engine) -> list[tuple[int, ...]]:
    """Return the outputs with the engine's default draft."""
    return [record.output_ids for record in records_of(engine, engine.manifest.draft_default)]


def test_few_pages_change_no_token(engine_directory: Path, tiny_engine: Path) -> None:
    few, whole = Engine.load(engine_directory), Engine.load(tiny_engine)
    assert {g.name: g.pages for g in few.manifest.cache_groups if not g.window} == {
        "full": PAGES + 1,
        "draft": PAGES + 1,
    }
    assert outputs(few) == outputs(whole)


@pytest.mark.parametrize("speculation", [None, DraftShape(4, 4, 12)])
def test_pages_on_demand_change_no_token(
    engine_directory: Path, speculation: DraftShape | None
) -> None:
    """Near ties may be resolved differently; these prompts have none."""
    reserved = Engine.load(engine_directory)
    engine = Engine.load(engine_directory, RuntimeSettings(kv_policy="max-utilization"))
    found = records_of(engine, speculation)
    assert sum(record.stats.preemptions for record in found) > 0
    wanted = records_of(reserved, speculation)
    assert [r.output_ids for r in found] == [r.output_ids for r in wanted]


def test_page_0_is_never_read(engine_directory: Path) -> None:
    """Page 0 has values that would corrupt every sum."""
    engine = Engine.load(engine_directory)
    clean = outputs(engine)
    executor = engine.executor
    assert isinstance(executor, CpuExecutor) and executor.pools
    for name, pool in executor.pools.items():
        axes = engine.manifest.group(name.partition(".")[0]).pool_axes
        np.moveaxis(pool.numpy(), axes.index("pages"), 0)[0] = POISON
    assert outputs(engine) == clean


def test_inspect_shows_the_capacity_of_the_caches(engine_directory: Path, command: Command) -> None:
    shown = command("inspect", engine_directory, "--json")
    facts = json.loads(shown.out)["cache_capacity"]
    assert facts["groups"]["full"] == {"pages": PAGES, "tokens": 16 * PAGES}
    assert facts["sequences"] == [{"tokens": 96, "guaranteed_no_evict": 1, "max_utilization": 2}]
    shown = command("inspect", engine_directory).out
    assert "guaranteed-no-evict" in shown and "max-utilization" in shown
    report = json.loads((engine_directory / "build_report.json").read_text())
    assert report["caches"] == facts


def test_run_accepts_kv_policy(engine_directory: Path, command: Command) -> None:
    lines = [json.dumps({"id": str(n), "prompt_ids": [n + 4] * 12}) for n in range(4)]
    prompts = engine_directory.parent / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    arguments = ("run", engine_directory, "--prompts", prompts, "--ignore-eos", "--no-spec")
    longer = (*arguments, "--max-new-tokens", 50)
    reserved = command(*longer, "--json")
    given = command(*longer, "--json", "--kv-policy", "max-utilization")
    each = [[json.loads(line) for line in r.out.splitlines()] for r in (reserved, given)]
    assert [r["output_ids"] for r in each[0]] == [r["output_ids"] for r in each[1]]
    assert [r["stats"]["preemptions"] for r in each[0]] == [0] * 4
    assert sum(r["stats"]["preemptions"] for r in each[1]) > 0
    assert "preempt" in command(*longer, "--kv-policy", "max-utilization").err
    assert command(*arguments, "--kv-policy", "fifo").code == 2


def test_the_command_line_accepts_units_of_memory(
    tmp_path: Path, command: Command, text_target: Path
) -> None:
    arguments = ("build", "--model", text_target, "--output", tmp_path / "e", "--max-seq-len", 64)
    refused = command(*arguments, "--kv-memory", "1KiB")
    assert refused.code == 2
    assert (
        "the caches of one sequence of 64 tokens, and a page for each of 4, take 0.3 MiB"
        in refused.err
    )
    assert "4GiB" in command(*arguments, "--kv-memory", "plenty").err
