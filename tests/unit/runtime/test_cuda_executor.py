"""What the CUDA executor is made of: memory, uploads, programs, timing, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import HOPPER, FakeGpu, FakeKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_device import toy_cuda
from toy_engine import run
from toy_plan import SHAPES
from xxhash import xxh3_128_hexdigest

from specbuild.runtime.errors import EngineFileError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.memory import DeviceMemory, Ports, footprint
from specbuild.runtime.executors.cuda.programs import ProgramRunner, read_launches
from specbuild.runtime.executors.cuda.staging import Staging
from specbuild.runtime.executors.cuda.timing import (
    profile_program,
    time_between,
    time_program,
)
from specbuild.runtime.executors.cuda.upload import Piece, WeightsUpload
from specbuild.runtime.manifest import StoredFile
from specbuild.runtime.plan import ZEROED, Buffer, CompiledKernel, Plan, Port, ProgramEntry
from specbuild.runtime.request import GenerateParams

RANDOM = np.random.default_rng(5)


def small_plan(**changes: object) -> Plan:
    buffers = (
        Buffer("w", "weights", 1000),
        Buffer("cache:full", "cache", 3000),
        Buffer("x", "state", 700),
        Buffer("ring", "ring", 900),
        Buffer("arena", "arena", 5000),
        Buffer("v", "weights", 513),
    )
    plan = Plan("sm_90a", 132, 13000, buffers, (), (), ())
    return dataclasses.replace(plan, **changes)


# Memory


def test_buffers_do_not_overlap_and_all_but_weights_are_cleared() -> None:
    gpu, plan = FakeGpu(), small_plan()
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    gpu.synchronize(stream)
    assert footprint(plan).total == 1024 + 1024 + 3072 + 1024 + 5120
    spans = []
    for buffer, address in zip(plan.buffers, memory.addresses, strict=True):
        assert address % 512 == 0
        data = gpu.view(address, buffer.bytes)
        assert data.all() if buffer.space == "weights" else not data.any()
        spans.append((address, address + buffer.bytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    # What the device writes at the ring's address shows on the host.
    gpu.view(memory.addresses[3], 900)[:] = 7
    assert (memory.ring[3] == 7).all()
    assert gpu.allocations == 2
    memory.close()
    assert gpu.allocations == 0


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers_and_nothing_is_allocated() -> None:
    gpu = FakeGpu(facts=dataclasses.replace(HOPPER, total_bytes=3 << 30))
    plan = small_plan(
        buffers=(
            Buffer("w", "weights", 2 << 30),
            Buffer("cache:full", "cache", 1 << 30),
            Buffer("arena", "arena", 1 << 29),
        )
    )
    with pytest.raises(UnsupportedHereError) as refused:
        DeviceMemory(gpu, plan, gpu.new_stream())
    message = str(refused.value)
    assert "weights 2.00, caches 1.00, the rest 0.75: 3.75 GiB" in message
    assert "3.00 GiB are free" in message
    assert "--max-seq-len" in message
    assert gpu.allocations == 0


@pytest.mark.parametrize(
    "port",
    [
        Port("p", 9, 0, (1,), "int32"),
        Port("p", 2, 0, (176,), "int32"),
        Port("p", 2, 4, (175,), "int32"),
        Port("p", 2, -4, (1,), "int32"),
        Port("p", 2, 0, (), "int32"),
        Port("p", 2, 0, (0,), "int32"),
        Port("p", 2, 0, (1,), "int64"),
    ],
)
def test_a_port_outside_its_buffer_is_refused(port: Port) -> None:
    gpu, plan = FakeGpu(), small_plan(ports=(port,))
    memory = DeviceMemory(gpu, plan, gpu.new_stream())
    with pytest.raises(EngineFileError, match="'p'"):
        Ports(plan, memory)


@pytest.mark.parametrize(
    ("shape", "agree"),
    [
        ((4,), True),
        ((4, 3), True),
        ((4, 3, 9), True),
        ((5,), False),
        ((4, 2), False),
        ((5, 3), False),
    ],
)
def test_ports_of_the_ring_have_steps_and_sequences_alike(
    shape: tuple[int, ...], agree: bool
) -> None:
    ports = (Port("ring.x", 2, 0, shape, "int32"), Port("ring.tokens", 2, 0, (4, 3, 2), "int32"))
    gpu, plan = FakeGpu(), small_plan(ports=(*ports, Port("p", 2, 0, (7,), "int32")))
    memory = DeviceMemory(gpu, plan, gpu.new_stream())
    if agree:
        assert Ports(plan, memory).find("ring.x") is not None
        return
    with pytest.raises(EngineFileError, match="differ in steps or sequences"):
        Ports(plan, memory)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_staged_uploads_arrive_whole_however_late_they_run(sizes: list[int]) -> None:
    gpu = FakeGpu()
    stream = gpu.new_stream()
    staging = Staging(gpu, stream, 2048)
    place = gpu.allocate(sum(sizes))
    expected, offset = [], 0
    for size in sizes:
        values = RANDOM.integers(0, 256, size, dtype=np.uint8)
        expected.append(values.copy())
        staging.upload(place + offset, values)
        values[:] = 0  # free to change at once
        offset += size
    assert (staging.download(place, offset) == np.concatenate(expected)).all()


# Uploads


def stored(path: Path, data: np.ndarray, chunk: int) -> StoredFile:
    path.write_bytes(data.tobytes())
    digests = [xxh3_128_hexdigest(data[i : i + chunk]) for i in range(0, len(data), chunk)]
    return StoredFile(len(data), "0" * 32, chunk, tuple(digests))


class Checked:
    """Compares digests with an entry's."""

    def __init__(self, entry: StoredFile) -> None:
        self.entry, self.seen = entry, []

    def __call__(self, chunk: int, digest: str) -> None:
        self.seen.append(chunk)
        if digest != self.entry.chunks[chunk]:
            raise EngineFileError(f"chunk {chunk} is damaged")


@pytest.mark.parametrize(("size", "chunk"), [(1, 64), (1000, 64), (4096, 4096), (100_001, 777)])
def test_every_piece_arrives_and_every_chunk_is_checked(
    tmp_path: Path, size: int, chunk: int
) -> None:
    data = RANDOM.integers(0, 256, size, dtype=np.uint8)
    entry = stored(tmp_path / "file", data, chunk)
    gpu = FakeGpu()
    cuts = sorted({0, size, *RANDOM.integers(0, size + 1, 12).tolist()})
    spans = list(itertools.pairwise(cuts))
    # One region may be wanted twice, another by nobody.
    spans = [*spans[1:], *spans[-1:], (0, size // 2)]
    pieces = [Piece(a, b - a, gpu.allocate(b - a)) for a, b in spans if b > a]
    checked, held = Checked(entry), gpu.allocations
    upload = WeightsUpload(gpu, gpu.new_stream(), readers=3, check=checked)
    upload.run(tmp_path / "file", entry, pieces)
    for piece in pieces:
        end = piece.offset + piece.bytes
        assert (gpu.view(piece.address, piece.bytes) == data[piece.offset : end]).all()
    assert checked.seen == list(range(len(entry.chunks)))
    assert gpu.allocations == held


def test_a_damaged_chunk_ends_the_upload_and_gives_its_memory_back(tmp_path: Path) -> None:
    data = RANDOM.integers(0, 256, 5000, dtype=np.uint8)
    entry = stored(tmp_path / "file", data, 256)
    data[7 * 256 + 3] ^= 16
    (tmp_path / "file").write_bytes(data.tobytes())
    gpu = FakeGpu()
    place = gpu.allocate(5000)
    upload = WeightsUpload(gpu, gpu.new_stream(), readers=2, check=Checked(entry))
    with pytest.raises(EngineFileError, match="chunk 7"):
        upload.run(tmp_path / "file", entry, [Piece(0, 5000, place)])
    assert gpu.allocations == 1
    (tmp_path / "file").write_bytes(data[:3000].tobytes())
    with pytest.raises(EngineFileError, match=r"ends at byte 3000|chunk 7"):
        upload.run(tmp_path / "file", entry, [Piece(0, 5000, place)])


def test_a_file_in_one_piece_is_refused(tmp_path: Path) -> None:
    gpu = FakeGpu()
    upload = WeightsUpload(gpu, gpu.new_stream(), readers=2, check=lambda *_: None)
    for chunk in (None, 1 << 30):
        entry = StoredFile(10, "0" * 32, chunk, ())
        with pytest.raises(EngineFileError, match="not stored in chunks"):
            upload.run(tmp_path / "file", entry, [])


# Programs


def program_json(launches: object) -> bytes:
    return json.dumps({"ops": [], "launches": launches, "lifetimes": []}).encode()


def launch_of(**changes: object) -> dict[str, object]:
    launch: dict[str, object] = {"kernel": 0, "op": 0, "grid": [2, 1, 1], "block": 64}
    launch |= {"shared_bytes": 100_000, "programmatic": False}
    launch |= {"arguments": [[0, 2, 8], [1, -5], [2, 0x3FC00000], [3]]}
    return launch | changes


KERNELS = (CompiledKernel("op/kernel.cu:one", "one.cubin", "one", 32, 0, 0),)
ENTRY = ProgramEntry("p", "p.json", "score", 1, 1, 0, 0, 0, False, 1)


def runner_of(launches: object, seen: list[tuple[int, ...]], count: int = 1) -> ProgramRunner:
    entries = {"p.json": program_json(launches), "one.cubin": b"cubin of one"}
    gpu = FakeGpu({"one": FakeKernel(lambda *values: seen.append(values), "piip")})
    plan = small_plan(kernels=KERNELS)
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    runner = ProgramRunner(gpu, plan, memory.addresses, entries.__getitem__, stream)
    runner.entry = dataclasses.replace(ENTRY, launches=count)
    runner.memory = memory
    return runner


def test_arguments_reach_the_kernel_as_the_plan_has_them() -> None:
    seen: list[tuple[int, ...]] = []
    runner = runner_of([launch_of()], seen)
    for _ in range(3):
        runner.start(runner.entry)
    runner.gpu.synchronize(runner.stream)
    assert seen == [(runner.memory.addresses[2] + 8, -5, 0x3FC00000, 0)] * 3
    assert runner.gpu.shared == {"one": (100_000, 100)}
    # One module, one graph, replayed.
    assert runner.gpu.log == ["load one.cubin", "graph", "graph", "graph"]


def test_kernels_say_what_they_ask_for_at_most() -> None:
    """However little: a multiprocessor divides its memory by it."""
    for sizes, most in (([0], 0), ([500, 3000], 3000), ([3000, 500], 3000)):
        runner = runner_of([launch_of(shared_bytes=n) for n in sizes], [], count=len(sizes))
        runner.start(runner.entry)
        # Two CTAs of 64 threads with 32 registers fit an SM.
        assert runner.gpu.shared == {"one": (most, -1)}


@pytest.mark.parametrize(
    "launches",
    [
        [launch_of(kernel=1)],
        [launch_of(kernel=-1)],
        [launch_of(grid=[0, 1, 1])],
        [launch_of(grid=[1, 1])],
        [launch_of(block=True)],
        [launch_of(block="32")],
        [launch_of(shared_bytes=-1)],
        [launch_of(programmatic=1)],
        [launch_of(arguments=[[0, 6, 0]])],
        [launch_of(arguments=[[0, -1, 0]])],
        [launch_of(arguments=[[0, 2, 701]])],
        [launch_of(arguments=[[0, 2, -1]])],
        [launch_of(arguments=[[1, 2**31]])],
        [launch_of(arguments=[[2, -1]])],
        [launch_of(arguments=[[4, 0]])],
        [launch_of(arguments=[[]])],
        [launch_of(arguments=[7])],
        [launch_of(), launch_of()],
        [],
        [7],
        {},
        None,
    ],
)
def test_a_malformed_program_is_refused(launches: object) -> None:
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(program_json(launches), small_plan(kernels=KERNELS), ENTRY)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"launches": NaN}', b"[" * 100_000])
def test_what_is_no_program_is_refused(data: bytes) -> None:
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(data, small_plan(kernels=KERNELS), ENTRY)


def test_times_and_profiles_run_what_they_say() -> None:
    seen: list[tuple[int, ...]] = []
    launches = [launch_of(op=i, arguments=[[0, 2, 0], [1, i], [2, 0], [3]]) for i in range(3)]
    runner, resets = runner_of(launches, seen, count=3), []
    took_s = time_program(runner, runner.entry, 5, reset=lambda: resets.append(len(seen)))
    # The fake's clock counts operations: three kernels and the mark behind them.
    assert took_s == 4
    assert len(seen) == 3 * len(resets) == 3 * 8
    seen.clear()
    profile = profile_program(runner, runner.entry, 2)
    assert [(p.kernel, p.op, p.added_s) for p in profile] == [
        ("op/kernel.cu:one", 0, 2),
        ("op/kernel.cu:one", 1, 1),
        ("op/kernel.cu:one", 2, 1),
    ]
    assert [values[1] for values in seen] == [0] * 5 + [0, 1] * 5 + [0, 1, 2] * 5


def test_every_run_of_a_profile_begins_with_the_scratch_that_ops_expect() -> None:
    """An op of two launches: what the first counts the second uses up, unless it is cut off."""
    gpu, used = FakeGpu(), []

    def count(address: int) -> None:
        gpu.view(address, 8).view(np.int32)[1] += 1

    def use(address: int) -> None:
        words = gpu.view(address, 8).view(np.int32)
        used.append(int(words[1]))
        words[:] = 0

    gpu.kernels |= {"count": FakeKernel(count, "p"), "use": FakeKernel(use, "p")}
    kernels = tuple(
        CompiledKernel(f"op/kernel.cu:{name}", f"{name}.cubin", name, 32, 0, 0)
        for name in gpu.kernels
    )
    plan = small_plan(kernels=kernels)
    plan = dataclasses.replace(plan, buffers=(*plan.buffers, Buffer(ZEROED, "state", 8)))
    launches = [launch_of(kernel=i % 2, op=i // 2, arguments=[[0, 6, 0]]) for i in range(4)]
    entries = {f"{name}.cubin": f"cubin of {name}".encode() for name in gpu.kernels}
    entries |= {"p.json": program_json(launches)}
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    runner = ProgramRunner(gpu, plan, memory.addresses, entries.__getitem__, stream)
    entry = dataclasses.replace(ENTRY, launches=4)
    profile = profile_program(runner, entry, 2)
    assert [p.kernel.partition(":")[2] for p in profile] == ["count", "use"] * 2
    assert used == [1] * 5 * (1 + 1 + 2)
    runner.start(entry)
    gpu.synchronize(stream)
    assert used[-2:] == [1, 1] and len(used) == 22


@pytest.mark.parametrize("gap", [0, 3])
def test_the_time_between_two_graphs_is_not_that_of_their_launches(gap: int) -> None:
    seen: list[tuple[int, ...]] = []
    runner = runner_of([launch_of(), launch_of()], seen, count=2)
    launch_graph = runner.gpu.launch_graph

    def after_a_gap(graph, stream) -> None:
        for _ in range(gap):
            runner.gpu.enqueue(stream, lambda: None)
        launch_graph(graph, stream)

    runner.gpu.launch_graph = after_a_gap
    resets: list[int] = []
    found = time_between(runner, runner.entry, 5, 2, reset=lambda: resets.append(len(seen)))
    # The first graph's gap is there both times.
    assert found == gap
    assert len(seen) == 2 * 5 * len(resets) == 2 * 5 * 2 * 5


@pytest.mark.parametrize("steady", [6, 7, 8, 9])
def test_a_clock_that_drops_is_not_time_between_graphs(steady: int) -> None:
    runner, timings = runner_of([launch_of(), launch_of()], [], count=2), itertools.count()
    elapsed_s = runner.gpu.elapsed_s

    def by_a_clock_that_drops(first, last) -> float:
        return elapsed_s(first, last) * (1 if next(timings) < steady else 2)

    runner.gpu.elapsed_s = by_a_clock_that_drops
    assert time_between(runner, runner.entry, 5, 3) == 0
    assert next(timings) > steady + 1


def test_ports_hold_what_is_written_and_refuse_what_does_not_fit() -> None:
    executor = toy_cuda().engine.executor
    port = executor.port("pending_tokens")
    values = RANDOM.integers(0, 99, port.shape, dtype=np.int32)
    executor.write("pending_tokens", values)
    executor.write("pending_tokens", -values[1:2], row=2)
    executor.fill("temperature", 0.75, row=1, rows=2)
    executor.copy("pending_tokens", 2, "pending_tokens", 0)
    found = executor.read("pending_tokens")
    assert (found[1] == values[1]).all()
    assert (found[[0, 2]] == -values[1]).all()
    assert executor.read("temperature", rows=3).tolist() == [0.0, 0.75, 0.75]
    assert executor.port("nothing") is None
    with pytest.raises(SpecbuildError, match="do not fit"):
        executor.write("pending_tokens", values, row=1)
    with pytest.raises(EngineFileError, match="no port 'nothing'"):
        executor.read("nothing")


def test_closing_gives_everything_back() -> None:
    toy = toy_cuda()
    run(toy.engine, [[1, 2]], GenerateParams(max_new_tokens=3), speculation=SHAPES[0])
    toy.engine.executor.close()
    assert toy.device.gpu.allocations == 1  # the host memory of the test's own weights
    assert toy.device.gpu.closed
