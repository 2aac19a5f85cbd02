"""Tables and the progress bar show the values of records."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specbuild.builder.engine.cache_capacity import cache_capacity
from specbuild.builder.verify.report import LosslessRow, VerifyReport, VerifyRow
from specbuild.cli.bench.against import against, read_report
from specbuild.cli.bench.pair_table import bench_table
from specbuild.cli.bench.pairs import BenchReport, Pair, Speed, summarise
from specbuild.cli.bench.plot import plot
from specbuild.cli.commands.verify import verify_tables
from specbuild.cli.options.page_bytes import PageOptions
from specbuild.cli.tables.cache_tables import cache_tables, footprint
from specbuild.cli.tables.engine_table import build_summary, engine_tables, ops_text, specpv_summary
from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.cli.tables.run_table import histogram_text, milliseconds, run_table
from specbuild.cli.terminal.console import json_line, plain_console, size_text
from specbuild.cli.terminal.environment import cache_directory
from specbuild.cli.terminal.progress_bar import ProgressBar
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest, SpecPv
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.records import RunRecord, RunStats

STATS = RunStats(
    prompt_tokens=11,
    output_tokens=29,
    steps=13,
    mean_acceptance_length=2.1538,
    acceptance_histogram=(3, 5, 0, 5),
    acceptance_per_position=(0.77, 0.38, 0.38),
    ttft_s=0.0123,
    tpot_s=0.004,
    output_tokens_per_s=241.7,
    proposed_tokens=39,
)


def drawn(renderable: object) -> str:
    file = io.StringIO()
    console = plain_console(file)
    console.width = 200
    console.print(renderable)
    return file.getvalue()


def test_output_to_a_file_is_wide_enough_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_console(io.StringIO()).width == 200
    monkeypatch.setenv("COLUMNS", "")
    assert plain_console(io.StringIO()).width == 200
    monkeypatch.setenv("COLUMNS", "90")
    assert plain_console(io.StringIO()).width == 90


def test_output_to_a_terminal_has_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_console(Terminal()).width == Console(file=Terminal()).width


def test_run_table_holds_every_statistic() -> None:
    text = drawn(run_table([RunRecord("a [b]", (1,), (2,), "x", "stop", STATS)]))
    for part in ("11", "29", "13", "2.15", "0:3 1:5 3:5", "12.3 ms", "4.0 ms", "241.7"):
        assert part in text
    assert "stop" in text


@pytest.mark.parametrize("passed", [True, False])
def test_verify_shows_the_failed_checks(passed: bool) -> None:
    rows = (
        VerifyRow("layer.0", 8, 0.9999999, 1e-6, None, None, "cosine ≥ 0.9", True),
        VerifyRow("logits", 8, 0.5, 2e-1, 0.25, 0.5, "argmax equal", passed),
    )
    lossless = (LosslessRow("greedy", 6, 288, 3, 1, True),)
    text = drawn(verify_tables(VerifyReport(rows, lossless, passed)))
    for part in ("0.9999999", "2.0e-01", "25.0%", "1: cosine ≥ 0.9", "2: argmax equal", "288"):
        assert part in text
    assert ("failed" in text) != passed


def test_bench_table_has_a_column_for_each_prompt_set() -> None:
    plain, drafted = Speed(100.0, 0.01, 0.01), Speed(150.0, 0.02, 0.007)
    fast = Pair("a", 4, 8, plain, drafted, 1.5, 2.5, (1, 2), True)
    slow = Pair("b", 4, 8, plain, Speed(50.0, 0.02, 0.02), 0.5, 1.0, (3,), False)
    report = summarise("[code]", [fast, slow, fast])
    other = summarise("prose", [fast])
    assert (report.ratio, report.same_output) == (1.5, 2)
    assert report.acceptance_histogram == (5, 4)
    text = drawn(bench_table(BenchReport(8, 1, "chain of 2", 1.5, (report, other))))
    for part in (
        "[code], 3 prompts",
        "prose, 1 prompt",
        "100.0",
        "150.0",
        "1.50",
        "2.50",
        "0:5 1:4",
        "2 of 3",
        "20.0 ms",
    ):
        assert part in text


def test_statistics_without_draft_tokens_do_not_mention_drafts() -> None:
    stats = replace(STATS, proposed_tokens=0, mean_acceptance_length=1.0)
    text = drawn(run_table([RunRecord("a", (1,), (2,), "x", "stop", stats)]))
    assert "draft" not in text and "tokens/step" not in text and "241.7" in text


def test_bench_shows_the_acceptance_for_each_stored_type(tmp_path: Path) -> None:
    plain, drafted = Speed(100.0, 0.01, 0.01), Speed(150.0, 0.02, 0.007)
    pairs = [Pair("a", 4, 8, plain, drafted, 1.5, length, (1, 2), True) for length in (2.5, 2.0)]
    whole, coded = (
        BenchReport(8, 1, "chain", 1.5, (summarise("code", [pair]),), dtype)
        for pair, dtype in zip(pairs, ("bf16", "mxfp4"), strict=True)
    )
    (tmp_path / "bf16.json").write_text(json_line(whole))
    compared = against(coded, read_report(tmp_path / "bf16.json"))
    text = drawn(bench_table(compared))
    for part in ("with a bf16 draft", "2.50", "0.50 (20.0 %)"):
        assert part in text
    (entry,) = coded.sets
    for other, message in (
        (replace(coded, max_new_tokens=9), r"other outputs \(8 tokens there, 9 tokens here\)"),
        (replace(coded, shape=DraftShape(1, 3, 3)), r"other drafts \(no fixed one there, "),
        (replace(coded, sets=(replace(entry, name="prose"),)), r"prompt sets \(code there, prose"),
        (
            replace(
                coded,
                sets=(replace(entry, pairs=(replace(entry.pairs[0], prompt_digest="x"),)),),
            ),
            "other prompts; measure both with the same prompts",
        ),
    ):
        with pytest.raises(SpecbuildError, match=message):
            against(other, whole)
    (tmp_path / "bf16.json").write_text("no report")
    with pytest.raises(SpecbuildError, match="cannot be read as a report"):
        read_report(tmp_path / "bf16.json")


def test_bench_without_a_draft() -> None:
    pair = Pair("a", 4, 8, Speed(100.0, 0.01, None), None, None, None, (), None)
    report = summarise("x", [pair])
    assert (report.ratio, report.with_draft_tokens_per_s) == (None, None)
    assert "–" in drawn(bench_table(BenchReport(8, 1, "none", None, (report,))))


def test_equal_reports_give_equal_charts(tmp_path: Path) -> None:
    pair = Pair("a", 4, 8, Speed(9.0, 1, 1), Speed(12.0, 1, 1), 1.3, 2.5, (1, 2), True)
    report = BenchReport(8, 1, "chain", 1.3, (summarise("code", [pair]),))
    for name in ("a.svg", "b.svg"):
        plot(report, tmp_path / name)
    drawing = (tmp_path / "a.svg").read_bytes()
    assert drawing == (tmp_path / "b.svg").read_bytes()
    assert drawing.startswith(b"<?xml")


def test_many_requests_have_a_row_each() -> None:
    text = drawn(run_table([RunRecord(f"[{i}]", (1,), (2,), None, "eos", STATS) for i in range(9)]))
    assert all(f"[{i}]" in text for i in range(9))
    assert text.count("241.7") == 9


def test_one_token_has_no_time_per_token() -> None:
    assert milliseconds(None) == "–"
    assert histogram_text([]) == ""


def test_inspect_shows_geometry_limits_sizes_ops_and_memory(
    make_manifest: Callable[..., Manifest],
) -> None:
    manifest = make_manifest()
    text = drawn(engine_tables(manifest, predict_memory(manifest)))
    for part in ("gpt_oss", "64 tokens", "2 sequences", "top-k 4, depth 5, 20 tokens"):
        assert part in text
    for part in ("weights.safetensors", "4.9 KiB", "MatMul 3, Add 1", "field x is not known"):
        assert part in text
    for part in ("yarn, factor 32", "0, 1, 1", "KV cache, sliding", "top-k 1, depth 3, 3 tokens"):
        assert part in text


def test_the_footprint_lists_pages_bytes_and_totals(
    make_manifest: Callable[..., Manifest],
) -> None:
    manifest = make_manifest()
    group = replace(manifest.cache_groups[0], k_width=24, v_width=16, kv_heads=2, pages=9)
    manifest = replace(manifest, cache_groups=(group, *manifest.cache_groups[1:]))
    element = {"float32": 4, "float16": 2, "bfloat16": 2}[group.dtype]
    page_bytes = len(group.layers) * 2 * (24 + 16) * group.page_size * element
    memory = predict_memory(manifest)
    text = drawn(footprint(manifest, memory))
    capacity = cache_capacity(manifest.cache_groups, manifest.limits)
    table = drawn(cache_tables(manifest, memory, capacity))
    for part in ("2 × 24+16", str(page_bytes), str(8 * group.page_size), group.dtype):
        assert part in table
    assert memory.kv_bytes[group.name] == 9 * page_bytes
    whole = memory.weights_bytes + sum(memory.kv_bytes.values())
    assert size_text(whole) in text.splitlines()[-1]


def test_the_error_names_pages_of_unexpected_size(
    make_manifest: Callable[..., Manifest],
) -> None:
    manifest = make_manifest()
    group = replace(manifest.cache_groups[0], k_width=24, v_width=16, kv_heads=2, pages=9)
    groups = (group, *manifest.cache_groups[1:])
    memory = predict_memory(replace(manifest, cache_groups=groups))
    element = {"float32": 4, "float16": 2, "bfloat16": 2}[group.dtype]
    right = len(group.layers) * 2 * (24 + 16) * group.page_size * element

    def check(*page_sizes: str) -> None:
        PageOptions(page_bytes=page_sizes).check(groups, memory)

    check()
    check(f"{group.name}={right}")
    message = (
        rf"a page of {group.name} takes {right} bytes \({group.page_size} tokens, .* 2 KV heads"
    )
    with pytest.raises(SpecbuildError, match=message):
        check(f"{group.name}={right}", f"{group.name}={right // 2}")
    with pytest.raises(SpecbuildError, match="the engine's cache groups are "):
        check(f"other={right}")
    for text in ("1572864", f"{group.name}=", f"{group.name}=1.5", f"{group.name}=-1"):
        with pytest.raises(SpecbuildError, match="expected GROUP=N"):
            check(text)


def test_lists_frequent_ops_and_counts_the_others() -> None:
    ops = {f"Op{count}": count for count in range(1, 12)}
    text = ops_text(ops)
    assert text.startswith("Op11 11, Op10 10, ")
    assert text.endswith("Op4 4, 3 other kinds")


def test_inspect_without_a_draft(make_manifest: Callable[..., Manifest]) -> None:
    manifest = make_manifest(draft=False)
    text = drawn(engine_tables(manifest, predict_memory(manifest)))
    assert "Eagle3" not in text
    assert "Eagle3" in drawn(engine_tables(make_manifest(), predict_memory(manifest)))


def test_build_summary_has_the_output_path(make_manifest: Callable[..., Manifest]) -> None:
    text = drawn(build_summary(Path("out") / "[engine]", make_manifest()))
    assert str(Path("out") / "[engine]") in text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (2 << 40, "2.0 TiB")],
)
def test_units_of_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_stages_and_notes(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, markup=False, highlight=False)
    with ProgressBar(console) as progress:
        progress.start("reading [b]", 2, "layer")
        progress.advance(1)
        progress.note("the engine will take 5 MiB")
        progress.start("writing", 4096, "byte")
        progress.advance(4096)
    text = file.getvalue()
    for part in ("reading [b]", "writing", "the engine will take 5 MiB", "2 layers", "4.0 KiB"):
        assert part in text
    assert ("0 layers of 2 layers" in text) == ("\x1b" in text) == terminal


def test_cache_directory_comes_from_the_environment() -> None:
    assert cache_directory({"SPECBUILD_CACHE_DIR": "a", "XDG_CACHE_HOME": "b"}) == Path("a")
    assert cache_directory({"XDG_CACHE_HOME": "b"}) == Path("b") / "specbuild"
    assert cache_directory({}) == Path.home() / ".cache" / "specbuild"


def test_a_user_without_a_home_directory_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory({}) is None
    assert cache_directory({"XDG_CACHE_HOME": "b"}) == Path("b") / "specbuild"


def test_a_view_has_sink_retrieved_and_window_blocks() -> None:
    text = specpv_summary(SpecPv(16, 2, 256, 8, 64, 4096, 32))
    assert "266 blocks of 16 tokens (2 sink, 256 retrieved, 8 window)" in text


def test_three_requests_have_every_statistic() -> None:
    records = [RunRecord(f"[{i}]", (1,), (2,), None, "eos", STATS) for i in range(4)]
    assert "accepted draft tokens: steps" in drawn(run_table(records[:3]))
    assert "accepted draft tokens: steps" not in drawn(run_table(records))
