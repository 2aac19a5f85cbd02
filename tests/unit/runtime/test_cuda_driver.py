"""The wrapper of cuda-bindings, with a stub of libcuda that records the calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")

SCRIPT = """
import numpy as np
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.cuda.gpu import LaunchConfig

def refused(call, *arguments):
    try:
        call(*arguments)
    except SpecbuildError as error:
        print(type(error).__name__, error)

gpu = open_gpu()
print(gpu.facts, gpu.free_bytes(), flush=True)
stream, near = gpu.new_stream(), gpu.allocate_host(4096)
one, two = gpu.allocate(4096), gpu.allocate(4096)
near.view[:] = np.arange(4096) % 251
gpu.upload(one, near.address, 4096, stream)
near.view[:] = 0
gpu.fill(one + 4, -2, 2, stream)
gpu.copy(two, one, 4096, stream)
gpu.download(near.address, two, 4096, stream)
gpu.synchronize(stream)
expected = (np.arange(4096) % 251).astype(np.uint8)
expected[4:12] = [254, 255, 255, 255] * 2
assert (near.view == expected).all()
timed, plain = gpu.new_event(timed=True), gpu.new_event()
gpu.new_event(sleeps=True)
gpu.record(timed, stream)
gpu.wait(plain)
assert gpu.elapsed_s(timed, timed) == 0.0025
refused(gpu.allocate, 5 << 30)
refused(gpu.load_module, b"damaged", "kernels/a.cubin")
function = gpu.function(gpu.load_module(b"cubin", "kernels/b.cubin"), "entry")
gpu.set_shared(function, 48 * 1024, 0)
gpu.set_shared(function, 100_000, 100)
values = np.array([0x123456789A, 0xFFFFFFFB], np.uint64)
pointers = values.ctypes.data + 8 * np.arange(2, dtype=np.uint64)
for programmatic in (True, False):
    config = LaunchConfig(function, (3, 2, 1), 256, 100_000, programmatic, pointers.ctypes.data)
    gpu.launch(config, stream)
gpu.begin_capture(stream)
gpu.launch(config, stream)
graph = gpu.end_capture(stream)
gpu.launch_graph(graph, stream)
gpu.release_graph(graph)
gpu.release(one)
gpu.release_host(near)
gpu.use()
gpu.close()
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).parent / "libcuda_stub.c"
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=300)
    return folder


def run(stub: Path, script: str, **variables: str) -> list[str]:
    environment = {**os.environ, **variables, "LD_LIBRARY_PATH": str(stub)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_call_reaches_the_driver_as_it_should(stub: Path) -> None:
    lines = run(stub, SCRIPT)
    # The stub and Python buffer their output separately.
    assert {line for line in lines if not line.startswith(("Gpu", "Unsupported"))} == {
        "event 0",
        "event 2",
        "event 3",
        "function entry",
        "attribute 8 49152",
        "attribute 9 0",
        "attribute 8 100000",
        "attribute 9 100",
        "launch 3,2,1 256,1,1 100000 attribute 6=1 arguments 123456789a -5",
        "launch 3,2,1 256,1,1 100000 arguments 123456789a -5",
        "capture 1",
        "graph",
        "close",
    }
    facts, memory, image = (x for x in lines if x.startswith(("Gpu", "Unsupported")))
    assert "name='Stub', capability=(9, 0), multiprocessors=132, driver_version=12080" in facts
    assert facts.endswith(str(3 << 30))
    assert "UnsupportedHereError allocating 5.00 GiB of device memory failed" in memory
    assert "loading kernels/a.cubin failed" in image


def test_reports_a_missing_device_in_one_line(stub: Path) -> None:
    script = "from specbuild.runtime.executors.cuda.driver import open_gpu\n"
    script += "try:\n    open_gpu()\nexcept Exception as e:\n    print(type(e).__name__, e)"
    (line,) = run(stub, script, STUB_NO_DEVICE="1")
    assert line.startswith("UnsupportedHereError the NVIDIA driver finds no usable GPU")
