"""Device memory of a plan, its ports, and uploads of weights."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import HOPPER, FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_plan import small_plan
from xxhash import xxh3_128_hexdigest

from specbuild.runtime.engine_dir.manifest import StoredFile
from specbuild.runtime.engine_dir.plan import Buffer, Port
from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.cuda.memory import DeviceMemory, Ports, footprint
from specbuild.runtime.executors.cuda.staging import FETCHES, Fetches, Staging
from specbuild.runtime.executors.cuda.upload import Piece, WeightsUpload

RANDOM = np.random.default_rng(5)


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
    # The host sees what the device writes at the ring's address.
    gpu.view(memory.addresses[3], 900)[:] = 7
    assert (memory.ring[3] == 7).all()
    assert gpu.allocations == 2
    memory.close()
    assert gpu.allocations == 0


def test_rejects_a_plan_that_does_not_fit_before_allocating() -> None:
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
def test_rejects_a_port_outside_its_buffer(port: Port) -> None:
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
def test_ports_of_the_ring_have_equal_steps_and_sequences(
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
def test_staged_uploads_are_complete_however_late_they_run(sizes: list[int]) -> None:
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
    """Compare digests with those of an entry."""

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
    # One region may be used twice, another not at all.
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


def test_a_damaged_chunk_ends_the_upload_and_releases_memory(tmp_path: Path) -> None:
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


def test_rejects_a_file_without_chunks(tmp_path: Path) -> None:
    gpu = FakeGpu()
    upload = WeightsUpload(gpu, gpu.new_stream(), readers=2, check=lambda *_: None)
    for chunk in (None, 1 << 30):
        entry = StoredFile(10, "0" * 32, chunk, ())
        with pytest.raises(EngineFileError, match="not stored in chunks"):
            upload.run(tmp_path / "file", entry, [])


def test_a_fetch_does_not_wait_for_later_work() -> None:
    gpu = FakeGpu()
    stream, address = gpu.new_stream(), gpu.allocate(4 * FETCHES)
    fetches = Fetches(gpu, stream)
    outstanding = []
    for i in range(FETCHES):
        gpu.fill(address + 4 * i, i, 1, stream)
        outstanding.append(fetches.start(address + 4 * i, 4))
    gpu.fill(address, 99, 1, stream)
    read = [int(arrived().view(np.uint32)[0]) for arrived in outstanding]
    assert read == list(range(FETCHES))
    assert len(stream.waiting) == 1
    fetches.close()
