"""Pools of keys and values that hold e4m3 codes: their type, from graph input to graph output.

The ops' bodies write codes into such a pool and read their values (``kv_write/codes.py``).
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

_CODES = ir.TensorType(ir.DataType.UINT8)


def code_pools(model: ir.Model, *, groups: Collection[str]) -> int:
    """The pools of these cache groups become uint8; how many."""
    pools = [port for port in model.graph.inputs if _group_of(port) in groups]
    for pool in pools:
        _retype(pool)
    return len(pools)


def _group_of(port: ir.Value) -> str | None:
    """The cache group of a port ``{group}.{layer}.{part}_pool``, None of others."""
    name = port.name or ""
    return name.partition(".")[0] if name.endswith("_pool") else None


def _retype(pool: ir.Value) -> None:
    """A pool, and what shares its bytes behind it."""
    pool.type = _CODES
    for user, index in list(pool.uses()):
        if user.op_type in ("KvWrite", "KvCommit") and index == 0:
            _retype(user.outputs[0])
