"""Whether a tactic's kernels are those that it was measured with, by their machine code.

An entry holds the digest of what its tactic launches at the entry's own sizes (``entry_request``),
and the compiler that made it. Sources that are what they were need no second look: a compiler gives
the same code for them. Where they changed, the kernels are compiled and compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import xxhash

from specbuild.builder.backends.cuda.compile.machine_code import machine_code
from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tactics.entry_request import entry_request
from specbuild.builder.backends.cuda.tactics.tactic_file import TacticEntry, TacticFile, tactic_file
from specbuild.plugins_cuda.launches import Kernel, Lowering, Target, Unsupported
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError


def code_digest(kernels: Iterable[Kernel], compiler: Compiler) -> str | Unsupported:
    """One digest of the machine code of kernels, in their order; or why there is none."""
    digest = xxhash.xxh3_128()
    for kernel in dict.fromkeys(kernels):
        compiled = compiler.compile([kernel], lambda: None)
        if isinstance(compiled, Unsupported):
            return compiled
        [(file, data)] = compiled.files.items()
        digest.update(machine_code(data, file)[kernel.entry].digest.encode() + b"\0")
    return digest.hexdigest()


def named(entry: TacticEntry) -> str:
    """An entry as messages call it: its op, its weight or pool, its rows, its tactic."""
    first = next(name for name in ("x", "q", *entry.shapes) if name in entry.shapes)
    largest = next((n for n in ("weight", "gate_up", "k_pool") if n in entry.shapes), first)
    shapes = ", ".join(f"{name} {entry.shapes[name]}" for name in dict.fromkeys((first, largest)))
    tactic = ", ".join(f"{key} {value}" for key, value in entry.tactic.items()) or "the default"
    return f"{entry.op} ({entry.phase}; {shapes}): {tactic}"


class MeasuredCode:
    """Compares entries with the kernels that are here; each is compiled once at most.

    Methods raise SpecbuildError where the compiler is missing.
    """

    def __init__(self, target: Target, compiler: Compiler) -> None:
        self._target, self._compiler = target, compiler
        self._refusals: dict[str, Unsupported | None] = {}

    @property
    def compiler(self) -> str:
        """The version of NVRTC that compiles what is compared."""
        return self._compiler.version

    def recorded(self, entry: TacticEntry) -> TacticEntry:
        """The entry with the code that its tactic launches here; without where it has none.

        An entry stands for several counts of rows: at the largest its tactic may be unknown.
        """
        found = self._digest(entry)
        code = "" if isinstance(found, Unsupported) else found
        return replace(entry, code=code, compiler=self.compiler)

    def refusal(self, entry: TacticEntry) -> Unsupported | None:
        """Why an entry whose sources changed does not hold here; None where it does.

        It does where the code is the same. It is also taken where another compiler made the code:
        nothing can be said then, and its sizes are still those that were measured.
        """
        if entry.key not in self._refusals:
            self._refusals[entry.key] = self._compared(entry)
        return self._refusals[entry.key]

    def compile(self, entries: Iterable[TacticEntry]) -> None:
        """Compile what entries launch in parallel; the comparisons that follow report failures."""
        lowerings = map(self._lowered, entries)
        kernels = [
            launch.kernel
            for lowering in lowerings
            if not isinstance(lowering, Unsupported)
            for launch in lowering.launches
        ]
        self._compiler.compile(kernels, lambda: None)

    def held(
        self, file: TacticFile, *, compare_all: bool = False
    ) -> tuple[TacticFile, tuple[Unsupported, ...]]:
        """The file of the sources that are here: the entries that hold, and why others do not.

        Code of changed sources that another compiler made cannot be compared, and does not hold.
        What holds names the files that its kernels lie in now. With ``compare_all`` entries of
        unchanged sources are compared too: a changed lowering gives them other constants.
        """
        stale = set(file.stale_sources())
        kept, refused = [], []
        for entry in file.entries:
            if not stale.intersection(entry.sources):
                unchanged = self.refusal(entry) if compare_all else None
                if unchanged is None:
                    kept.append(entry)
                else:
                    refused.append(unchanged)
                continue
            reason = self._strict_refusal(entry)
            if reason is None:
                kept.append(replace(entry, sources=self._sources(entry)))
            else:
                refused.append(reason)
        return tactic_file(file.gpu, file.device, kept), tuple(refused)

    def _strict_refusal(self, entry: TacticEntry) -> Unsupported | None:
        if entry.compiler != self.compiler:
            return Unsupported(
                f"{named(entry)}: its kernels were compiled by NVRTC {entry.compiler or '?'}, this "
                f"is {self.compiler}"
            )
        return self.refusal(entry)

    def _compared(self, entry: TacticEntry) -> Unsupported | None:
        if entry.compiler != self.compiler:
            return None
        found = self._digest(entry)
        if isinstance(found, Unsupported):
            return Unsupported(f"{named(entry)}: not measured with these kernels: {found.reason}")
        if found != entry.code:
            return Unsupported(
                f"{named(entry)}: the kernels of {', '.join(entry.sources)} have other machine "
                "code than when it was measured"
            )
        return None

    def _digest(self, entry: TacticEntry) -> str | Unsupported:
        lowered = self._lowered(entry)
        if isinstance(lowered, Unsupported):
            return lowered
        return code_digest((launch.kernel for launch in lowered.launches), self._compiler)

    def _lowered(self, entry: TacticEntry) -> Lowering | Unsupported:
        request = entry_request(entry, self._target)
        if isinstance(request, Unsupported):
            return request
        try:
            return op_named(entry.op).lowered(request)
        except SpecbuildError as error:
            return Unsupported(str(error))

    def _sources(self, entry: TacticEntry) -> tuple[str, ...]:
        """The kernel files that any candidate launches; those it names where it has no op here."""
        request = entry_request(entry, self._target)
        if isinstance(request, Unsupported):
            return entry.sources
        op = op_named(entry.op)
        candidates = op.tactics(request) if op.tactics is not None else ({},)
        lowered = (self._lowered(replace(entry, tactic=dict(tactic))) for tactic in candidates)
        kernels = (
            launch.kernel
            for some in lowered
            if not isinstance(some, Unsupported)
            for launch in some.launches
        )
        return tuple(sorted({f"{kernel.folder}/{kernel.file}" for kernel in kernels}))


def of_other_compilers(entries: Iterable[TacticEntry], version: str) -> tuple[Unsupported, ...]:
    """What a report says of entries whose code another compiler made; nothing where none is."""
    foreign = {entry.key: entry.compiler for entry in entries if entry.compiler != version}
    if not foreign:
        return ()
    others = ", ".join(sorted(set(foreign.values())))
    return (
        Unsupported(
            f"{len(foreign)} tactics were measured with kernels of NVRTC {others}, these are "
            f"compiled by {version}: they are taken by their sizes alone"
        ),
    )
