"""Lowers requests with the specbuild that Python finds, and compiles their kernels.

``compare_kernels.py`` starts it for each of two versions. Written is a JSON list, an item for each
request: its launches, each with what the compiler is given, and the content that its cubin is kept
by, or why it has none. Nothing is compiled before a line on standard input names a file with the
digests of what need not be: both versions give it to the compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.compile.source import source_of
from specbuild.plugins_cuda.launches import (
    Kernel,
    LoweringRequest,
    OpLaunch,
    Target,
    TensorInfo,
    Unsupported,
)
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError


def launches_of(described: Mapping[str, Any]) -> tuple[OpLaunch, ...] | str:
    """The launches of a request of ``kernel_requests.py``, or why there are none."""
    tensors = {n: TensorInfo(tuple(shape), t) for n, (t, shape) in described["tensors"].items()}
    request = LoweringRequest(
        tensors,
        described["attributes"],
        described["phase"],
        Target(**described["target"]),
        described["tactic"],
        described["uneven"],
    )
    try:
        op = op_named(described["op"])
        lowered = op.lowered(request)
    except (SpecbuildError, KeyError) as error:
        return str(error)
    return lowered.reason if isinstance(lowered, Unsupported) else lowered.launches


def preprocessed(kernel: Kernel) -> str:
    """The kernel's source as the compiler proper gets it, by g++.

    Comments, blank lines and the names of files are gone: what is left decides the machine code.
    """
    source = source_of(kernel)
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-D__CUDACC_RTC__"]
    command += [*source.definitions(), str(source.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


class Codes:
    """Compiles kernels, each once, and keeps cubins by their content.

    ``afresh``: also those of a source that was compiled before.
    """

    def __init__(self, gpu: str, store: Path, *, afresh: bool) -> None:
        self._gpu, self._afresh = gpu, afresh
        self._cubins, self._known = store / "cubins", store / "known"
        for folder in (self._cubins, self._known):
            folder.mkdir(parents=True, exist_ok=True)
        self._said, self._compiled = threading.Lock(), 0

    def sources(self, kernels: Iterable[Kernel], jobs: int) -> dict[Kernel, str]:
        """A digest of what the compiler is given of each kernel."""
        wanted = list(dict.fromkeys(kernels))
        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip(wanted, pool.map(self._source, wanted), strict=True))

    def of(self, sources: Mapping[Kernel, str], jobs: int) -> dict[Kernel, dict[str, str]]:
        """What to write of each kernel: the cubin's content, or what the compiler says."""
        with ThreadPoolExecutor(jobs) as pool:
            made = pool.map(self._code, sources.keys(), sources.values())
            found = dict(zip(sources, made, strict=True))
        print(f"  {len(sources)} kernels, {self._compiled} compiled", file=sys.stderr, flush=True)
        return found

    def _source(self, kernel: Kernel) -> str:
        options = (Compiler(self._gpu)._common, nvrtc.nvrtcVersion())
        told = (preprocessed(kernel), kernel.entry, kernel.hot, options)
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def _code(self, kernel: Kernel, source: str) -> dict[str, str]:
        known = self._known / source
        if not self._afresh and known.is_file():
            return dict(json.loads(known.read_text()))
        found = Compiler(self._gpu).compile([kernel], lambda: None)
        with self._said:
            self._compiled += 1
            if self._compiled % 50 == 0:
                print(f"  {self._compiled} compiled", file=sys.stderr, flush=True)
        if isinstance(found, Unsupported):
            code = {"problem": found.reason.partition(" (")[0]}
        else:
            [data] = found.files.values()
            code = {"cubin": hashlib.sha256(data).hexdigest()}
            _keep(self._cubins / code["cubin"], data)
        _keep(known, json.dumps(code).encode())
        return code


def _keep(file: Path, data: bytes) -> None:
    """Writes a file that another thread may write too."""
    made = file.with_name(f"{file.name}.{threading.get_ident()}")
    made.write_bytes(data)
    made.replace(file)


def _described(launch: OpLaunch, code: Mapping[str, str]) -> dict[str, Any]:
    fields = ("grid", "block", "shared_bytes", "arguments", "programmatic", "reads_early")
    kernel = launch.kernel
    return {
        "kernel": f"{kernel.folder}/{kernel.file}:{kernel.entry}",
        "entry": kernel.entry,
        "hot": kernel.hot,
        "launch": {name: getattr(launch, name) for name in (*fields, "triggers_late")},
        **code,
    }


def main() -> int:
    """Lists what the requests launch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--store", type=Path, required=True, help="keeps machine code")
    parser.add_argument("--afresh", action="store_true", help="compile what is stored, too")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    listed = [launches_of(each) for each in json.loads(asked.requests.read_text())]
    codes = Codes("sm_90a", asked.store, afresh=asked.afresh)
    launched = (launch for some in listed if not isinstance(some, str) for launch in some)
    sources = codes.sources((launch.kernel for launch in launched), asked.jobs)
    print(json.dumps(sorted(sources.values())), flush=True)
    common = set(json.loads(Path(sys.stdin.readline().strip()).read_text()))
    found = codes.of({k: v for k, v in sources.items() if v not in common}, asked.jobs)

    def described(launch: OpLaunch) -> dict[str, Any]:
        source = {"source": sources[launch.kernel]}
        return _described(launch, source | found.get(launch.kernel, {}))

    written = [
        {"refused": some}
        if isinstance(some, str)
        else {"launches": [described(launch) for launch in some]}
        for some in listed
    ]
    asked.output.write_text(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
