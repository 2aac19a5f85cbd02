"""A plan that contradicts its manifest, or exceeds its memory, is refused before a launch."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu, FakeKernel, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import D2T
from toy_plan import SHAPES, kernels_manifest, plan_file, toy_plan

from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest, StoredFile, StoredTensor
from specbuild.runtime.engine_dir.plan import Plan
from specbuild.runtime.engine_dir.strict_json import from_json, to_json
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.cuda.memory import DeviceMemory, Ports
from specbuild.runtime.executors.cuda.plan_check import check_draft_offsets, check_plan
from specbuild.runtime.executors.cuda.programs import ProgramRunner, RankAddresses


def toy(shapes: Sequence[DraftShape] = SHAPES[:1]) -> tuple[Plan, Manifest]:
    """Return the toy's plan, and a manifest with its files and its only weight."""
    manifest = kernels_manifest()
    plan = toy_plan(manifest, shapes)
    names = [entry.file for entry in plan.programs] + [k.cubin for k in plan.kernels]
    files = {name: StoredFile(0, "0" * 32) for name in names}
    tensors = {"d2t": StoredTensor("I32", D2T.shape, ("d2t",))}
    return plan, dataclasses.replace(manifest, files=files, tensors=tensors)


PLAN, MANIFEST = toy()


def changed(items: tuple[Any, ...], index: int, **changes: Any) -> tuple[Any, ...]:
    """Return the items with one of them changed."""
    return (*items[:index], dataclasses.replace(items[index], **changes), *items[index + 1 :])


def buffer(name: str, /, **changes: Any) -> dict[str, Any]:
    index = next(i for i, b in enumerate(PLAN.buffers) if b.name == name)
    return {"buffers": changed(PLAN.buffers, index, **changes)}


def port(name: str, /, **changes: Any) -> dict[str, Any]:
    index = next(i for i, p in enumerate(PLAN.ports) if p.name == name)
    return {"ports": changed(PLAN.ports, index, **changes)}


def program(kind: str, **changes: Any) -> dict[str, Any]:
    index = next(i for i, p in enumerate(PLAN.programs) if p.kind == kind)
    return {"programs": changed(PLAN.programs, index, **changes)}


def kernel(**changes: Any) -> dict[str, Any]:
    return {"kernels": changed(PLAN.kernels, 0, **changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (buffer("arena", bytes=-512), "'arena' has -512 bytes"),
        (buffer("arena", bytes=1 << 60), "'arena' has"),
        (buffer("cache:full", bytes=64), "'cache:full' has 64 bytes, the manifest's cache groups"),
        (buffer("cache:full", name="cache:other"), "'cache:other' has"),
        (buffer("cache:full", space="state"), "caches .'cache:full'. have no buffer"),
        (program("step", drafter="dflash"), "drafts with 'dflash', the engine has"),
        (buffer("d2t", name="other"), "'other' is no tensor of the manifest"),
        (buffer("length", name="root"), "two buffers are named 'root'"),
        (buffer("length", space="arena"), "two arenas"),
        (port("length", offset=17), "'length' lies outside"),
        (port("length", offset=32), "'length' lies outside"),
        (port("length", buffer=-1), "'length' lies outside"),
        (port("length", shape=()), "'length' lies outside"),
        (port("length", shape=(1,)), "state for 1 sequences, fewer than"),
        (port("length", name="root"), "two ports are named 'root'"),
        (port("page_table.full", shape=(4, 1)), "'page_table.full' is .4, 1., the manifest's"),
        (port("page_table.full", name="other"), "'page_table.full' is None"),
        (port("score.logits", shape=(4, 28)), "'score.logits' has 28 columns, the vocabulary 29"),
        (port("marks", shape=(4, 28)), "'marks' has 28 columns, the vocabulary 29"),
        (port("bias", shape=(3, 29)), "'bias' is .3, 29., adjusted steps take .4, 29."),
        (port("mask", name="masks"), "'mask' is None, adjusted steps take .4, 1."),
        (kernel(cubin="../other.cubin"), "which is no part of the engine"),
        (kernel(registers=256), "256 registers"),
        (kernel(registers=-1), "-1 registers"),
        (kernel(shared_bytes=1 << 20), "bytes of shared memory"),
        (program("prefill", file="plan.json"), "'plan.json', which is no part of the engine"),
        (program("prefill", rows=9), "has 9 rows"),
        (program("prefill", rows=0), "has 0 rows"),
        (program("prefill", batch=5), "is for 5 sequences"),
        (program("step", batch=0), "is for 0 sequences"),
        (program("step", draft_tokens=13), "has draft_tokens 13, the limits say 12"),
        (program("step", draft_depth=-1), "has draft_depth -1"),
        (program("step", rows=1000), "has 1000 rows"),
        (program("step", reverified=-4), "rows and"),
        (program("step", launches=0), "0 launches"),
        (program("step", name="prefill@4"), "two programs are named"),
    ],
)  # fmt: skip
def test_rejects_a_plan_that_contradicts_itself_or_its_manifest(
    changes: dict[str, Any], message: str
) -> None:
    check_plan(PLAN, MANIFEST)
    with pytest.raises(EngineFileError, match=message) as refused:
        check_plan(dataclasses.replace(PLAN, **changes), MANIFEST)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("row_counts", (3,), "takes 4 entries of port 'row_counts', which has 3"),
        ("first_rows", (4,), "takes 5 entries of port 'first_rows', which has 4"),
        ("top_path", (19,), "takes 20 entries of port 'top_path', which has 19"),
        ("top_ids", (51, 20), "takes 52 entries of port 'top_ids', which has 51"),
        ("top_logprobs", (51, 20), "takes 52 entries of port 'top_logprobs', which has 51"),
    ],
)
def test_a_step_has_entries_for_all_its_rows(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    plan, manifest = toy(SHAPES)
    check_plan(plan, manifest)
    ports = [dataclasses.replace(p, shape=shape) if p.name == name else p for p in plan.ports]
    with pytest.raises(EngineFileError, match=message):
        check_plan(dataclasses.replace(plan, ports=tuple(ports)), manifest)


def test_older_engines_list_tokens_in_logit_processor_steps_alone() -> None:
    plan, manifest = toy(SHAPES)
    older = dataclasses.replace(manifest, drafted_logit_processors=False)
    ports = [
        dataclasses.replace(p, shape=(4, 20)) if p.name in ("top_ids", "top_logprobs") else p
        for p in plan.ports
    ]
    check_plan(dataclasses.replace(plan, ports=tuple(ports)), older)


def test_a_ragged_step_has_a_row_for_each_sequence() -> None:
    plan, manifest = toy(SHAPES)
    index = next(i for i, entry in enumerate(plan.programs) if entry.is_ragged)
    with pytest.raises(EngineFileError, match="has 1 rows for 2 sequences"):
        check_plan(
            dataclasses.replace(plan, programs=changed(plan.programs, index, rows=1)), manifest
        )


def limits(**changes: int) -> dict[str, Any]:
    return {"limits": dataclasses.replace(MANIFEST.limits, **changes)}


def group(**changes: Any) -> dict[str, Any]:
    return {"cache_groups": changed(MANIFEST.cache_groups, 0, **changes)}


def tensor(name: str, *shape: int) -> dict[str, Any]:
    return {"tensors": {**MANIFEST.tensors, name: StoredTensor("F32", shape, (name,))}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (group(pages=1000), "'cache:full' has .* the manifest's cache groups take"),
        (group(page_size=32, pages=7), "'cache:full' has|page_table"),
        (group(dtype="float32"), "holds float32, but kernels need bfloat16"),
        (group(kv_heads=2), "has heads and widths"),
        (limits(max_batch_size=5), "state for 4 sequences"),
        (limits(max_seq_len=4096), "'page_table.full' is"),
        (tensor("model.embed_tokens.weight", 28, 1), "28, 1., but 29 rows of it are read"),
        (tensor("draft.embed_tokens.weight", 3), "3,., but 29 rows"),
        (tensor("model.embed_tokens.packed", 1, 2, 512), "1, 2, 512., but 29 rows"),
        (tensor("rope_cos", 64, 1), "64, 1., but 77 rows"),
        (tensor("draft_rope_sin", 64, 1), "64, 1., but 68 rows"),
        (tensor("d2t", 16), "16,., but 17 rows"),
    ],
)
def test_rejects_a_manifest_that_contradicts_its_plan(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineFileError, match=message):
        check_plan(PLAN, dataclasses.replace(MANIFEST, **changes))


def test_a_draft_names_only_tokens_of_the_target() -> None:
    check_draft_offsets("d2t", D2T, MANIFEST)
    for place, value in ((0, -1), (16, 29), (3, 2**31 - 1)):
        broken = D2T.copy()
        broken[place] = value
        with pytest.raises(EngineFileError, match=f"d2t: the draft's id {place} is "):
            check_draft_offsets("d2t", broken, MANIFEST)


class WatchedGpu(FakeGpu):
    """Count launches. Each must have the kernel's arguments, in allocated memory."""

    launched = 0

    def launch(self, config: LaunchConfig, stream: Stream) -> None:
        def run(*values: int) -> None:
            *pointers, _, _, null = values
            for address in pointers:
                self.view(address, 1)
            assert null == 0

        self.kernels = {config.function: FakeKernel(run, "p" * len(PLAN.buffers) + "iip")}
        super().launch(config, stream)
        assert min(config.grid) >= 1 and config.grid[0] < 2**31 and max(config.grid[1:]) < 2**16
        assert 1 <= config.block <= 1024
        WatchedGpu.launched += 1


def places(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything in decoded JSON."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found = [(*where, key) for key, _ in items]
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            found += places(value, (*where, key))
    return found


NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 16, 255, 1000, 2**31 - 1, 2**31, 2**32, 2**63, 10**30])
VALUES = st.one_of(NUMBERS, st.sampled_from([None, True, 1.5, "arena", [], {}, [0, 0, 0]]))


def mutated(data: st.DataObject, document: Any) -> Any:
    """Return the document with up to two parts changed, removed or duplicated."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places(document)))
        parent = document
        for key in path:
            parent = parent[key]
        action = data.draw(st.sampled_from(["set", "set", "set", "add", "drop", "double"]))
        if action == "add" and type(parent[last]) is int:
            parent[last] += data.draw(NUMBERS)
        elif action == "drop":
            del parent[last]
        elif action == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[last] = data.draw(VALUES)
    return document


def run_all(plan: Plan, read: Callable[[str], bytes]) -> None:
    """Load the plan, and run a program of each kind."""
    check_plan(plan, MANIFEST)
    gpu = WatchedGpu()
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, plan, stream)
    Ports(plan, memory)
    runner = ProgramRunner(gpu, plan, RankAddresses(memory.addresses), read, stream)
    for entry in {entry.kind: entry for entry in plan.programs}.values():
        runner.start(entry)
        gpu.synchronize(stream)


PLAN_JSON = json.loads(json.dumps(to_json(PLAN)))
ENTRY = next(entry for entry in PLAN.programs if entry.kind == "prefill")
PROGRAM_JSON = json.loads(plan_file(PLAN, ENTRY.file))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_mutated_plans_are_rejected_before_a_launch(data: st.DataObject) -> None:
    try:
        plan = from_json(Plan, mutated(data, PLAN_JSON), "plan.json")
        run_all(plan, lambda name: plan_file(PLAN, name))
    except SpecbuildError as error:
        assert "\n" not in str(error)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_programs_are_rejected_before_a_launch(data: st.DataObject) -> None:
    program = json.dumps(mutated(data, PROGRAM_JSON)).encode()
    plan = dataclasses.replace(PLAN, programs=(ENTRY,))
    try:
        run_all(plan, lambda name: program if name == ENTRY.file else plan_file(PLAN, name))
    except EngineFileError as error:
        assert str(error).startswith("prefill@4.json") and "\n" not in str(error)


def test_the_fake_gpu_detects_out_of_bounds_arguments() -> None:
    """It would detect the mutations above: here another runner passes an argument past the end."""
    run_all(PLAN, lambda name: plan_file(PLAN, name))
    assert WatchedGpu.launched
    gpu = WatchedGpu()
    stream = gpu.new_stream()
    memory = DeviceMemory(gpu, PLAN, stream)
    beyond = np.array(memory.addresses) + (1 << 40)
    runner = ProgramRunner(
        gpu, PLAN, RankAddresses(beyond.tolist()), lambda n: plan_file(PLAN, n), stream
    )
    runner.start(ENTRY)
    with pytest.raises(AssertionError, match="nobody's"):
        gpu.synchronize(stream)
