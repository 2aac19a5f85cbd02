"""Lowers requests with the specbuild that Python finds, and compiles their kernels.

``compare_kernels.py`` starts it for each of two versions, and reads lines of JSON:

- once ``output`` has, for each request, its launches or why there are none: ``null``;
- then, for every source that a line on standard input requests, after its compilation: its digest,
  and the key of its cubin, or why it has none.

A source is a kernel's file with its constants; the digest is of the compiler's input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.compile.source import KernelSource, source_of
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

GPU = "sm_90a"


def launches_of(described: Mapping[str, Any]) -> tuple[OpLaunch, ...] | str:
    """Return the launches of a request of ``kernel_requests.py``, or why there are none."""
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


def preprocessed(source: KernelSource) -> str:
    """Return the source after g++'s preprocessor.

    It has no comments, blank lines and file names: the rest determines the machine code.
    """
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-D__CUDACC_RTC__"]
    command += [*source.definitions(), str(source.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def digests(kernels: Mapping[KernelSource, Kernel], jobs: int) -> dict[KernelSource, str]:
    """Return a digest of the compiler's input for each source."""
    options = (Compiler(GPU)._common, nvrtc.nvrtcVersion())

    def told(source: KernelSource) -> str:
        return hashlib.sha256(repr((preprocessed(source), options)).encode()).hexdigest()

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(kernels, pool.map(told, kernels), strict=True))


def compiled(kernel: Kernel, digest: str, store: Path, afresh: bool) -> dict[str, str]:
    """Return the record of a source: the key of its cubin, or the compiler's message.

    With ``afresh`` it is compiled even if it is cached. Register spills are not checked here.
    """
    cached = store / "known" / digest
    if not afresh and cached.is_file():
        return dict(json.loads(cached.read_text()))
    result = Compiler(GPU).compile([replace(kernel, hot=False)], lambda: None)
    if isinstance(result, Unsupported):
        code = {"problem": result.reason.partition(" (")[0]}
    else:
        [data] = result.files.values()
        code = {"cubin": hashlib.sha256(data).hexdigest()}
        _keep(store / "cubins" / code["cubin"], data)
    _keep(cached, json.dumps(code).encode())
    return code


def compile_all(
    args: argparse.Namespace, kernels: Mapping[str, Kernel], seconds: float | None
) -> None:
    """Print a line for each, by its digest; after the time limit no more are started."""
    for name in ("cubins", "known"):
        (args.store / name).mkdir(parents=True, exist_ok=True)
    end = None if seconds is None else time.monotonic() + seconds
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawned) as pool:
        begun = {
            pool.submit(compiled, kernel, digest, args.store, args.afresh): digest
            for digest, kernel in kernels.items()
        }
        try:
            for each in as_completed(begun, seconds):
                print(json.dumps([begun[each], each.result()]), flush=True)
                if end is not None and time.monotonic() > end:
                    break
        except TimeoutError:
            pass
        pool.shutdown(cancel_futures=True)


def _keep(file: Path, data: bytes) -> None:
    """Write a file that another process may write too."""
    created = file.with_name(f"{file.name}.{os.getpid()}")
    created.write_bytes(data)
    created.replace(file)


def _described(launch: OpLaunch, source: str) -> dict[str, Any]:
    fields = ("grid", "block", "shared_bytes", "arguments", "programmatic", "reads_early")
    kernel = launch.kernel
    return {
        "kernel": f"{kernel.folder}/{kernel.file}:{kernel.entry}",
        "entry": kernel.entry,
        "source": source,
        "launch": {name: getattr(launch, name) for name in (*fields, "triggers_late")},
    }


def main() -> int:
    """List the launches of the requests, and compile the requested ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--store", type=Path, required=True, help="keeps machine code")
    parser.add_argument("--afresh", action="store_true", help="compile what is stored, too")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    listed = [launches_of(each) for each in json.loads(args.requests.read_text())]
    launched = (launch for some in listed if not isinstance(some, str) for launch in some)
    kernels = {source_of(launch.kernel): launch.kernel for launch in launched}
    sources = digests(kernels, args.jobs)
    written = [
        {"refused": some}
        if isinstance(some, str)
        else {"launches": [_described(each, sources[source_of(each.kernel)]) for each in some]}
        for some in listed
    ]
    args.output.write_text(json.dumps(written))
    print("null", flush=True)
    requested, seconds = json.loads(sys.stdin.readline())
    by_digest = {digest: kernels[source] for source, digest in sources.items()}
    compile_all(args, {digest: by_digest[digest] for digest in requested}, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
