"""Checks by machine code whether a tactic's kernels are those that were measured.

An entry has a digest of the kernels that its tactic launches at the entry's sizes
(``entry_request``), and the compiler's version. Entries of unchanged sources are valid, because a
compiler produces the same code for them. For changed sources the kernels are compiled and compared.
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
    """Return a digest of the kernels' machine code, in order; or why they do not compile."""
    digest = xxhash.xxh3_128()
    for kernel in dict.fromkeys(kernels):
        compiled = compiler.compile([kernel], lambda: None)
        if isinstance(compiled, Unsupported):
            return compiled
        [(file, data)] = compiled.files.items()
        digest.update(machine_code(data, file)[kernel.entry].digest.encode() + b"\0")
    return digest.hexdigest()


def entry_title(entry: TacticEntry) -> str:
    """Return an entry's title for messages: op, phase, largest tensor, rows and tactic."""
    first = next(name for name in ("x", "q", *entry.shapes) if name in entry.shapes)
    largest = next((n for n in ("weight", "gate_up", "k_pool") if n in entry.shapes), first)
    shapes = ", ".join(f"{name} {entry.shapes[name]}" for name in dict.fromkeys((first, largest)))
    tactic = ", ".join(f"{key} {value}" for key, value in entry.tactic.items()) or "the default"
    return f"{entry.op} ({entry.phase}; {shapes}): {tactic}"


class MeasuredCode:
    """Compares entries with the current kernels. Each kernel is compiled at most once.

    Methods raise SpecbuildError if the compiler is missing.
    """

    def __init__(self, target: Target, compiler: Compiler) -> None:
        self._target, self._compiler = target, compiler
        self._refusals: dict[str, Unsupported | None] = {}

    @property
    def compiler(self) -> str:
        """The version of NVRTC that compiles the current kernels."""
        return self._compiler.version

    def recorded(self, entry: TacticEntry) -> TacticEntry:
        """Return the entry with the digest of its current kernels, empty if they do not compile.

        An entry covers several numbers of rows, and the largest may not support its tactic.
        """
        digest = self._digest(entry)
        code = "" if isinstance(digest, Unsupported) else digest
        return replace(entry, code=code, compiler=self.compiler)

    def refusal(self, entry: TacticEntry) -> Unsupported | None:
        """Return why an entry of changed sources is invalid, or None if it is valid.

        It is valid if the code is equal. It is also accepted if another compiler produced the
        measured code: the codes cannot be compared then, and the sizes still match.
        """
        if entry.key not in self._refusals:
            self._refusals[entry.key] = self._compare(entry)
        return self._refusals[entry.key]

    def compile(self, entries: Iterable[TacticEntry]) -> None:
        """Compile the kernels of entries in parallel. Later comparisons report failures."""
        lowerings = map(self._lowered, entries)
        kernels = [
            launch.kernel
            for lowering in lowerings
            if not isinstance(lowering, Unsupported)
            for launch in lowering.launches
        ]
        self._compiler.compile(kernels, lambda: None)

    def valid_entries(
        self, file: TacticFile, *, compare_all: bool = False
    ) -> tuple[TacticFile, tuple[Unsupported, ...]]:
        """Return the file with its valid entries, and the reasons against the others.

        Entries of changed sources are invalid if another compiler produced their code. Valid
        entries get the current source files of their kernels. With ``compare_all`` entries of
        unchanged sources are also compared, because a changed lowering gives other constants.
        """
        changed = set(file.stale_sources())
        valid, refused = [], []
        for entry in file.entries:
            if not changed.intersection(entry.sources):
                reason = self.refusal(entry) if compare_all else None
                if reason is None:
                    valid.append(entry)
                else:
                    refused.append(reason)
                continue
            reason = self._strict_mismatch(entry)
            if reason is None:
                valid.append(replace(entry, sources=self._sources(entry)))
            else:
                refused.append(reason)
        return tactic_file(file.gpu, file.device, valid), tuple(refused)

    def _strict_mismatch(self, entry: TacticEntry) -> Unsupported | None:
        if entry.compiler != self.compiler:
            return Unsupported(
                f"{entry_title(entry)}: its kernels were compiled by NVRTC "
                f"{entry.compiler or '?'}, but this is {self.compiler}"
            )
        return self.refusal(entry)

    def _compare(self, entry: TacticEntry) -> Unsupported | None:
        if entry.compiler != self.compiler:
            return None
        digest = self._digest(entry)
        if isinstance(digest, Unsupported):
            return Unsupported(
                f"{entry_title(entry)}: its kernels cannot be compiled: {digest.reason}"
            )
        if digest != entry.code:
            return Unsupported(
                f"{entry_title(entry)}: the machine code of {', '.join(entry.sources)} changed "
                "since it was measured"
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
        """Return the kernel files of all candidates; the entry's if the op is missing."""
        request = entry_request(entry, self._target)
        if isinstance(request, Unsupported):
            return entry.sources
        op = op_named(entry.op)
        candidates = op.tactics(request) if op.tactics is not None else ({},)
        lowered = (self._lowered(replace(entry, tactic=dict(tactic))) for tactic in candidates)
        kernels = (
            launch.kernel
            for candidate in lowered
            if not isinstance(candidate, Unsupported)
            for launch in candidate.launches
        )
        return tuple(sorted({f"{kernel.folder}/{kernel.file}" for kernel in kernels}))


def compiler_mismatches(entries: Iterable[TacticEntry], version: str) -> tuple[Unsupported, ...]:
    """Return a note about entries that another compiler produced; none if there are none."""
    foreign = {entry.key: entry.compiler for entry in entries if entry.compiler != version}
    if not foreign:
        return ()
    others = ", ".join(sorted(set(foreign.values())))
    return (
        Unsupported(
            f"{len(foreign)} tactics were measured with kernels of NVRTC {others}, but these are "
            f"compiled by {version}: the tactics are selected by sizes only"
        ),
    )
