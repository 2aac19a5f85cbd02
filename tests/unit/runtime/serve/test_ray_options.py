"""Options after ``serve run`` are parsed without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from toy_model import toy_manifest

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.ray import ReplicaOptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "engine=PATH"),
        ({"engine": "x", "replica": "2"}, "replica is not an option"),
        ({"engine": "x", "replicas": "two"}, "must be a number"),
        ({"engine": "x", "replicas": "0"}, "1 or above"),
        ({"engine": "x", "routing": "best"}, "session or load"),
        ({"engine": "x", "prefix_cache": "yes"}, "true or false"),
    ],
)
def test_the_error_names_an_invalid_option(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ReplicaOptions.read(arguments)


def test_options_are_converted_to_their_types(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    arguments = {"engine": "x", "replicas": "3", "num_gpus": "0.5", "prefix_cache": "False"}
    options = ReplicaOptions.read({**arguments, "api_key_file": str(keys), "max_queue": 7})
    assert options == ReplicaOptions(
        engine="x",
        replicas=3,
        num_gpus=0.5,
        prefix_cache=False,
        api_key_file=str(keys),
        max_queue=7,
    )
    assert options.keys == ("one", "two")
    keys.write_text("\n")
    with pytest.raises(RequestError, match="contains no key"):
        _ = options.keys


def test_a_replica_has_a_gpu_if_its_engine_needs_one() -> None:
    options, manifest = ReplicaOptions(engine="x"), toy_manifest()
    assert options.gpus(replace(manifest, backend="cpu")) == 0
    assert options.gpus(replace(manifest, backend="cuda")) == 1
    assert options.gpus(replace(manifest, backend="cuda", ranks=4)) == 4
    assert replace(options, num_gpus=0.25).gpus(replace(manifest, backend="cuda")) == 0.25
