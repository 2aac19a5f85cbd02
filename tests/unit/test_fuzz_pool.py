"""The fuzzer sees what it is there for: hangs, memory, deaths, wrong output and tracebacks."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from fuzz import pool
from fuzz.verdicts import FINDING, OTHER, REFUSED, SAME, ContradictionError, judged

from specbuild.runtime.errors import SpecbuildError


def serve(connection: Connection) -> None:
    """Seed 1 spins, seed 2 dies, seed 3 swells; the others are well."""
    while (seed := connection.recv()) is not None:
        connection.send({"seed": seed, "kind": "toy"})
        held: list[bytes] = []
        while seed == 1:
            pass
        if seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while seed == 3:
            held.append(b"x" * (16 << 20))
            time.sleep(0.01)
        connection.send({"seed": seed, "kind": "toy", "verdict": SAME, "seconds": 0.0})


def test_bad_mutants_end_their_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_SECONDS", 3.0)
    monkeypatch.setattr(pool, "_WALL_FACTOR", 100)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = pages * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(pool, "_MAX_BYTES", own + (150 << 20))
    rows = {row["seed"]: row for row in pool.verdict_rows(iter(range(6)), 2, serve)}
    assert sorted(rows) == list(range(6))
    assert [rows[s]["verdict"] for s in (0, 4, 5)] == [SAME] * 3
    assert rows[1]["verdict"] == FINDING and rows[1]["reason"].startswith("hangs")
    assert rows[2]["verdict"] == FINDING and "ended with -9" in rows[2]["reason"]
    assert rows[3]["verdict"] == FINDING and "MiB of memory" in rows[3]["reason"]


def test_verdicts() -> None:
    def raises(error: BaseException) -> object:
        raise error

    def verdict(run: object, differ: bool = False) -> str:
        return judged(run, 1, lambda *_: differ).verdict  # type: ignore[arg-type]

    assert verdict(lambda: 1) == SAME
    assert verdict(lambda: 2) == FINDING
    assert verdict(lambda: 2, differ=True) == OTHER
    assert verdict(lambda: raises(SpecbuildError("the file is damaged"))) == REFUSED
    assert verdict(lambda: raises(SpecbuildError(""))) == FINDING
    assert verdict(lambda: raises(KeyError("a"))) == FINDING
    assert verdict(lambda: raises(ContradictionError("half an engine"))) == FINDING
