"""Tactics and machine code: which entries are valid for the present kernels, also shipped ones."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tactic_entries import GPU, default_choices, entry_of

from specbuild.builder.backends.cuda.compile import source as kernel_source
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.tactics import measured_code, tactic_file
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tactics.entry_request import entry_request
from specbuild.builder.backends.cuda.tactics.measured_code import MeasuredCode, compiler_mismatches
from specbuild.builder.backends.cuda.tactics.tactic_book import (
    SHIPPED_FILES,
    SHIPPED_FOLDER,
    Choice,
    TacticBook,
    shipped_tactics,
)
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    TacticEntry,
    read_tactics,
)
from specbuild.builder.backends.cuda.tuning.choice import Shape, shape_of
from specbuild.builder.backends.cuda.tuning.timer import Candidate, Measurement
from specbuild.plugins_cuda.launches import Kernel, LoweringRequest, Unsupported
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(scope="module")
def choices(target_path: Path) -> list[Choice]:
    """Return every call of a small engine with default tactics."""
    return default_choices(target_path)


class Recompiled(Compiler):
    """A compiler that gives every kernel of a folder code from its constants and a version."""

    version = "13.5"

    def __init__(self, gpu: str, change: str = "") -> None:
        super().__init__(gpu)
        self.change = change
        self.asked: list[Kernel] = []

    def compile(self, kernels: Iterable[Kernel], done: Any) -> Any:
        del done
        [kernel] = kernels
        self.asked.append(kernel)
        named = SimpleNamespace(files={"k.cubin": f"{kernel}{self.change}".encode()})
        return Unsupported("it spills") if self.change == "spills" else named


def codes(monkeypatch: pytest.MonkeyPatch, change: str = "") -> MeasuredCode:
    """Replace machine code by that of :class:`Recompiled`."""
    monkeypatch.setattr(
        measured_code,
        "machine_code",
        lambda data, _: defaultdict(lambda: SimpleNamespace(digest=data.decode())),
    )
    return MeasuredCode(target_of(GPU), Recompiled(GPU, change))


class LikesTheLast:
    """A GPU on which the last candidate of an op is the fastest."""

    device = "NVIDIA H200"

    def measure(
        self, op: OpSpec, request: LoweringRequest, candidates: Sequence[Candidate]
    ) -> list[Measurement]:
        del op, request
        return [Measurement((10.0 - i,)) for i in range(len(candidates))]

    def close(self) -> None:
        """Release nothing."""


@pytest.fixture
def changed_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a header of one kernel file."""
    read = kernel_source._read
    monkeypatch.setattr(
        kernel_source,
        "_read",
        lambda path: read(path) + b";" * (path.name == "small_linear.cuh"),
    )


def test_unchanged_sources_are_not_compiled(
    choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    tunable = next(c for c in choices if c.tunable and c.op.name == "Linear")
    code = codes(monkeypatch)
    entry = code.recorded(entry_of(tunable, {}))
    assert entry.code and entry.compiler == "13.5"
    file = tactic_file.tactic_file(GPU, "GPU", [entry])
    again = codes(monkeypatch, "other code")
    assert file.stale_sources() == ()
    assert again.valid_entries(file) == (file, ())
    assert again._compiler.asked == []
    # Constants of a launch may change in Python alone, so a full comparison compiles these too.
    held, [refused] = again.valid_entries(file, compare_all=True)
    assert held.entries == () and "the machine code of" in refused.reason
    assert codes(monkeypatch).valid_entries(file, compare_all=True) == (file, ())


@pytest.mark.parametrize(
    ("change", "version", "reason"),
    [
        ("", "13.5", None),
        (
            "other code",
            "13.5",
            r"^Linear \(prefill; x .*, weight .*\): .*the machine code of .* changed",
        ),
        ("spills", "13.5", "cannot be compiled: it spills"),
        ("other code", "13.6", None),
    ],
)
def test_changed_sources_are_compared_by_machine_code(
    choices: list[Choice],
    monkeypatch: pytest.MonkeyPatch,
    changed_sources: None,
    change: str,
    version: str,
    reason: str | None,
) -> None:
    """If another compiler was used, an entry is valid by its sizes, and the user is notified."""
    del changed_sources
    tunable = next(c for c in choices if c.tunable and c.op.name == "Linear")
    entry = codes(monkeypatch).recorded(entry_of(tunable, dict(tunable.candidates[-1])))
    file = tactic_file.tactic_file(GPU, "GPU", [entry])
    file.kernels["linear/kernel.cu"] = "0" * 32
    code = codes(monkeypatch, change)
    monkeypatch.setattr(Recompiled, "version", version)
    held, refused = code.valid_entries(file)
    book = TacticBook(file, "t.json", code, frozenset(file.stale_sources()))
    lowering = CallLowering(target_of(GPU), book)
    result = lowering._choose(tunable.op, replace(tunable.request, tactic={}))
    mismatches = compiler_mismatches([entry, entry], version)
    assert len(mismatches) == (version != "13.5")
    if reason is None:
        assert (result.entry, lowering.left_out) == (entry, ())
        # The code of another compiler was not compared, so the sources are not considered measured.
        now = replace(entry, sources=("linear/prefill.cu",))
        assert (held.entries, len(refused)) == (((now,), 0) if version == "13.5" else ((), 1))
        assert held.stale_sources() == ()
        return
    assert (held.entries, result.entry) == ((), None)
    assert dict(result.request.tactic) == {}
    assert [re.search(reason, each.reason) is not None for each in refused] == [True]
    assert lowering.left_out == refused
    with pytest.raises(SpecbuildError, match=r"t\.json: Linear .*measure with specbuild tune"):
        replace(book, is_strict=True).refusal(entry)


def test_a_changed_header_makes_sources_stale(
    choices: list[Choice], request: pytest.FixtureRequest
) -> None:
    file = tactic_file.tactic_file(GPU, "GPU", [entry_of(choices[0], {})])
    assert file.stale_sources() == ()
    request.getfixturevalue("changed_sources")
    assert file.stale_sources() == ("linear/kernel.cu",)


SHIPPED = [
    (gpu, entry)
    for gpu, name in SHIPPED_FILES.items()
    for entry in read_tactics(SHIPPED_FOLDER / name).entries
]


def test_shipped_entries_match_the_present_sources() -> None:
    """Otherwise builds compile to compare; benchmarks/refresh_tactics.py updates the digests."""
    for name in SHIPPED_FILES.values():
        assert read_tactics(SHIPPED_FOLDER / name).stale_sources() == ()


def test_each_shipped_entry_is_used_at_its_sizes() -> None:
    lowerings = {gpu: CallLowering(target_of(gpu), shipped_tactics(gpu)) for gpu in SHIPPED_FILES}
    for gpu, entry in SHIPPED:
        request = entry_request(entry, target_of(gpu))
        assert isinstance(request, LoweringRequest), entry.key
        lowering = lowerings[gpu]
        result = lowering._choose(op_named(entry.op), replace(request, tactic={}))
        assert (result.entry, dict(result.request.tactic)) == (entry, entry.tactic)
        assert entry.code and entry.compiler


def test_a_shipped_entry_has_the_measured_shape() -> None:
    for gpu, entry in SHIPPED:
        shape = shape_of(entry, target_of(gpu))
        assert isinstance(shape, Shape), entry.key
        assert shape.key == entry.key
        assert entry.tactic in shape.tactics


def test_invalid_entries_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script replaces these entries and keeps the others; on another GPU it fails."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    script = importlib.import_module("refresh_tactics")
    file = read_tactics(SHIPPED_FOLDER / SHIPPED_FILES[GPU])
    few = [e for e in file.entries if e.op == "Linear" and e.shapes["x"] == "bfloat16[8,4096]"]
    code, compiler = codes(monkeypatch), Recompiled(GPU)
    monkeypatch.setattr(compiler, "compile", lambda *_: None)
    monkeypatch.setattr(compiler, "missing", lambda *_: ())
    updated = script.measured_again(file, few, code, compiler, LikesTheLast())
    assert [e.key for e in updated.entries] == [e.key for e in file.entries]
    for old, new in zip(file.entries, updated.entries, strict=True):
        if old not in few:
            assert new == old
            continue
        shape = shape_of(old, target_of(GPU))
        assert isinstance(shape, Shape)
        assert new.tactic == shape.tactics[-1] and new.default_us == 10.0
        assert new.code == code.recorded(new).code != old.code
    monkeypatch.setattr(LikesTheLast, "device", "NVIDIA H100 80GB HBM3")
    with pytest.raises(SpecbuildError, match="measured on NVIDIA H200, this GPU is NVIDIA H100"):
        script.measured_again(file, few, code, compiler, LikesTheLast())


def same_code(gpu: str, entries: Iterable[TacticEntry]) -> None:
    """Compile the launches of the entries and compare them with the measured code."""
    try:
        compiler = Compiler(gpu)
        version = compiler.version
    except SpecbuildError as missing:
        pytest.skip(str(missing))
    code = MeasuredCode(target_of(gpu), compiler)
    compared = [entry for entry in entries if entry.compiler == version]
    if not compared:
        pytest.skip(f"all were measured with another compiler than {version}")
    assert [reason for reason in map(code.refusal, compared) if reason is not None] == []


def test_a_shipped_entry_has_the_measured_machine_code() -> None:
    gpu, entry = next((g, e) for g, e in SHIPPED if e.op == "Linear" and e.tactic)
    same_code(gpu, [entry])


@pytest.mark.slow
def test_all_shipped_entries_have_the_measured_machine_code() -> None:
    for gpu in SHIPPED_FILES:
        same_code(gpu, [entry for of, entry in SHIPPED if of == gpu])
