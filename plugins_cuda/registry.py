"""The registry of ops: every sub-folder whose ``op.py`` has an ``OP``."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache

import specbuild.plugins_cuda as package
from specbuild.plugins_cuda.opspec import OpSpec


@cache
def all_ops() -> dict[str, OpSpec]:
    """Return every declared op by name, in alphabetical order."""
    ops = {}
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.ispkg and importlib.util.find_spec(f"{module.name}.op") is not None:
            op: OpSpec = importlib.import_module(f"{module.name}.op").OP
            ops[op.name] = op
    return dict(sorted(ops.items()))


def op_named(name: str) -> OpSpec:
    """Return the op of this name; KeyError with the declared names if there is none."""
    ops = all_ops()
    if name not in ops:
        raise KeyError(f"no op {name!r}; declared: {', '.join(ops)}")
    return ops[name]
