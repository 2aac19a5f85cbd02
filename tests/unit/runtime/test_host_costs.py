"""Costs of steps on the host: measured, stored between runs, measured again if unreliable."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from toy_model import ToyExecutor, toy_manifest

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.host.cost_file import cache_path, load_or_measure
from specbuild.runtime.decode.host.costs import CostMeasurement, table_of, times_agree
from specbuild.runtime.draft.cost_table import CostTable

ROWS = (1, 2, 3, 4, 5)
CHEAP = CostTable(ROWS, (2.8e-3, 3.0e-3, 3.2e-3, 3.4e-3, 3.6e-3), (2e-4, 3e-4, 4e-4, 5e-4))


def test_costs_are_interpolated_and_extrapolated_by_the_last_slope() -> None:
    table = CostTable((1, 2, 4), (1.0, 2.0, 3.0), (0.1,))
    assert [table.step_s(n) for n in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]
    assert [table.chain_s(d) for d in (0, 1, 5)] == [0.0, 0.1, 0.1]


def test_a_table_is_measured_once_and_stored(tmp_path: Path) -> None:
    path = cache_path(tmp_path / "cache", "manifest", "cpu", 1)
    assert path is not None
    first, origin = load_or_measure(path, lambda: CHEAP)
    assert (first, origin) == (CHEAP, "measured now")
    kept, origin = load_or_measure(path, lambda: pytest.fail("measured twice"))
    assert (kept, origin) == (CHEAP, "from an earlier run")
    assert cache_path(tmp_path / "cache", "manifest", "cpu", 2) != path


def test_files_of_a_killed_process_are_removed_after_an_hour(tmp_path: Path) -> None:
    old, young = tmp_path / "cost-a-x.tmp", tmp_path / "cost-a-y.tmp"
    for file in (old, young):
        file.write_text("{")
    os.utime(old, (0, 0))
    load_or_measure(tmp_path / "cost-b.json", lambda: CHEAP)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cost-a-y.tmp", "cost-b.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff",
        b"[]",
        b"[" * 50_000,
        json.dumps({"target_rows": [1], "target_s": [1.0]}).encode(),
        json.dumps({"target_rows": [1], "target_s": [-1.0], "draft_s": [1.0]}).encode(),
        json.dumps({"target_rows": [1], "target_s": [float("nan")], "draft_s": [1.0]}).encode(),
        json.dumps({"target_rows": [2, 1], "target_s": [1.0, 1.0], "draft_s": [1.0]}).encode(),
        json.dumps(
            {"target_rows": [1], "target_s": [1.0], "draft_s": [1.0], "row_s": -1.0}
        ).encode(),
        json.dumps({"target_rows": [1, 2], "target_s": [1.0], "draft_s": [1.0]}).encode(),
        json.dumps({"target_rows": [1], "target_s": [10**400], "draft_s": [1.0]}).encode(),
        b'{"target_rows": [1], "target_s": [1e999], "draft_s": [1.0]}',
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    assert load_or_measure(path, lambda: CHEAP)[0] == CHEAP
    assert load_or_measure(path, lambda: pytest.fail("not kept"))[0] == CHEAP


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    table, origin = load_or_measure(tmp_path / "file/cost.json", lambda: CHEAP)
    assert table == CHEAP
    assert "cannot be written" in origin


@pytest.mark.parametrize(
    ("max_seq_len", "rows"),
    [(10, (1, 2)), (12, (1, 2, 3)), (16, (1, 2, 4, 5)), (300, (1, 2, 4, 5))],
)
def test_measuring_releases_all_pages(max_seq_len: int, rows: tuple[int, ...]) -> None:
    """To the depth that fits: that of the deepest draft, 4."""
    manifest = toy_manifest(max_seq_len=max_seq_len, max_rows=32)
    executor = ToyExecutor(manifest)
    kv = KvPools(manifest.cache_groups, manifest.limits, executor.poison)
    free = [pool.free_pages for pool in kv.pools.values()]
    table = CostMeasurement(executor, manifest, kv, manifest.drafters[0]).run()
    assert [pool.free_pages for pool in kv.pools.values()] == free
    assert table.target_rows == rows
    assert len(table.draft_s) == rows[-1] - 1
    assert all(t > 0 for t in (*table.target_s, *table.draft_s))
    assert table.row_s >= 0


def test_a_table_of_another_method_is_not_used(tmp_path: Path) -> None:
    """The name of a stored table includes the method, besides subject and machine."""
    path = cache_path(tmp_path, "manifest", "cpu", 1)
    old = hashlib.sha256(b"manifest\ncpu\n1").hexdigest()[:32]
    assert path is not None
    assert old not in path.name


def test_a_disturbed_table_is_measured_again_by_the_next_run(tmp_path: Path) -> None:
    """The shorter times are stored. A third run uses what two runs agree on."""
    path = tmp_path / "cost.json"
    slow = replace(CHEAP, target_s=tuple(2 * t for t in CHEAP.target_s), sure=False)
    first, origin = load_or_measure(path, lambda: slow)
    assert (first, origin) == (slow, "measured now, while other processes ran")
    second, _ = load_or_measure(path, lambda: replace(CHEAP, sure=False))
    assert second == replace(CHEAP, sure=False)
    third, _ = load_or_measure(path, lambda: replace(CHEAP, sure=False))
    assert third == CHEAP
    assert load_or_measure(path, lambda: pytest.fail("measured again"))[0] == CHEAP


def test_a_table_of_other_rows_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    other = CostTable((1,), (1e-9,), (1e-9,), sure=False)
    load_or_measure(path, lambda: other)
    assert load_or_measure(path, lambda: CHEAP)[0] == CHEAP


def test_the_table_has_the_shortest_times() -> None:
    """An entry that was always disturbed is at most the next larger step."""
    table = table_of(
        (1, 2, 4), [[5.0, 1.0], [9.0, 8.0], [2.0, 3.0]], [[2.5], [4.0], [3.5]], row_s=0, sure=True
    )
    assert table.target_s == (1.0, 2.0, 2.0)
    assert table.draft_s == pytest.approx((0.5, 1.5, 1.5))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([[1.0, 1.09, 7.0], [2.0, 2.0, 2.0]], True),
        ([[1.0, 1.2, 1.2], [2.0, 2.0, 2.0]], False),
        ([[3.0, 1.0, 2.0]], False),
    ],
)
def test_times_agree_if_the_two_shortest_are_close(
    times: list[list[float]], expected: bool
) -> None:
    assert times_agree(times) is expected
