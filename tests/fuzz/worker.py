"""A forked process that tries mutants one after the other, until one of them ends it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz.cases import Workplace, case_of, original_of
from fuzz.subjects import EXPORTS
from fuzz.verdicts import FINDING, Verdict, judged

# A light `specbuild run` takes about this: twice the original's memory is once more of it.
PROCESS_BYTES = 128 << 20
_MIB = 1 << 20


def serve(connection: Connection, subjects: Path, kinds: tuple[str, ...]) -> None:
    """For every seed received: sends the mutant's names, then its row with the verdict.

    None ends it.
    """
    _be_quiet()
    _share_exports(subjects)
    originals: dict[str, tuple[Any, int]] = {}
    while (seed := connection.recv()) is not None:
        scratch = Path(tempfile.mkdtemp(prefix="mutant-", dir=subjects))
        try:
            place = Workplace(subjects, scratch)
            connection.send(_tried(seed, place, kinds, originals, connection))
        except Exception:
            # The fuzzer's own mistake is one that its user should see, not a worker that died.
            reason = f"the fuzzer failed: {traceback.format_exc()[-600:]}"
            connection.send({"seed": seed, **vars(Verdict(FINDING, reason)), "seconds": 0.0})
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _tried(
    seed: int,
    place: Workplace,
    kinds: tuple[str, ...],
    originals: dict[str, tuple[Any, int]],
    connection: Connection,
) -> dict[str, Any]:
    os.environ["SPECBUILD_CACHE_DIR"] = str(place.scratch / "cache")
    case = case_of(seed, place, kinds)
    row = {"seed": seed, "kind": case.kind, "file": case.file, "change": case.change}
    if case.original not in originals:
        originals[case.original] = _original(case.original, place)
    expected, usual_bytes = originals[case.original]
    connection.send(row)
    started = time.perf_counter()
    verdict, more_bytes = _with_memory(lambda: judged(case.run, expected, case.may_differ))
    if more_bytes > 2 * usual_bytes + PROCESS_BYTES and verdict.verdict != FINDING:
        verdict = Verdict(FINDING, f"{more_bytes // _MIB} MiB of memory; {verdict.reason}")
    seconds = round(time.perf_counter() - started, 3)
    return {**row, **vars(verdict), "seconds": seconds, "mib": more_bytes // _MIB}


def _original(name: str, place: Workplace) -> tuple[Any, int]:
    """Its output, and the bytes that it takes once all modules are there."""
    results = []
    for _ in range(2):
        scratch = Path(tempfile.mkdtemp(prefix="original-", dir=place.subjects))
        try:
            results.append(_with_memory(original_of(name, Workplace(place.subjects, scratch))))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return results[-1]


def _with_memory(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and by how many bytes the process grew at most."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    result = run()
    return result, _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def _be_quiet() -> None:
    """What libraries print is nobody's: verdicts go through the connection."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _share_exports(subjects: Path) -> None:
    if (subjects / EXPORTS).exists():
        from content_store import use_store
        from shared_graphs import share_exports

        use_store(subjects / EXPORTS)
        share_exports()
