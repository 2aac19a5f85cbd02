"""The example as a TensorRT engine whose plans are its plugin graphs, run node by node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from example_engine import EXAMPLE, build_example
from plugin_engine import built_by_nobody
from walked_graph import WalkedGraph

from specbuild.builder.backends.tensorrt import options as tensorrt_options
from specbuild.builder.backends.tensorrt.plugins import engine_files
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.cuda.driver import DriverGpu
from specbuild.runtime.executors.tensorrt import loading
from specbuild.runtime.executors.tensorrt.executor import RoleSession
from specbuild.runtime.executors.tensorrt.launched_role import read_launched_role
from specbuild.runtime.executors.tensorrt.sessions import LaunchedSession


def build_walked(output: Path, model: Path = EXAMPLE / "target") -> None:
    """Build the example as an engine whose plans are the graphs themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_options, "require_library", lambda _: None)
        patch.setattr(engine_files, "build_engine", built_by_nobody)
        build_example(output, model=model, backend="tensorrt", gpu="sm_90a")


def load_walked(directory: Path) -> Engine:
    """Load the engine with interpreted graphs instead of TensorRT; the rest is the runtime."""

    def opener(
        _library: object, gpu: DriverGpu, _directory: Path, manifest: Manifest
    ) -> Callable[[str], RoleSession]:
        def open_session(name: str) -> RoleSession:
            role = manifest.roles[name]
            data = bytes(read_file(directory, manifest, role.file))
            if role.file.endswith(".engine"):
                return WalkedGraph(gpu, data)
            return LaunchedSession(gpu, read_launched_role(data, name, len(role.profiles)))

        return open_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "reasons_here", lambda *_: [])
        patch.setattr(loading, "load", lambda _: None)
        patch.setattr(loading, "register_creators", lambda *_: None)
        patch.setattr(loading, "session_opener", opener)
        return Engine.load(directory)
