"""One fault after the other befalls a process of its own, and what it leaves is looked at."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.interposition import NONE, Fault, interpose
from faults.scenarios import Digests, Place, Scenario, digest

FULL_SIZES = 20
# Of the processor; a busy machine may take as many times longer.
_LONGEST_S = 120
_WALL_FACTOR = 10
_NEVER = 99
# Calls that a full disk lets fail; the others take something away, or need nothing.
_NEEDS_SPACE = {"open", "mkdir", "write", "writev", "sendfile", "fsync", "link", "rename"}
# How a process ends to which a signal is sent, and its sentence.
_ENDS = {
    signal.SIGINT: (130, "specbuild: interrupted"),
    signal.SIGTERM: (143, "specbuild: terminated"),
}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), and its standard error."""

    code: int
    said: str


@dataclass(frozen=True)
class Untroubled:
    """What a scenario finds, what it leaves, and the calls in between: names and bytes."""

    before: Digests
    after: Digests
    names_before: frozenset[str]
    names: frozenset[str]
    calls: tuple[str, ...]
    written: int


@dataclass(frozen=True)
class Trial:
    """A fault and what was wrong afterwards, None where nothing was."""

    kind: str
    fault: Fault
    call: str
    problem: str | None


class Trials:
    """A scenario in a folder of its own below ``work``, over inputs that stay."""

    def __init__(self, scenario: Scenario, inputs: Path, work: Path) -> None:
        self._scenario = scenario
        self._place = Place(inputs, work / "here")
        self._work = work
        self.untroubled = self._untroubled()

    def run(self, kinds: tuple[str, ...], every: int) -> Iterator[Trial]:
        """Every ``every``-th of the faults of these kinds."""
        faults = {kind: list(self._faults(kind)) for kind in kinds}
        for kind in kinds:
            for fault in faults[kind][len(faults[kind]) % every :: every]:
                call = "" if fault.at < 0 else self.untroubled.calls[fault.at - 1]
                yield Trial(kind, fault, call, self._problem(fault))

    def _faults(self, kind: str) -> Iterator[Fault]:
        if kind == "full":
            most = self.untroubled.written
            sizes = [most * i // FULL_SIZES for i in range(FULL_SIZES)]
            yield from (Fault(space=size) for size in sizes if most)
            return
        for number, call in enumerate(self.untroubled.calls, start=1):
            if kind == "error":
                name, path, _ = call.split("\t")
                if name in _NEEDS_SPACE and not path.endswith("/said"):
                    yield Fault(number, error=errno.ENOSPC)
            else:
                yield Fault(number, signal=getattr(signal, kind))

    def _problem(self, fault: Fault) -> str | None:
        self._fresh()
        ended = self._acted(fault)
        problem = self._wrong_end(fault, ended) or self._half_done(ended)
        if problem is not None:
            return problem
        untidy = self._names() - self.untroubled.names - self.untroubled.names_before
        untidy = {name for name in untidy if name.partition("/")[0] not in self._scenario.kept}
        # Whoever is killed, or gets a signal while a folder is being made, leaves it to the next.
        at = self.untroubled.calls[fault.at - 1] if fault.at > 0 else ""
        if fault.signal == signal.SIGKILL or (untidy and at.startswith("mkdir\t")):
            return self._wrong_second()
        return f"left {sorted(untidy)}" if untidy else None

    def _wrong_end(self, fault: Fault, ended: Ended) -> str | None:
        if fault.signal == signal.SIGKILL:
            return None if ended.code == -signal.SIGKILL else f"survived with {ended.code}"
        expected = _ENDS.get(signal.Signals(fault.signal)) if fault.signal > 0 else None
        code, sentence = expected or (2, "specbuild: ")
        lines = ended.said.splitlines()
        if ended.code == 0 and expected is None:
            return None  # it could do without
        # What it had said so far may end within a line; on a full disk there is no more to say.
        mute = self._scenario.speaks and fault.space >= 0
        if ended.code != code or not (mute or (lines and sentence in lines[-1])):
            return f"ended with {ended.code}: {ended.said[-300:]!r}"
        return "a traceback" if "Traceback" in ended.said else None

    def _half_done(self, ended: Ended) -> str | None:
        found, known = self._digests(), self.untroubled
        for name, now in found.items():
            allowed = {known.before[name], known.after[name]}
            if not self._scenario.exchange and ended.code < 0:
                allowed.add(None)
            if now not in allowed:
                return f"{name} is neither what it was nor what it was to be"
        if ended.code == 0 and found != known.after:
            return "ended well, but not with what was to be"
        try:
            self._scenario.sound(self._place)
        except Exception as error:
            return f"damaged: {error!r}"
        return None

    def _wrong_second(self) -> str | None:
        """What is wrong with a second process, which finds what a killed one left."""
        ended = self._acted(NONE)
        if ended.code != 0:
            return f"the second ended with {ended.code}: {ended.said[-300:]!r}"
        if self._digests() != self.untroubled.after:
            return "the second made something else"
        left = self._names() ^ self.untroubled.names
        return (
            f"after the second there is too much, or too little: {sorted(left)}" if left else None
        )

    def _untroubled(self) -> Untroubled:
        """Twice: what the first one caches for all is no part of it."""
        for _ in range(2):
            self._fresh()
            before, names_before = self._digests(), self._names()
            ended = self._acted(NONE)
            assert ended.code == 0, ended.said
        calls = tuple((self._work / "calls").read_text(encoding="utf-8").splitlines())
        written = sum(int(call.rpartition("\t")[2]) for call in calls)
        return Untroubled(before, self._digests(), names_before, self._names(), calls, written)

    def _fresh(self) -> None:
        shutil.rmtree(self._place.here, ignore_errors=True)
        self._place.here.mkdir(parents=True)
        self._scenario.prepare(self._place)

    def _digests(self) -> Digests:
        return {name: digest(self._place.here / name) for name in self._scenario.outputs}

    def _names(self) -> frozenset[str]:
        """All that lies there."""
        here = self._place.here
        return frozenset(p.relative_to(here).as_posix() for p in here.rglob("*")) - {"said"}

    def _acted(self, fault: Fault) -> Ended:
        """A process that acts while the fault waits for it."""
        said = (self._place.here if self._scenario.speaks else self._work) / "said"
        said.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            code = _NEVER
            try:
                code = self._act(fault, said)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, said.read_text(encoding="utf-8", errors="replace"))

    def _act(self, fault: Fault, said: Path) -> int:
        """What the process does; its exit code."""
        calls = os.open(self._work / "calls", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        output = os.open(said, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST_S, _LONGEST_S))
        signal.alarm(_LONGEST_S * _WALL_FACTOR)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interpose(self._place.here, fault, log=calls, exchange=self._scenario.exchange)
        code = self._scenario.act(self._place)
        sys.stdout.flush()
        return code
