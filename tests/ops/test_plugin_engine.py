"""A complete TensorRT engine with its own kernels, in the emulator, without TensorRT."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from emulated_cubins import kernel_number
from emulation import emulated_entry, has_compiler
from latent_files import write_latents
from plugin_engine import BuiltPlugins, HostGpu, Stream, build_plugins, executor_of
from walked_graph import WalkedGraph

from specbuild.plugins_cuda.launches import Kernel
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.tensorrt.executor import RoleSession, TensorRtExecutor
from specbuild.runtime.executors.tensorrt.launched_role import read_launched_role
from specbuild.runtime.executors.tensorrt.sessions import LaunchedSession
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler(), reason="g++ is not installed"),
]
PROMPTS = ((3, 1, 4, 1, 5), (2, 7))
TREE = DraftShape(2, 2, 3)


@dataclass
class EmulatedHost(HostGpu):
    """Host memory as a GPU, with kernels in the emulator.

    A cubin identifies a kernel by its number.
    """

    kernels: tuple[Kernel, ...] = ()
    shared: dict[Kernel, int] = field(default_factory=dict)

    def load_module(self, _cubin: bytes, where: str) -> int:
        return kernel_number(where)

    def function(self, module: int, entry: str) -> Kernel:
        assert self.kernels[module].entry == entry
        return self.kernels[module]

    def set_shared(self, function: Kernel, shared_bytes: int, carveout: int) -> None:
        assert -1 <= carveout <= 100
        self.shared[function] = shared_bytes

    def launch(self, config: LaunchConfig, stream: Stream) -> None:
        assert config.shared_bytes <= self.shared.get(config.function, 0)
        grid = (ctypes.c_uint * 3)(*config.grid)
        pointers = ctypes.c_void_p(config.parameters)

        def operation() -> None:
            entry = emulated_entry(config.function)
            assert entry(grid, ctypes.c_uint(config.block), pointers) == 0, "deadlock"

        self.do(stream, operation)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltPlugins:
    """Build an engine, two of whose four layers cache latents."""
    folder = tmp_path_factory.mktemp("plugins")
    write_target(folder / "target")
    write_latents(folder / "target", {1: 20, 2: 12})
    write_draft(folder / "draft")
    return build_plugins(
        folder / "target", folder / "draft",
        max_seq_len=64, max_batch_size=2, page_size=16,
        draft_top_k=2, draft_depth=2, draft_tokens=3,
    )  # fmt: skip


def emulated(built: BuiltPlugins) -> TensorRtExecutor:
    """Return the executor over interpreted graphs and replayed roles, weights on the host."""
    gpu = EmulatedHost(kernels=built.kernels)
    weights = {}
    for name, recipe in built.engine.weights.items():
        data = recipe.checked().contiguous().flatten().view(torch.uint8).numpy()
        weights[name] = gpu.allocate(data.nbytes + 512)
        gpu.buffers[weights[name]][: data.nbytes] = data

    def open_session(name: str) -> RoleSession:
        role = built.manifest.roles[name]
        if name in built.engine.graphs:
            return WalkedGraph(gpu, built.engine.graphs[name])
        data = built.engine.files[role.file]
        return LaunchedSession(gpu, read_launched_role(data, name, len(role.profiles)))

    return TensorRtExecutor(gpu, built.manifest, open_session, weights)


def generated(
    built: BuiltPlugins, executor: TensorRtExecutor, shape: DraftShape | None
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the tokens and log-probabilities of every prompt."""
    prompts = [Prompt(str(i), prompt_ids=p) for i, p in enumerate(PROMPTS)]
    params = GenerateParams(max_new_tokens=6, ignore_eos=True)
    events = Engine(built.manifest, executor).generate(prompts, params, speculation=shape)
    records = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [(records[i].output_ids, records[i].logprobs) for i in range(len(PROMPTS))]


def test_drafts_change_no_bit(built: BuiltPlugins) -> None:
    plain = generated(built, emulated(built), None)
    assert generated(built, emulated(built), DraftShape(1, 2, 2)) == plain
    assert generated(built, emulated(built), TREE) == plain
    by_references, _, _ = executor_of(built)
    by_reference = generated(built, by_references, None)
    for (tokens, got_logprobs), (expected, logprobs) in zip(plain, by_reference, strict=True):
        # The reference rounds differently: sequences may differ after two tokens of equal
        # probability.
        differences = [
            i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len({*pair}) > 1
        ]
        alike = slice(differences[0] + 1 if differences else None)
        np.testing.assert_allclose(got_logprobs[alike], logprobs[alike], atol=0.05)
    assert any(
        tokens == expected for (tokens, _), (expected, _) in zip(plain, by_reference, strict=True)
    )
