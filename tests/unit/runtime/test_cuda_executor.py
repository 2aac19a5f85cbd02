"""The CUDA executor: programs, timing, ports, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from fake_gpu import FakeGpu, FakeKernel
from toy_cubin import toy_cubin
from toy_device import toy_cuda
from toy_engine import run
from toy_plan import SHAPES, small_plan

from specbuild.runtime.engine_dir.plan import ZEROED, Buffer, CompiledKernel, Port, ProgramEntry
from specbuild.runtime.engine_dir.tensor_table import with_table
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.cuda.memory import DeviceMemory
from specbuild.runtime.executors.cuda.program_file import read_launches
from specbuild.runtime.executors.cuda.programs import ProgramRunner, RankAddresses
from specbuild.runtime.measure.graph_timing import (
    profile_program,
    time_between,
    time_overlap,
    time_program,
)
from specbuild.runtime.request import GenerateParams

RANDOM = np.random.default_rng(5)


# Programs


# The buffer of index 2 from byte 8 on, and all of it; three ops have both.
TENSORS = {
    "x": {"buffer": 2, "offset": 8, "shape": [173], "dtype": "float32"},
    "y": {"buffer": 2, "offset": 0, "shape": [700], "dtype": "uint8"},
}
OPS = [{"op": "op", "attributes": {}, "inputs": TENSORS, "outputs": {}}] * 3


def program_json(launches: object, ops: object = OPS, lifetimes: object = ()) -> bytes:
    program = {"ops": ops, "launches": launches, "lifetimes": lifetimes}
    return json.dumps(with_table(program)).encode()


def launch_of(**changes: object) -> dict[str, object]:
    launch: dict[str, object] = {"kernel": 0, "op": 0, "grid": [2, 1, 1], "block": 64}
    launch |= {"shared_bytes": 100_000, "programmatic": False}
    launch |= {"arguments": [[0, 2, 8], [1, 5], [2, 0x3FC00000], [3]]}
    return launch | changes


KERNELS = (CompiledKernel("op/kernel.cu:one", "one.cubin", "one", 32, 0, 0),)
ENTRY = ProgramEntry("p", "p.json", "score", 1, 1, 0, 0, 0, False, 1)


def runner_of(launches: object, seen: list[tuple[int, ...]], count: int = 1) -> ProgramRunner:
    entries = {"p.json": program_json(launches), "one.cubin": toy_cubin({"one": (8, 4, 4, 8)})}
    gpu = FakeGpu({"one": FakeKernel(lambda *values: seen.append(values), "piip")})
    plan = small_plan(kernels=KERNELS)
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    runner = ProgramRunner(gpu, plan, RankAddresses(memory.addresses), entries.__getitem__, stream)
    runner.entry = dataclasses.replace(ENTRY, launches=count)
    runner.memory = memory
    return runner


def test_arguments_reach_the_kernel_as_the_plan_has_them() -> None:
    seen: list[tuple[int, ...]] = []
    runner = runner_of([launch_of()], seen)
    for _ in range(3):
        runner.start(runner.entry)
    runner.gpu.synchronize(runner.stream)
    assert seen == [(runner.memory.addresses[2] + 8, 5, 0x3FC00000, 0)] * 3
    assert runner.gpu.shared == {"one": (100_000, 100)}
    # One module, one graph, replayed.
    assert runner.gpu.log == ["load one.cubin", "graph", "graph", "graph"]


def test_kernels_declare_their_maximum_shared_memory() -> None:
    """Even for small kernels: a multiprocessor divides its memory by the maximum."""
    for sizes, most in (([0], 0), ([500, 3000], 3000), ([3000, 500], 3000)):
        runner = runner_of([launch_of(shared_bytes=n) for n in sizes], [], count=len(sizes))
        runner.start(runner.entry)
        # Two CTAs of 64 threads with 32 registers fit an SM.
        assert runner.gpu.shared == {"one": (most, -1)}


def test_the_host_sleeps_unless_the_device_waits() -> None:
    toy = toy_cuda()
    executor, gpu = toy.engine.executor, toy.device.gpu
    wait, sleeps = executor.wait_step, []

    def waited(number: int, batch: int) -> object:
        result = wait(number, batch)
        sleeps.append(gpu.last_wait_sleeps)
        return result

    executor.wait_step = waited
    params = GenerateParams(max_new_tokens=8, ignore_eos=True)
    run(toy.engine, [(1, 2, 3)], params, speculation=None)
    # Two steps are in flight until the last one.
    assert len(sleeps) == 7
    assert sleeps == [True] * 6 + [False]


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
        [launch_of(arguments=[[0, 2, 700]])],  # where the buffer ends
        [launch_of(arguments=[[0, 2, 4]])],  # inside it, but no tensor's
        [launch_of(arguments=[[0, 2, 8.0]])],
        [launch_of(arguments=[[0, 2, 8, 0]])],
        [launch_of(arguments=[[1, -1]])],
        [launch_of(arguments=[[1, 701]])],  # more than the op has bytes
        [launch_of(arguments=[[3, 0]])],
        [launch_of(grid=[10**30, 1, 1])],
        [launch_of(grid=[1, 65_536, 1])],
        [launch_of(grid=[2**31, 1, 1])],
        [launch_of(block=1025)],
        [launch_of(shared_bytes=1 << 20)],
        [launch_of(op=3)],
        [launch_of(op=-1)],
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
def test_rejects_a_malformed_program(launches: object) -> None:
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(program_json(launches), small_plan(kernels=KERNELS), ENTRY)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [174]},
        {"shape": [-1, -173]},
        {"shape": [0]},
        {"shape": ["173"]},
        {"offset": 9},
        {"offset": -4},
        {"offset": 700},
        {"buffer": 6},
        {"buffer": -4},
        {"dtype": "int64"},
        {"dtype": None},
    ],
)
def test_rejects_a_tensor_outside_its_buffer(changes: dict[str, object]) -> None:
    moved = {**TENSORS, "x": TENSORS["x"] | changes}
    data = program_json([launch_of()], [{**OPS[0], "inputs": moved}])
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(data, small_plan(kernels=KERNELS), ENTRY)


@pytest.mark.parametrize(
    "changes",
    [{"offset": 4097}, {"offset": -1}, {"bytes": 0}, {"bytes": 5001}, {"last": 3}, {"first": 2}],
)
def test_rejects_scratch_outside_the_arena(changes: dict[str, int]) -> None:
    """A launch may use its op's scratch memory, but not that of another op."""
    plan, launch = small_plan(kernels=KERNELS), launch_of(arguments=[[0, 4, 4096]], op=1)
    scratch = {"offset": 4096, "bytes": 904, "first": 1, "last": 1}
    assert read_launches(program_json([launch], lifetimes=[scratch]), plan, ENTRY)
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(program_json([launch], lifetimes=[scratch | changes]), plan, ENTRY)
    with pytest.raises(EngineFileError, match=r"launch 0 leaves the memory of its op"):
        other = program_json([launch | {"op": 0}], lifetimes=[scratch])
        read_launches(other, plan, ENTRY)


def test_rejects_rows_that_differ_from_the_plan() -> None:
    """The host counts rows by the plan's entry, kernels by the program's tensors."""
    ports = (Port("prefill.token_ids", 2, 8, (173,), "int32"),)
    plan = small_plan(kernels=KERNELS, ports=ports)
    data = program_json([launch_of()])
    assert read_launches(data, plan, dataclasses.replace(ENTRY, rows=173))
    with pytest.raises(EngineFileError, match="other rows than the plan says"):
        read_launches(data, plan, dataclasses.replace(ENTRY, rows=174))


def test_a_step_may_process_its_sequences_in_parts() -> None:
    """A large batch may have more pending tokens than a launch has rows."""
    ports = (Port("length", 2, 8, (173,), "int32"),)
    plan = small_plan(kernels=KERNELS, ports=ports)
    data = program_json([launch_of()])
    step = dataclasses.replace(ENTRY, kind="step")
    for batch in (173, 400):
        assert read_launches(data, plan, dataclasses.replace(step, batch=batch))
    with pytest.raises(EngineFileError, match="other rows than the plan says"):
        read_launches(data, plan, dataclasses.replace(step, batch=172))


@pytest.mark.parametrize(
    "arguments",
    [
        [[0, 2, 8], [1, 5], [2, 0]],
        [[0, 2, 8], [1, 5], [2, 0], [3], [3]],
        [[1, 5], [0, 2, 8], [2, 0], [3]],
        [],
    ],
)
def test_rejects_arguments_that_differ_from_the_kernel(arguments: object) -> None:
    """Nothing is launched, and no module is loaded."""
    runner = runner_of([launch_of(arguments=arguments)], [])
    with pytest.raises(EngineFileError, match=r"p\.json: launch 0 passes arguments of .* takes"):
        runner.start(runner.entry)
    assert runner.gpu.log == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"launches": NaN}', b"[" * 100_000])
def test_rejects_invalid_programs(data: bytes) -> None:
    with pytest.raises(EngineFileError, match=r"p\.json"):
        read_launches(data, small_plan(kernels=KERNELS), ENTRY)


def test_times_and_profiles_run_the_requested_launches() -> None:
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
    # Graphs of one, two and three launches, in turn.
    assert [values[1] for values in seen] == [0, 0, 1, 0, 1, 2] * 5


def test_a_long_profile_is_timed_in_overlapping_groups() -> None:
    """The first launch of a group is compared with the last one of the previous group."""
    count, slow = 19, {0: 2, 8: 5, 16: 4}
    launches = [launch_of(op=0, grid=[i + 1, 1, 1]) for i in range(count)]
    runner = runner_of(launches, [], count=count)
    launch = runner.gpu.launch

    def as_long_as_it_takes(config: LaunchConfig, stream: object) -> None:
        for _ in range(slow.get(config.grid[0] - 1, 1)):
            launch(config, stream)

    runner.gpu.launch = as_long_as_it_takes
    profile = profile_program(runner, runner.entry, 2)
    # The mark behind a graph is one operation of the fake's clock.
    expected = [slow.get(i, 1) + (i == 0) for i in range(count)]
    assert [found.added_s for found in profile] == expected
    assert sum(expected) == time_program(runner, runner.entry, 2)


@pytest.mark.parametrize("serial", [False, True])
def test_a_serial_profile_lets_no_launch_begin_early(serial: bool) -> None:
    runner, early = runner_of([launch_of(programmatic=True)] * 3, [], count=3), []
    launch = runner.gpu.launch

    def noted(config: LaunchConfig, stream: object) -> None:
        early.append(config.programmatic)
        launch(config, stream)

    runner.gpu.launch = noted
    profile_program(runner, runner.entry, 1, serial=serial)
    assert early == [not serial] * (1 + 2 + 3)
    early.clear()
    assert time_overlap(runner, runner.entry, 2) == (4, 4)
    assert early == [True] * 3 + [False] * 3


def test_every_run_of_a_profile_begins_with_the_scratch_that_ops_expect() -> None:
    """The second launch of an op resets the counters of the first, unless it is cut off."""
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
    entries = {f"{name}.cubin": toy_cubin({name: (8,)}) for name in gpu.kernels}
    entries |= {"p.json": program_json(launches)}
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    runner = ProgramRunner(gpu, plan, RankAddresses(memory.addresses), entries.__getitem__, stream)
    entry = dataclasses.replace(ENTRY, launches=4)
    profile = profile_program(runner, entry, 2)
    assert [p.kernel.partition(":")[2] for p in profile] == ["count", "use"] * 2
    assert used == [1] * 5 * (1 + 1 + 2)
    runner.start(entry)
    gpu.synchronize(stream)
    assert used[-2:] == [1, 1] and len(used) == 22


@pytest.mark.parametrize("gap", [0, 3])
def test_times_exclude_the_gap_between_graphs(gap: int) -> None:
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


def test_ports_store_values_and_reject_wrong_sizes() -> None:
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
    rows = port.shape[0]
    for outside in (
        lambda: executor.fill("temperature", 1, row=rows),
        lambda: executor.fill("temperature", 1, row=1, rows=rows),
        lambda: executor.fill("temperature", 1, row=-1),
        lambda: executor.fill("temperature", 1, row=2, rows=-1),
        lambda: executor.copy("pending_tokens", rows, "pending_tokens", 0),
        lambda: executor.copy("pending_tokens", 0, "pending_tokens", -1),
        lambda: executor.read("temperature", rows=rows + 1),
    ):
        with pytest.raises(SpecbuildError, match="do not fit"):
            outside()


def test_closing_releases_all_memory() -> None:
    toy = toy_cuda()
    run(toy.engine, [[1, 2]], GenerateParams(max_new_tokens=3), speculation=SHAPES[0])
    toy.engine.executor.close()
    assert toy.device.gpu.allocations == 1  # the host memory of the test's own weights
    assert toy.device.gpu.closed
