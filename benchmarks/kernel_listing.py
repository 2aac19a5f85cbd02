"""Lowers requests with the specbuild that Python finds, and compiles their kernels.

``compare_kernels.py`` starts it for each of two versions. Written are a JSON list, an item for each
request: its launches, each with the content that its cubin is kept by, or why it has none.
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


def preprocessed(kernel: Kernel) -> str | None:
    """The kernel's source as the compiler proper gets it; None without g++.

    Comments, blank lines and the names of files are gone: what is left decides the machine code.
    """
    source = source_of(kernel)
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-D__CUDACC_RTC__"]
    command += [*source.definitions(), str(source.path)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return None
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

    def of(self, kernels: Iterable[Kernel], jobs: int) -> dict[Kernel, dict[str, str]]:
        """What to write of each kernel: the cubin's content, or what the compiler says."""
        wanted = list(dict.fromkeys(kernels))
        with ThreadPoolExecutor(jobs) as pool:
            found = dict(zip(wanted, pool.map(self._code, wanted), strict=True))
        print(f"  {len(wanted)} kernels, {self._compiled} compiled", file=sys.stderr, flush=True)
        return found

    def _code(self, kernel: Kernel) -> dict[str, str]:
        text, compiler = preprocessed(kernel), Compiler(self._gpu)
        told = (text, kernel.entry, kernel.hot, compiler._common, nvrtc.nvrtcVersion())
        key = hashlib.sha256(repr(told).encode())
        known = self._known / key.hexdigest()
        if text is not None and not self._afresh and known.is_file():
            return dict(json.loads(known.read_text()))
        found = compiler.compile([kernel], lambda: None)
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
    codes = Codes("sm_90a", asked.store, afresh=asked.afresh).of(
        (launch.kernel for some in listed if not isinstance(some, str) for launch in some),
        asked.jobs,
    )
    written = [
        {"refused": some}
        if isinstance(some, str)
        else {"launches": [_described(launch, codes[launch.kernel]) for launch in some]}
        for some in listed
    ]
    asked.output.write_text(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
