"""Tactic files, and their use in a build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from tactic_entries import GPU, SOURCES, default_choices, entry_of

from specbuild.builder.backends.cuda.compile.nvrtc import Spills, target_of
from specbuild.builder.backends.cuda.tactics import tactic_file
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering, without_spills
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    SHIPPED_FILES,
    Choice,
    TacticBook,
    no_tactics,
    require_tuned,
    shipped_tactics,
    tactics_from_file,
    tactics_report,
)
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    TacticEntry,
    read_tactics,
    shape_key,
    write_tactics,
)
from specbuild.plugins_cuda.launches import (
    TensorInfo,
)
from specbuild.plugins_cuda.registry import all_ops, op_named
from specbuild.runtime.errors import SpecbuildError

entries = st.builds(
    TacticEntry,
    op=st.sampled_from(("Linear", "RmsMoe")),
    phase=st.sampled_from(("decode", "prefill")),
    shapes=st.dictionaries(st.sampled_from("xyz"), st.text(max_size=8), max_size=3),
    attributes=st.dictionaries(
        st.sampled_from(("eps", "top_k", "gating")),
        st.integers(0, 9) | st.floats(0, 1) | st.text(max_size=4),
        max_size=3,
    ),
    sources=st.sets(st.sampled_from(SOURCES), min_size=1).map(lambda s: tuple(sorted(s))),
    tactic=st.dictionaries(st.sampled_from(("warps", "stages")), st.integers(0, 64), max_size=2),
    median_us=st.floats(0.1, 1e4),
    default_us=st.floats(0.1, 1e4),
    code=st.text("0123456789abcdef", max_size=32),
    compiler=st.sampled_from(("", "13.5", "13.6")),
)


@pytest.fixture(scope="module")
def choices(target_path: Path) -> list[Choice]:
    """Return every call of a small engine with default tactics."""
    return default_choices(target_path)


@examples(15)
@given(st.lists(entries, max_size=4), st.randoms())
def test_a_written_file_can_be_read_and_is_sorted(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[TacticEntry], random: Any
) -> None:
    path = tmp_path_factory.mktemp("tactics") / "t.json"
    unique = list({entry.key: entry for entry in drawn}.values())
    file = tactic_file.tactic_file(GPU, "NVIDIA H200", unique)
    write_tactics(path, file)
    assert read_tactics(path) == file
    first = path.read_bytes()
    random.shuffle(unique)
    write_tactics(path, tactic_file.tactic_file(GPU, "NVIDIA H200", unique))
    assert path.read_bytes() == first
    assert file == file.with_entries(unique[:1])


def test_keys_round_rows_up_and_ignore_pool_sizes() -> None:
    op = op_named("RmsQkvRope")

    def key(rows: int, pages: int, columns: int = 96) -> dict[str, str]:
        pool = TensorInfo((pages, 2, 16, 32), "bfloat16")
        return shape_key(op, {"x": TensorInfo((rows, columns), "bfloat16"), "k_pool": pool})

    assert key(5, 3) == key(8, 90) == key(6, 4)
    assert key(5, 3) not in (key(4, 3), key(9, 3), key(5, 3, 128))
    assert key(5, 3)["x"] == "bfloat16[8,96]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"version": 1}, "got tactic file version 1, expected 2"),
        (lambda d: d | {"more": 1}, "unknown keys more"),
        (lambda d: d | {"entries": d["entries"] * 2}, "has two entries for one shape"),
        (lambda d: d | {"kernels": {}}, "digests of 0 kernel files"),
        (lambda d: [d], "version None"),
        (
            lambda d: d | {"entries": [d["entries"][0] | {"tactic": {"a": 1.5}}]},
            "is not a tactic file",
        ),
        (
            lambda d: (
                d
                | {
                    "kernels": {"../../x": "0"},
                    "entries": [d["entries"][0] | {"sources": ["../../x"]}],
                }
            ),
            "is not the name of a kernel file",
        ),
        *(
            (
                lambda d, name=name: (
                    d
                    | {
                        "kernels": {name: "0"},
                        "entries": [d["entries"][0] | {"sources": [name]}],
                    }
                ),
                error,
            )
            for name, error in (
                ("a\0b.cu", "is not the name of a kernel file"),
                ("\ud800.cu", "half a surrogate pair"),
            )
        ),
        (
            lambda d: d | {"entries": [d["entries"][0] | {"median_us": 10**400}]},
            "a number of 401 digits",
        ),
    ],
)
def test_rejects_invalid_files(
    tmp_path: Path, choices: list[Choice], change: Any, message: str
) -> None:
    tunable = next(choice for choice in choices if choice.tunable)
    path = tmp_path / "t.json"
    write_tactics(path, tactic_file.tactic_file(GPU, "GPU", [entry_of(tunable, {})]))
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(SpecbuildError, match=message):
        tactics_from_file(path, GPU)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"NaN", b"[" * 100_000])
def test_rejects_files_that_are_not_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(
        SpecbuildError, match=r"t\.json(: got tactic file version| is not a tactic file)"
    ):
        read_tactics(tmp_path / "t.json")
    with pytest.raises(SpecbuildError, match="cannot be read"):
        read_tactics(tmp_path / "none.json")


def test_rejects_a_file_of_another_gpu(tmp_path: Path) -> None:
    write_tactics(tmp_path / "t.json", tactic_file.tactic_file("sm_100a", "B200", []))
    with pytest.raises(SpecbuildError, match=r"measured for sm_100a \(B200\), but .* for sm_90a"):
        tactics_from_file(tmp_path / "t.json", GPU)


def test_shipped_files_are_valid() -> None:
    for gpu, name in SHIPPED_FILES.items():
        book = shipped_tactics(gpu)
        assert (book.file.gpu, book.name) == (gpu, name)


def test_an_entry_is_used_if_its_tactic_is_a_candidate(choices: list[Choice]) -> None:
    tunable = {id(c.op): c for c in choices if c.tunable}.values()
    assert {c.op.name for c in tunable} >= {"Linear", "RmsMoe", "RmsQkvRope"}
    for choice in tunable:
        other = dict(choice.candidates[-1])
        for tactic, expected in ((other, other), ({"unheard": 1}, {})):
            file = tactic_file.tactic_file(GPU, "GPU", [entry_of(choice, tactic)])
            lowering = CallLowering(target_of(GPU), TacticBook(file, "t.json"))
            untuned = replace(choice.request, tactic={})
            result = lowering._choose(choice.op, untuned)
            assert dict(result.request.tactic) == expected
            # Unused entries are not counted either: --tuned-only rejects them.
            assert (result.entry is None) == (tactic != expected)
            assert choice.op.lower is not None
            assert result.lowering == choice.op.lower(replace(untuned, tactic=expected))


def test_a_tactic_that_spills_is_replaced(choices: list[Choice]) -> None:
    """It is ignored, a spilling default is replaced by a candidate, or the user is notified."""
    decoding = {c.op.name: c for c in choices if c.tunable and c.request.phase == "decode"}
    some, other = decoding["RmsMoe"], decoding["Linear"]
    drawn = [entry_of(choice, dict(choice.candidates[-1])) for choice in (some, other)]
    book = TacticBook(tactic_file.tactic_file(GPU, "GPU", drawn), "t.json")
    assert some.op.lower is not None
    tuned = some.op.lower(replace(some.request, tactic=some.candidates[-1]))
    default = frozenset(launch.kernel for launch in some.lowering.launches)
    spilling = frozenset(launch.kernel for launch in tuned.launches) - default
    assert spilling
    compiled = []

    def make(lowering: CallLowering) -> list[Choice] | Spills:
        result = [lowering._choose(c.op, replace(c.request, tactic={})) for c in (some, other)]
        lowering._choices = {repr(choice): choice for choice in result}
        compiled.append(result)
        used = {launch.kernel for choice in result for launch in choice.lowering.launches}
        if used & spilling:
            return Spills("these spill", frozenset(used & spilling))
        return result

    lowering, (first, second) = without_spills(target_of(GPU), book, make)
    assert len(compiled) == 2
    assert [refused.reason for refused in lowering.left_out] == ["these spill"]
    assert first.entry is None and first.lowering == some.lowering
    assert second.entry is not None and second.request.tactic == other.candidates[-1]
    assert lowering.tactics.name == "t.json"
    assert lowering.tactics.file == tactic_file.tactic_file(GPU, "GPU", drawn[1:])

    candidates = [replace(some.request, tactic=tactic) for tactic in some.candidates]
    kernels = [{launch.kernel for launch in some.op.lower(c).launches} for c in candidates]
    spilling = default - kernels[1]
    _, (first, _) = without_spills(target_of(GPU), no_tactics(GPU), make)
    assert first.request == candidates[1] and first.entry is None
    spilling = frozenset().union(*kernels)
    with pytest.raises(SpecbuildError, match="these spill"):
        without_spills(target_of(GPU), book, make)


def test_tuned_only_lists_requests_without_an_entry(choices: list[Choice]) -> None:
    empty = no_tactics(GPU)
    moe = next(c for c in choices if c.op.name == "RmsMoe" and c.request.phase == "decode")
    with pytest.raises(SpecbuildError, match=r"RmsMoe .*decode at 1, 2, 8, 64 rows") as refused:
        require_tuned(empty, choices)
    assert "\n" not in str(refused.value)
    report = tactics_report(empty, choices)
    assert (report.tuned_shapes, report.tuned_launches) == (0, 0)
    everything = {c.op.name + repr(c.request): entry_of(c, {}) for c in choices if c.tunable}
    unique = {entry.key: entry for entry in everything.values()}
    assert moe.tunable and len(unique) == report.shapes
    book = TacticBook(tactic_file.tactic_file(GPU, "GPU", unique.values()), "t.json")
    lowering = CallLowering(target_of(GPU), book)
    tuned = [
        lowering._choose(c.op, replace(c.request, tactic={})) if c.tunable else c for c in choices
    ]
    require_tuned(book, tuned)
    full = tactics_report(book, tuned)
    assert full.tuned_shapes == full.shapes == report.shapes
    assert full.tuned_launches == full.launches == report.launches > full.shapes


def test_requests_of_every_tunable_op_have_rows() -> None:
    for op in all_ops().values():
        if op.tactics is not None:
            names = {spec.name for spec in op.inputs}
            assert names & {"x", "q", "rows"}, op.name
