"""Pools of a TensorRT executor: overwritten in place or separate, of keys or of latents."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_draft, write_target
from hypothesis import given
from hypothesis import strategies as st
from latent_files import write_latents
from left_out import examples
from plugin_engine import ApartSession, Built, GraphSession, build_plugins, executor_of
from toy_engine import run

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1])
TREE = DraftShape(2, 2, 3)
PAGE = 16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two of three layers cache latents, whose pools are wider than their contents."""
    folder = tmp_path_factory.mktemp("latents")
    write_target(folder / "target", layers=3)
    write_latents(folder / "target", {0: 12, 1: 20})
    write_draft(folder / "draft", target_layers=3)
    return build_plugins(
        folder / "target", folder / "draft",
        max_seq_len=64, max_batch_size=2, page_size=PAGE,
        draft_top_k=2, draft_depth=2, draft_tokens=3,
    )  # fmt: skip


def test_every_role_has_pools_as_wide_as_kernels_want_them(built: Built) -> None:
    for role in ("target", "commit"):
        ports = built.manifest.roles[role].inputs
        widths = {port.name: port.shape[3] for port in ports if port.name.endswith("c_pool")}
        assert widths == {"latent_sliding.0.c_pool": 16, "latent.1.c_pool": 32}


def test_an_engine_without_a_draft_verifies_nothing(tmp_path: Path) -> None:
    """A launch of chains for every sequence would exceed the rows of decoding kernels."""
    write_target(tmp_path / "target", layers=1)
    built = build_plugins(tmp_path / "target", None, max_seq_len=64, max_batch_size=64)
    assert set(built.manifest.roles) == {"target", "choose"}
    assert built.manifest.limits.draft_tokens == 0


def test_drafts_change_no_token_wherever_pools_lie(built: Built) -> None:
    """Plugins overwrite a pool; engines of standard ops read and write separate memory."""
    apart = Built(built.models, replace(built.manifest, backend="tensorrt-rtx"))
    params, tokens = GenerateParams(max_new_tokens=6), []
    for engine, session, shape in (
        (built, GraphSession, None), (built, GraphSession, TREE), (apart, ApartSession, TREE),
    ):  # fmt: skip
        executor, gpu, sessions = executor_of(engine, session=session)
        loaded = Engine(engine.manifest, executor)
        tokens.append(run(loaded, PROMPTS, params, speculation=shape).ids)
        assert ("draft" in sessions) == (shape is not None) and gpu.graphs > 0
        executor.close()
        assert not gpu.held
    assert tokens[0] == tokens[1] == tokens[2]


@given(st.lists(st.lists(st.integers(-1, 40), min_size=2, max_size=3), min_size=1, max_size=3))
@examples(10)
def test_commits_read_everything_before_they_write(built: Built, paths: list[list[int]]) -> None:
    """Several commits, some recorded, with slots that one of them both reads and writes."""
    apart = Built(built.models, replace(built.manifest, backend="tensorrt-rtx"))
    executor, _, sessions = executor_of(apart, session=ApartSession)
    executor.prepare(["commit"])
    ports = built.manifest.roles["commit"].inputs
    pools = {port.name: port.shape for port in ports if port.name.endswith("_pool")}
    slots = [port.name for port in ports if port.name not in pools]
    rng, wanted = np.random.default_rng(len(paths)), {}
    for name, shape in pools.items():
        drawn = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        wanted[name] = drawn.view(np.uint16)
        memory(executor._pools.addresses([name])[name], shape)[...] = wanted[name]
    for path in paths:
        # A path moves to the slots from 8 on; several of them may be on it.
        source, target = np.full((2, 1, 3), -1, np.int32)
        source[0, : len(path)], target[0, : len(path)] = path, range(8, 8 + len(path))
        executor.run("commit", {n: source if ".from_" in n else target for n in slots})
        for name, before in wanted.items():
            wanted[name] = before.copy()
            for a, b in zip(source[0], target[0], strict=True):
                if a >= 0 and a != b:
                    wanted[name][b // PAGE, :, b % PAGE] = before[a // PAGE, :, a % PAGE]
    assert sessions["commit"].queued
    for name, shape in pools.items():
        got = memory(executor._pools.addresses([name])[name], shape)
        np.testing.assert_array_equal(got, wanted[name])
    executor.close()


def memory(address: int, shape: tuple[int | str, ...]) -> np.ndarray:
    """Return the bits of a bf16 pool in the substitute's memory."""
    sizes = [int(size) for size in shape]
    held = (ctypes.c_uint16 * math.prod(sizes)).from_address(address)
    return np.frombuffer(held, np.uint16).reshape(sizes)
