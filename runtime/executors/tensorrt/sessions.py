"""The implementations of a role: a TensorRT engine with a context per profile, or launches only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specbuild.runtime.errors import (
    OutdatedEngineError,
    SpecbuildError,
    UnsupportedHereError,
)
from specbuild.runtime.executors.cuda.gpu import Gpu, Handle
from specbuild.runtime.executors.tensorrt.launched_role import LaunchedRole
from specbuild.runtime.executors.tensorrt.library import last_error
from specbuild.runtime.executors.tensorrt.op_launches import OpLauncher

Shapes = Mapping[str, tuple[int, ...]]


class LaunchedSession:
    """Replays the launches of a role without an engine."""

    def __init__(self, gpu: Gpu, role: LaunchedRole) -> None:
        self._gpu = gpu
        self._role = role
        self._launchers = [OpLauncher(gpu, record, role.cubins) for record in role.records]
        scratch_bytes = max((record.workspace_bytes for record in role.records), default=0)
        self._workspace = gpu.allocate(max(scratch_bytes, 512))

    def queue(
        self,
        profile: int,
        shapes: Shapes,
        addresses: Mapping[str, int],
        stream: Handle,
        *,
        scalars: Mapping[str, int],
    ) -> None:
        """Queue every call; bucket i of a record is for profile i."""
        del shapes, scalars  # the profile says them
        for call in self._role.calls:
            tensors = [addresses[name] for name in call.tensors]
            self._launchers[call.record].enqueue(profile, tensors, self._workspace, stream)

    def close(self) -> None:
        """Release the scratch memory."""
        self._gpu.release(self._workspace)


class EngineSession:
    """A deserialized engine. Contexts run one after another, so they share scratch memory."""

    def __init__(self, trt: Any, gpu: Gpu, engine: Any, role: str, errors: list[str]) -> None:
        self._trt = trt
        self._gpu = gpu
        self._engine = engine
        self._role = role
        self._errors = errors
        self._contexts: dict[int, Any] = {}
        self._bytes = int(engine.device_memory_size_v2)
        self._scratch = gpu.allocate(max(self._bytes, 512))
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        inputs = trt.TensorIOMode.INPUT
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == inputs]
        self._names = names
        aliases = {name: engine.get_aliased_input_tensor(name) for name in names}
        self._aliases = {name: source for name, source in aliases.items() if source}
        host = trt.TensorLocation.HOST
        self._on_host = {
            name: np.zeros((), np.int32)
            for name in self._inputs
            if engine.get_tensor_location(name) == host
        }

    def queue(
        self,
        profile: int,
        shapes: Shapes,
        addresses: Mapping[str, int],
        stream: Handle,
        *,
        scalars: Mapping[str, int],
    ) -> None:
        """Queue the engine at these shapes."""
        context = self._context(profile, stream)
        for name in self._inputs:
            if name in shapes and not context.set_input_shape(name, shapes[name]):
                raise self._refusal(f"input {name} of shape {shapes[name]}")
        for name in self._names:
            if name not in addresses:
                raise OutdatedEngineError(
                    f"the engine of role {self._role} has a tensor {name} that its manifest does "
                    "not list"
                )
            self._require_alias(name, addresses)
            place = self._place(name, addresses[name], scalars)
            if not context.set_tensor_address(name, place):
                raise self._refusal(f"the address of {name}")
        if not context.execute_async_v3(int(stream)):
            raise self._refusal("the launch")

    def _require_alias(self, name: str, addresses: Mapping[str, int]) -> None:
        """Check that an output which overwrites an input has its address."""
        source = self._aliases.get(name)
        if source is not None and addresses.get(source) != addresses[name]:
            raise OutdatedEngineError(
                f"the engine of role {self._role} writes {name} over {source}, which lies "
                "elsewhere here"
            )

    def _place(self, name: str, address: int, scalars: Mapping[str, int]) -> int:
        """Return TensorRT's address of a tensor: a value that determines shapes is read on the
        host.
        """
        if name not in scalars or name not in self._on_host:
            return address
        self._on_host[name][...] = scalars[name]
        return self._on_host[name].ctypes.data

    def close(self) -> None:
        """Release the contexts and their scratch memory."""
        self._contexts.clear()
        self._engine = None
        self._gpu.release(self._scratch)

    def _context(self, profile: int, stream: Handle) -> Any:
        """Return the context of a profile; its first call must not be recorded."""
        if profile not in self._contexts:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
            if context is None:
                raise self._refusal("an execution context")
            if not context.set_optimization_profile_async(profile, int(stream)):
                raise self._refusal(f"profile {profile}")
            context.set_device_memory(self._scratch, self._bytes)
            self._gpu.synchronize(stream)
            self._contexts[profile] = context
        return self._contexts[profile]

    def _refusal(self, what: str) -> SpecbuildError:
        aliases = f" ({last_error(self._errors)})" if self._errors else ""
        return UnsupportedHereError(
            f"TensorRT refuses {what} of role {self._role}{aliases}; build the engine again"
        )
