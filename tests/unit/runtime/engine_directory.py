"""Write a small but complete CPU engine: random graphs without attention."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from toy_model import toy_manifest

from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import file_entry, manifest_digest
from specbuild.runtime.engine_dir.manifest import CacheGroup, Manifest, Port, Role, StoredTensor

VOCAB, WIDTH, PAGES, SIZE = 29, 4, 20, 4
AXES = ("kv_heads", "pages", "page_size", "width")


def write_engine(path: Path, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Write an engine without a draft; return its weights.

    Its logits are a table row plus the sum of cached rows.
    """
    random = np.random.default_rng(seed)
    weights = {
        "embedding": random.standard_normal((VOCAB, WIDTH)).astype(np.float32),
        "head": random.standard_normal((WIDTH, VOCAB)).astype(np.float32),
        "unused.scale": random.standard_normal(3).astype(np.float32),
    }
    (path / "graphs").mkdir(parents=True)
    (path / "graphs/target.onnx").write_bytes(_target(weights))
    (path / "graphs/choose.onnx").write_bytes(_choose())
    write_weights(path / "weights.safetensors", weights)
    write_manifest(path, manifest_of(path, weights))
    return weights


def write_weights(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write a safetensors file of fp32 tensors."""
    header, offset = {}, 0
    for name, array in weights.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + 8) % 64)
    data = b"".join(array.tobytes() for array in weights.values())
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def manifest_of(path: Path, weights: dict[str, np.ndarray]) -> Manifest:
    """Return the manifest of the files in ``path``."""
    toy = toy_manifest(drafted=False, max_seq_len=48, max_batch_size=1)
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    pool = tuple(Port(f"full.0.{s}_pool", "float32", (1, PAGES, SIZE, WIDTH)) for s in "kv")
    out = tuple(Port(f"{p.name}.out", p.dtype, p.shape) for p in pool)
    launch = tuple(Port(n, "int32", ("T",)) for n in ("token_ids", "full.write_slot"))
    table = (Port("full.page_table", "int32", (1, 1, 1, "P")), Port("logit_rows", "int32", ("R",)))
    logits = Port("logits", "float32", ("R", VOCAB))
    target = Role(
        "graphs/target.onnx",
        (*launch, *table, *pool),
        (logits, *out),
        ("embedding", "head"),
        ops_of(path / "graphs/target.onnx"),
    )
    choice = (Port("choice", "int32", ("R",)), Port("logprob", "float32", ("R",)))
    return dataclasses.replace(
        toy,
        draft_default=None,
        cache_groups=(CacheGroup("full", (0,), 1, WIDTH, WIDTH, SIZE, PAGES, 0, "float32", AXES),),
        roles={
            "target": target,
            "choose": Role(
                "graphs/choose.onnx", (logits,), choice, (), ops_of(path / "graphs/choose.onnx")
            ),
        },
        tensors={n: StoredTensor("F32", a.shape, (n,)) for n, a in weights.items()},
        files={n: file_entry(path / n, chunked=n == "weights.safetensors") for n in names},
    )


def ops_of(file: Path) -> dict[str, int]:
    """Return the number of each op in a graph."""
    return dict(
        Counter(node.op_type for node in onnx.load(file, load_external_data=False).graph.node)
    )


def _stored(manifest: object) -> object:
    return stored_json(manifest) if isinstance(manifest, Manifest) else manifest


def write_manifest(path: Path, manifest: object) -> None:
    """Write ``manifest.json`` (a Manifest, or any JSON) and its digest."""
    data = manifest if isinstance(manifest, bytes) else json.dumps(_stored(manifest)).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_text(manifest_digest(data))


def _target(weights: dict[str, np.ndarray]) -> bytes:
    """Return a graph of logits = (embedding[id] + sum of the pool) · head.

    The rows are written to the pool first.
    """
    ints = ("token_ids", "full.write_slot", "full.page_table", "logit_rows")
    shapes = (["T"], ["T"], [1, 1, 1, "P"], ["R"])
    inputs = [_value(n, TensorProto.INT32, s) for n, s in zip(ints, shapes, strict=True)]
    pools = [_value(f"full.0.{s}_pool", TensorProto.FLOAT, [1, PAGES, SIZE, WIDTH]) for s in "kv"]
    outputs = [_value("logits", TensorProto.FLOAT, ["R", VOCAB])]
    outputs += [
        _value(f"full.0.{s}_pool.out", TensorProto.FLOAT, p_shape)
        for s, p_shape in (("k", [1, PAGES, SIZE, WIDTH]), ("v", [1, PAGES, SIZE, WIDTH]))
    ]
    size = helper.make_tensor("size", TensorProto.INT32, [], [SIZE])
    zero = helper.make_tensor("zero", TensorProto.INT32, [], [0])
    last = helper.make_tensor("last", TensorProto.INT64, [1], [-1])
    axes = helper.make_tensor("axes", TensorProto.INT64, [3], [0, 1, 2])
    nodes = [
        helper.make_node("Gather", ["embedding", "token_ids"], ["x"]),
        helper.make_node("Div", ["full.write_slot", "size"], ["page"]),
        helper.make_node("Mod", ["full.write_slot", "size"], ["offset"]),
        helper.make_node("Mul", ["page", "zero"], ["heads"]),
        *[
            helper.make_node("Unsqueeze", [n, "last"], [f"{n}.1"])
            for n in ("heads", "page", "offset")
        ],
        helper.make_node("Concat", ["heads.1", "page.1", "offset.1"], ["at32"], axis=-1),
        helper.make_node("Cast", ["at32"], ["at"], to=TensorProto.INT64),
        helper.make_node("ScatterND", ["full.0.k_pool", "at", "x"], ["full.0.k_pool.out"]),
        helper.make_node("ScatterND", ["full.0.v_pool", "at", "x"], ["full.0.v_pool.out"]),
        helper.make_node("ReduceSum", ["full.0.k_pool.out", "axes"], ["past"], keepdims=0),
        helper.make_node("Add", ["x", "past"], ["y"]),
        helper.make_node("Gather", ["y", "logit_rows"], ["rows"]),
        helper.make_node("MatMul", ["rows", "head"], ["logits"]),
    ]
    graph = helper.make_graph(nodes, "target", inputs + pools, outputs, [size, zero, last, axes])
    for name in ("embedding", "head"):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=weights[name].shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", "weights.safetensors"),
            ("offset", "0"),
            ("length", str(weights[name].nbytes)),
        ):
            tensor.external_data.add(key=key, value=value)
        graph.initializer.append(tensor)
    return _model(graph)


def _choose() -> bytes:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
        helper.make_node("Cast", ["best"], ["choice"], to=TensorProto.INT32),
        helper.make_node("LogSoftmax", ["logits"], ["log_p"], axis=1),
        helper.make_node("ReduceMax", ["log_p", "one"], ["logprob"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "choose",
        [_value("logits", TensorProto.FLOAT, ["R", VOCAB])],
        [_value("choice", TensorProto.INT32, ["R"]), _value("logprob", TensorProto.FLOAT, ["R"])],
        [one],
    )
    return _model(graph)


def _value(name: str, dtype: int, shape: list[object]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data
