"""The record of a plugin node: damaged fields, pointers, arguments, cubins."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_cubin import toy_cubin

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))
from plugin_cases import every_case

from specbuild.builder.backends.cuda.tuning.kernel_case import kernel_ops
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.executors.cuda.cubin import kernel_parameters
from specbuild.runtime.executors.tensorrt.launched_role import (
    LaunchedRole,
    launched_role_bytes,
    read_launched_role,
)
from specbuild.runtime.executors.tensorrt.plugin_record import (
    CUBINS,
    DESCRIPTION,
    read_fields,
    write_fields,
)

Fields = dict[str, bytes]


def first_fields(name: str) -> Fields:
    """Return the fields of an op's first case."""
    op = next(op for op in kernel_ops() if op.name == name)
    return next(every_case(op))[1]


@pytest.fixture(scope="module")
def fields() -> Fields:
    return first_fields("KvWrite")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"format": 99}, "format 99, this specbuild reads 1"),
        (lambda d: d | {"surprise": 1}, "unknown keys surprise"),
        (lambda d: d | {"kernels": []}, "a launch outside of its buffers"),
        (lambda d: d | {"buckets": [d["buckets"][0] | {"tactics": []}]}, "without launches"),
        (lambda d: {k: v for k, v in d.items() if k != "op"}, "key 'op' is missing"),
        (lambda _: [], "format None"),
    ],
)
def test_rejects_damaged_fields(fields: Fields, change: Any, message: str) -> None:
    description = change(json.loads(fields[DESCRIPTION]))
    with pytest.raises(EngineFileError, match=message):
        read_fields(fields | {DESCRIPTION: json.dumps(description).encode()})


def test_pointers_stay_inside_their_buffers(fields: Fields) -> None:
    record, cubins = read_fields(fields)
    launch = record.buckets[0].tactics[0].launches[0]
    kind, buffer, _ = launch.arguments[0]
    size = int(np.prod(record.buckets[0].inputs[buffer])) * 2
    for argument, sound in (
        ((kind, buffer, size), True),
        ((kind, buffer, size + 1), False),
        ((kind, len(record.tensors), 0), False),
    ):
        moved = dataclasses.replace(launch, arguments=(argument, *launch.arguments[1:]))
        tactic = dataclasses.replace(record.buckets[0].tactics[0], launches=(moved,))
        bucket = dataclasses.replace(record.buckets[0], tactics=(tactic,))
        written = write_fields(dataclasses.replace(record, buckets=(bucket,)), cubins)
        if sound:
            read_fields(written)
        else:
            with pytest.raises(EngineFileError, match="outside of its buffers"):
                read_fields(written)


@pytest.mark.parametrize("change", [lambda sizes: sizes[:-1], lambda sizes: (*sizes[:-1], 4)])
def test_arguments_match_the_cubins(fields: Fields, change: Any) -> None:
    """The launches are in a node, or in a role that consists of launches."""
    record, cubins = read_fields(fields)
    launches = record.buckets[0].tactics[0].launches
    kernel = record.kernels[launches[-1].kernel]
    sizes = kernel_parameters(cubins[kernel.cubin], "x")[kernel.entry]
    assert len(sizes) == len(launches[-1].arguments) and sizes[-1] == 8
    others = cubins | {kernel.cubin: toy_cubin({kernel.entry: change(sizes)})}
    with pytest.raises(EngineFileError, match=r"plugin SpecbuildKvWrite: launch \d+ passes argum"):
        read_fields(write_fields(record, others))
    role = LaunchedRole((record,), others, ())
    with pytest.raises(EngineFileError, match=r"passes arguments of .* takes"):
        read_launched_role(launched_role_bytes(role), "commit", 1)
    elsewhere = cubins | {kernel.cubin: toy_cubin({"another": sizes})}
    with pytest.raises(EngineFileError, match="takes None"):
        read_fields(write_fields(record, elsewhere))


def test_cubins_survive_and_a_terminating_zero_is_ignored() -> None:
    fields = first_fields("Embed")
    record, _ = read_fields(fields)
    name = record.kernels[0].cubin
    code = read_fields(fields)[1][name] + np.random.default_rng(3).bytes(4096)
    written = write_fields(record, {name: code})
    assert read_fields({n: data + b"\0" for n, data in written.items()}) == (record, {name: code})
    with pytest.raises(EngineFileError, match="cannot be read"):
        read_fields(written | {CUBINS: written[CUBINS][:-40]})
