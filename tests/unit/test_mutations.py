"""The seeded faults fit the sources, and what detects them is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations.faults import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


def test_there_are_thirty_faults() -> None:
    assert len({(m.file, m.text, m.replacement) for m in MUTATIONS}) == len(MUTATIONS) >= 30


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.text}")
def test_a_fault_can_be_applied_and_its_tests_exist(mutation: Mutation) -> None:
    assert mutation.applied(ROOT) != (ROOT / mutation.file).read_text(encoding="utf-8")
    files = [test for test in mutation.tests if test.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a b a")
    assert Mutation("file", "b", "c", ()).applied(tmp_path) == "a c a"
    for text in ("a", "x"):
        with pytest.raises(ValueError, match="times"):
            Mutation("file", text, "c", ()).applied(tmp_path)
