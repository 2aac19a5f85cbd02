"""An engine with fewer pages than its sequences could need, and a page 0 that nobody reads."""

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
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

# A sequence of 96 tokens and its tree takes 7 pages of 16.
PAGES = 9
# A key that is masked weighs 0: NaN would stay, what is finite does not.
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


def outputs(engine: Engine) -> list[tuple[int, ...]]:
    """Of prompts of several lengths, more of them than pages hold at once."""
    random = np.random.default_rng(5)
    lengths = (3, 40, 17, 1, 60, 9, 33)
    prompts = [Prompt(str(n), prompt_ids=tuple(random.integers(4, 250, n))) for n in lengths]
    params = GenerateParams(max_new_tokens=24, ignore_eos=True)
    found = engine.generate(prompts, params, speculation=engine.manifest.draft_default)
    records = {e.request: e.record for e in found if isinstance(e, FinishEvent)}
    return [records[i].output_ids for i in range(len(prompts))]


def test_few_pages_change_no_token(engine_directory: Path, tiny_engine: Path) -> None:
    few, whole = Engine.load(engine_directory), Engine.load(tiny_engine)
    assert {g.name: g.pages for g in few.manifest.cache_groups if not g.window} == {
        "full": PAGES + 1,
        "draft": PAGES + 1,
    }
    assert outputs(few) == outputs(whole)


def test_nobody_reads_page_0(engine_directory: Path) -> None:
    """It holds what would spoil every sum."""
    clean, engine = Engine.load(engine_directory), Engine.load(engine_directory)
    outputs(engine)  # the pools exist once every role has run
    executor = engine.executor
    assert isinstance(executor, CpuExecutor) and executor.pools
    for name, pool in executor.pools.items():
        axes = engine.manifest.group(name.partition(".")[0]).pool_axes
        np.moveaxis(pool.numpy(), axes.index("pages"), 0)[0] = POISON
    assert outputs(engine) == outputs(clean)


def test_inspect_says_what_the_caches_hold(engine_directory: Path, command: Command) -> None:
    shown = command("inspect", engine_directory, "--json")
    facts = json.loads(shown.out)["cache_capacity"]
    assert facts["groups"]["full"] == {"pages": PAGES, "tokens": 16 * PAGES}
    assert [(e["tokens"], e["guaranteed_no_evict"]) for e in facts["sequences"]] == [(96, 1)]
    assert "guaranteed-no-evict" in command("inspect", engine_directory).out
    report = json.loads((engine_directory / "build_report.json").read_text())
    assert report["caches"] == facts


def test_the_command_line_takes_sizes(tmp_path: Path, command: Command, text_target: Path) -> None:
    asked = ("build", "--model", text_target, "--output", tmp_path / "e", "--max-seq-len", 64)
    refused = command(*asked, "--kv-memory", "1KiB")
    assert refused.code == 2
    assert "the caches of one sequence of 64 tokens take 0.3 MiB" in refused.err
    assert "4GiB" in command(*asked, "--kv-memory", "plenty").err
