"""The format of engines for several GPUs: keys, weights files, arguments of launches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_directory import write_manifest, write_weights
from fake_gpu import FakeGpu
from toy_plan import kernels_manifest, small_plan

from specbuild.builder.engine.writer import EngineFolder
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.cache.layout import layouts
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.features import known_features, stored_json, stored_keys
from specbuild.runtime.engine_dir.files import file_entry, read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest, StoredFile, StoredTensor
from specbuild.runtime.engine_dir.manifest_check import check_manifest
from specbuild.runtime.engine_dir.plan import (
    INT32,
    NULL,
    PEER,
    POINTER,
    RANK,
    Buffer,
    CompiledKernel,
    Plan,
    ProgramEntry,
)
from specbuild.runtime.engine_dir.ranks import (
    check_ranks,
    groups_of_rank,
    unmeasured,
    weights_files,
)
from specbuild.runtime.engine_dir.tensor_table import with_table
from specbuild.runtime.engine_dir.weights_file import weight_spans
from specbuild.runtime.errors import EngineFileError, UnsupportedHereError
from specbuild.runtime.executors.cuda.kernel_arguments import argument_bytes
from specbuild.runtime.executors.cuda.loading import open_executor, weight_pieces
from specbuild.runtime.executors.cuda.memory import DeviceMemory, footprint
from specbuild.runtime.executors.cuda.plan_check import check_plan
from specbuild.runtime.executors.cuda.program_file import read_launches
from specbuild.runtime.executors.cuda.programs import RankAddresses
from specbuild.runtime.settings import RuntimeSettings

INBOX, STATE, OTHER = 0, 1, 2
ENTRY = ProgramEntry("p", "p.json", "prefill", 1, 1, 0, 0, 0, full_logits=True, launches=1)


def plan_of(ranks: int) -> Plan:
    """Return a plan with one kernel, an inbox that other ranks write, and other memory."""
    return Plan(
        gpu="sm_90a",
        multiprocessors=132,
        driver_version=13000,
        buffers=(
            Buffer("exchange.inbox", "exchange", 4096),
            Buffer("exchange.state", "state", 512),
            Buffer("other.inbox", "exchange", 4096),
        ),
        kernels=(CompiledKernel("k", "k.cubin", "k", 1, 0, 0),),
        ports=(),
        programs=(ENTRY,),
        ranks=ranks,
    )


def program_file(arguments: list[list[int]]) -> bytes:
    """Return a program of one launch, whose op has the inbox from byte 256 on."""

    def bound(buffer: int, offset: int) -> dict:
        return {"buffer": buffer, "offset": offset, "shape": [8], "dtype": "int32"}

    inputs = {"inbox": bound(INBOX, 256), "state": bound(STATE, 0)}
    op = {"op": "RankSum", "attributes": {}, "inputs": inputs, "outputs": {}}
    launch = {"kernel": 0, "op": 0, "grid": [1, 1, 1], "block": 32, "shared_bytes": 0}
    launch |= {"arguments": arguments, "programmatic": True}
    return json.dumps(with_table({"ops": [op], "launches": [launch], "lifetimes": []})).encode()


@pytest.mark.parametrize("argument", [[PEER, 1, INBOX, 256], [PEER, 3, INBOX, 256], [RANK]])
def test_a_launch_may_point_to_the_inbox_of_another_rank(argument: list[int]) -> None:
    [launch] = read_launches(program_file([argument]), plan_of(4), ENTRY)
    assert launch.arguments == (tuple(argument),)


@pytest.mark.parametrize(
    ("ranks", "argument"),
    [
        (4, [PEER, 0, INBOX, 256]),  # the rank itself
        (4, [PEER, 4, INBOX, 256]),
        (4, [PEER, -1, INBOX, 256]),
        (4, [PEER, 1, INBOX, 0]),  # of the inbox, but not of this op
        (4, [PEER, 1, STATE, 0]),  # of the op, but not for exchange
        (4, [PEER, 1, OTHER, 0]),
        (4, [PEER, 1, 3, 0]),
        (4, [PEER, 1, INBOX]),
        (4, [PEER, 1, INBOX, 256, 0]),
        (4, [RANK, 1]),
        (1, [PEER, 1, INBOX, 256]),
        (1, [RANK]),
    ],
)
def test_rejects_pointers_to_other_memory_of_other_ranks(ranks: int, argument: list[int]) -> None:
    with pytest.raises(EngineFileError, match="launch 0 leaves the memory of its op"):
        read_launches(program_file([argument]), plan_of(ranks), ENTRY)


def test_arguments_are_resolved_for_each_rank() -> None:
    own = [[1000 * rank + 100 * buffer for buffer in range(3)] for rank in range(1, 5)]
    for rank in range(4):
        peers = [own[(rank + k) % 4] for k in (1, 2, 3)]
        places = RankAddresses(own[rank], rank, peers)
        assert places.packed((POINTER, 2, 8)) == own[rank][2] + 8
        assert [places.packed((PEER, k, 2, 8)) for k in (1, 2, 3)] == [p[2] + 8 for p in peers]
        assert places.packed((RANK,)) == rank
        assert places.packed((INT32, -1)) == 0xFFFFFFFF
        assert places.packed((NULL,)) == 0
    assert argument_bytes([(PEER, 1, 0, 0), (RANK,), (POINTER, 0, 0)]) == (8, 4, 8)


def test_an_engine_of_one_rank_is_stored_as_before() -> None:
    manifest = dataclasses.replace(
        kernels_manifest(), tensors={"w": StoredTensor("F32", (5,), ("w",))}
    )
    stored, plan = stored_json(manifest), stored_keys(plan_of(1))
    assert "ranks" not in stored
    assert "ranks" not in plan
    assert set(stored["tensors"]["w"]) == {"dtype", "shape", "sources", "same_as"}
    assert "tensor_parallel" not in stored["features"]


def test_an_engine_of_two_ranks_needs_a_feature() -> None:
    manifest = dataclasses.replace(kernels_manifest(), ranks=2)
    stored = stored_json(manifest)
    assert (stored["ranks"], "tensor_parallel" in stored["features"]) == (2, True)
    assert stored_keys(plan_of(2))["ranks"] == 2
    assert "tensor_parallel" in known_features(Manifest)


def write_ranked(path: Path) -> Manifest:
    """Write an engine of two ranks: a shared tensor, and one with a part for each rank."""
    path.mkdir()
    whole = {"norm": np.arange(3, dtype=np.float32)}
    write_weights(path / "weights.safetensors", whole)
    for rank in range(2):
        part = np.full((2, 4), rank + 1, np.float32)
        write_weights(path / f"weights.{rank}.safetensors", {"proj": part})
    (path / "plan.json").write_text("{}")
    names = ["plan.json", "weights.safetensors", "weights.0.safetensors", "weights.1.safetensors"]
    manifest = dataclasses.replace(
        kernels_manifest(),
        ranks=2,
        tensors={
            "norm": StoredTensor("F32", (3,), ("norm",)),
            "proj": StoredTensor("F32", (2, 4), ("proj",), sharded=True),
        },
        files={n: file_entry(path / n, chunked=n.endswith(".safetensors")) for n in names},
    )
    write_manifest(path, manifest)
    return manifest


def test_a_rank_loads_its_part_and_the_shared_tensors(tmp_path: Path) -> None:
    written = write_ranked(tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    assert (manifest.ranks, weights_files(manifest)) == (2, weights_files(written))
    plan = dataclasses.replace(
        plan_of(2), buffers=(Buffer("proj", "weights", 32), Buffer("norm", "weights", 12))
    )
    for rank in range(2):
        pieces = weight_pieces(tmp_path / "engine", manifest, plan, (4096, 8192), rank)
        assert set(pieces) == {"weights.safetensors", f"weights.{rank}.safetensors"}
        [piece] = pieces[f"weights.{rank}.safetensors"]
        data = (tmp_path / "engine" / f"weights.{rank}.safetensors").read_bytes()
        held = np.frombuffer(data[piece.offset : piece.offset + piece.bytes], np.float32)
        assert (piece.address, held.tolist()) == (4096, [rank + 1.0] * 8)
        [shared] = pieces["weights.safetensors"]
        assert (shared.address, shared.bytes) == (8192, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, r"ranks is 3, must be one of \(1, 2, 4, 8\)"),
        ({"ranks": 1}, "tensors are sharded, but ranks is 1"),
        ({"ranks": 4}, r"weights\.2\.safetensors is not listed"),
    ],
)
def test_rejects_ranks_that_contradict_the_files(
    tmp_path: Path, change: dict, message: str
) -> None:
    manifest = dataclasses.replace(write_ranked(tmp_path / "engine"), **change)
    with pytest.raises(EngineFileError, match=message):
        check_manifest(dataclasses.replace(manifest, features=("tensor_parallel",)))


def test_rejects_a_rank_file_of_another_size(tmp_path: Path) -> None:
    manifest = write_ranked(tmp_path / "engine")
    entry = manifest.files["weights.1.safetensors"]
    files = {**manifest.files, "weights.1.safetensors": StoredFile(8, entry.xxh3_128)}
    with pytest.raises(EngineFileError, match=r"weights\.1\.safetensors has 8 bytes"):
        check_manifest(dataclasses.replace(manifest, files=files, features=("tensor_parallel",)))


def test_several_ranks_need_a_plan() -> None:
    manifest = dataclasses.replace(kernels_manifest(), ranks=2, backend="cpu", tensors={})
    with pytest.raises(EngineFileError, match="a cpu engine has 2 ranks, must be 1"):
        check_ranks(manifest)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_caches_of_the_target_have_the_heads_of_a_rank(ranks: int, heads: int) -> None:
    groups = [dataclasses.replace(g, kv_heads=4) for g in kernels_manifest().cache_groups]
    of_rank = {g.name: g.kv_heads for g in groups_of_rank(groups, ranks)}
    assert of_rank == {"full": heads, "sliding": heads, "draft": 4}
    assert {n: each.pools[0].shape[1] for n, each in layouts(groups, ranks).items()} == of_rank


def test_rejects_a_plan_with_another_number_of_ranks() -> None:
    manifest = kernels_manifest()
    ranked = dataclasses.replace(small_plan(), ranks=2)
    with pytest.raises(EngineFileError, match="the plan is for 2 ranks, the manifest for 1"):
        check_plan(ranked, manifest)
    inbox = Buffer("exchange.inbox", "exchange", 64)
    with pytest.raises(EngineFileError, match=r"'exchange\.inbox' is written by other ranks"):
        check_plan(small_plan(buffers=(inbox,)), manifest)


def test_memory_for_exchange_is_allocated_and_zeroed() -> None:
    plan, gpu = plan_of(2), FakeGpu()
    held = footprint(plan)
    assert (held.exchange, held.total) == (8192, 8192 + 512)
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    gpu.synchronize(stream)
    assert len(set(memory.addresses)) == 3
    assert not gpu.view(memory.addresses[INBOX], 4096).any()


def test_one_gpu_does_not_open_an_engine_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = kernels_manifest()
    monkeypatch.setattr("specbuild.runtime.executors.cuda.loading.read_plan", lambda *_: plan_of(2))
    with pytest.raises(UnsupportedHereError, match="runs on 2 GPUs"):
        open_executor(tmp_path, manifest, readers=1, open_device=FakeGpu)


def test_the_writer_gives_each_rank_its_part(tmp_path: Path) -> None:
    parts = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4)
    numbers = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    weights = {
        "a": Recipe((3, 4), torch.bfloat16, ("a",), lambda: parts, ranks=2),
        "norm": Recipe((5,), torch.float32, ("norm",), lambda: torch.ones(5)),
        "b": Recipe((2,), torch.int32, ("b",), lambda: numbers, ranks=2),
    }
    folder = EngineFolder(tmp_path)
    folder.write_weights(weights, SilentProgress())
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "weights.safetensors")) == {"norm"}
    for rank in range(2):
        held = load_file(tmp_path / f"weights.{rank}.safetensors")
        assert set(held) == {"a", "b"}
        assert torch.equal(held["a"], parts[rank])
        assert torch.equal(held["b"], numbers[rank])
    assert set(folder.stored_files()) == {
        "weights.safetensors", "weights.0.safetensors", "weights.1.safetensors",
    }  # fmt: skip
    entry = folder.stored_files()["weights.1.safetensors"]
    assert len(entry.chunks) == 1


def test_spans_equal_those_of_the_file(tmp_path: Path) -> None:
    manifest = write_ranked(tmp_path / "engine")
    assert set(weight_spans(tmp_path / "engine", manifest)) == {"norm"}
    assert set(weight_spans(tmp_path / "engine", manifest, "weights.1.safetensors")) == {"proj"}


@pytest.mark.parametrize("experimental", [False, True])
def test_more_gpus_than_measured_need_an_explicit_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experimental: bool
) -> None:
    manifest = dataclasses.replace(kernels_manifest(), ranks=4)
    monkeypatch.setattr("specbuild.runtime.engine.read_manifest", lambda *_: manifest)
    # What comes next looks for the files.
    message = "is missing" if experimental else "engines of 4 GPUs were tested with simulated"
    with pytest.raises((EngineFileError, UnsupportedHereError), match=message):
        Engine.load(tmp_path, RuntimeSettings(experimental=experimental))
    assert unmeasured(dataclasses.replace(manifest, ranks=2)) is None
