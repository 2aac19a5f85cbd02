"""The version of each op's plugin, and a digest of everything that the version covers.

Run as a module, this writes ``plugin_versions.json`` and increments the version of each op whose
digest changed.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import xxhash

from specbuild.plugins_cuda.opspec import OpSpec, TensorSpec
from specbuild.plugins_cuda.registry import all_ops
from specbuild.runtime.engine_dir.plan import CompiledKernel, Launch
from specbuild.runtime.executors.tensorrt import plugin_record

VERSIONS_FILE = Path(__file__).with_name("plugin_versions.json")
_FIELD_SET = (
    plugin_record.PluginInput,
    plugin_record.PluginOutput,
    plugin_record.PluginWorkspace,
    plugin_record.PluginTactic,
    plugin_record.PluginBucket,
    plugin_record.PluginRecord,
    CompiledKernel,
    Launch,
)


def field_digest(op: OpSpec) -> str:
    """Return a digest of the op's tensors, attributes and aliases, and of the record's fields."""
    content = {
        "inputs": [_tensor(tensor) for tensor in op.inputs],
        "outputs": [_tensor(tensor) for tensor in op.outputs],
        "attributes": [[a.name, a.type.__name__, a.default] for a in op.attributes],
        "aliases": op.aliases,
        "format": plugin_record.RECORD_FORMAT,
        "fields": [plugin_record.FIELD_NAMES, *map(_record_fields, _FIELD_SET)],
    }
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def plugin_version(op: OpSpec) -> int:
    """Return the version. AssertionError if the op changed since its version was assigned."""
    version, digest = stored_versions().get(op.name, (0, ""))
    if digest != field_digest(op):
        raise AssertionError(
            f"{op.name}: the fields of its plugin differ from version {version}; assign the next "
            f"version with python -m {__name__}"
        )
    return version


@cache
def stored_versions() -> dict[str, tuple[int, str]]:
    """Return version and digest by op from the file."""
    stored = json.loads(VERSIONS_FILE.read_text(encoding="utf-8"))
    return {name: (int(version), str(digest)) for name, (version, digest) in stored.items()}


def next_versions(stored: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Return the new contents of the file, with incremented versions of changed ops."""
    versions = {}
    for name, op in all_ops().items():
        if op.lower is None:
            continue
        version, digest = stored.get(name, (0, ""))
        current = field_digest(op)
        versions[name] = (version + (digest != current), current)
    return versions


def _tensor(tensor: TensorSpec) -> list[object]:
    return [tensor.name, tensor.dtype, tensor.axes, tensor.optional, tensor.rank_free]


def _record_fields(kind: type) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in dataclasses.fields(kind)]


def _write() -> None:
    stored = stored_versions() if VERSIONS_FILE.exists() else {}
    lines = [
        f"  {json.dumps(name)}: {json.dumps(entry)}"
        for name, entry in next_versions(stored).items()
    ]
    VERSIONS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
