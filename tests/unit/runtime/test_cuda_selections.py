"""DSA on a device: real plans that narrow, the interpreter in the kernels' stead."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_draft, write_target
from fake_gpu import FakeGpu
from indexer_files import write_indexers
from latent_files import write_latents
from plan_host import PlanHost, lowered_engine
from test_cuda_interpreted import InterpretedRunner
from toy_engine import Run, run
from toy_model import toy_manifest

from specbuild.builder import build as building
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan import interpret
from specbuild.builder.config import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.manifest import DraftShape
from specbuild.runtime.request import GenerateParams

CHAIN = DraftShape(1, 2, 2)
SIZES = {"max_seq_len": 96, "max_batch_size": 1, "draft_top_k": 1, "draft_depth": 2}
DSA = {"dsa": True, "dsa_top_k": 80, "dsa_threshold": 40, "dsa_recent_tokens": 4}
SPECPV = {
    "enable_specpv": True,
    "specpv_block_size": 16,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 1,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 14,
    "specpv_partial_threshold": 64,
    "specpv_full_refresh_interval": 2,
}
PROMPT, TOKENS, FEW = 34, 20, 6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selections")
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_draft(path / "d")
    return path


def options(path: Path, **changes: Any) -> dict[str, Any]:
    return {"model": path / "t", "draft": path / "d", **SIZES, "page_size": 16, **DSA, **changes}


@pytest.fixture(scope="module")
def lowered(checkpoints: Path) -> LoweredEngine:
    return lowered_engine(**options(checkpoints))


@dataclasses.dataclass
class Device:
    """An engine whose programs the interpreter runs."""

    engine: Engine
    runner: InterpretedRunner

    def decode(self, shape: DraftShape | None, top_k: int | None) -> Run:
        params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=top_k)
        return run(self.engine, [prompt()], params, speculation=shape)

    @property
    def steps(self) -> list[bool]:
        """Whether each step narrowed."""
        return ["narrowed" in name for name in self.runner.started if name.startswith("step")]


def device(lowered: LoweredEngine) -> Device:
    host, gpu = PlanHost(lowered), FakeGpu()
    executor = CudaExecutor(gpu, host.plan, lambda _: b"", lambda _: None)
    runner = InterpretedRunner(host, gpu, executor)
    executor.runner = runner  # type: ignore[assignment]
    toy = toy_manifest()
    manifest = dataclasses.replace(
        toy,
        backend="cuda",
        limits=lowered.plan.limits,
        cache_groups=lowered.plan.groups,
        dsa=lowered.plan.dsa,
        target=dataclasses.replace(toy.target, vocab=host.port("score.logits").shape[1]),
        roles={},
    )
    return Device(Engine(manifest, executor), runner)


def prompt() -> list[int]:
    return np.random.default_rng(7).integers(3, 250, PROMPT).tolist()


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_steps_narrow_from_the_threshold_on(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    whole, few, many = (device(lowered) for _ in range(3))
    full = whole.decode(shape, 0)
    narrowed, everything = few.decode(shape, FEW), many.decode(shape, None)
    # Choosing as many as there are is full attention.
    assert everything.ids == full.ids
    assert not any(whole.steps)
    assert not few.steps[0] and few.steps[-1] and few.steps == sorted(few.steps)
    same = [a == b for a, b in zip(narrowed.ids[0], full.ids[0], strict=True)]
    # The token behind position t is the last that rows up to t decide.
    assert all(same[: 40 - PROMPT + 1]) and not all(same)
    stats = [decoded.records[0].stats for decoded in (full, narrowed, everything)]
    counts = [s.dsa.narrowed_steps for s in stats if s.dsa is not None]
    assert counts[0] == 0 and 0 < counts[1] <= sum(few.steps)
    assert all(s.dsa is not None and s.dsa.broken_lists == 0 for s in stats)


def test_a_draft_changes_no_token(lowered: LoweredEngine) -> None:
    assert device(lowered).decode(None, FEW).ids == device(lowered).decode(CHAIN, FEW).ids


def test_broken_lists_give_way_to_everything_and_are_counted(
    lowered: LoweredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = device(lowered).decode(None, 0), interpret.op_named

    def spoiled(name: str) -> Any:
        op = real(name)
        if name != "DsaIndexer":
            return op

        def reference(*tensors: Any, **attributes: Any) -> torch.Tensor:
            lists = op.reference(*tensors, **attributes)
            lists[..., 0] = torch.where(lists[..., 0] < 0, lists[..., 0], 2)
            return lists

        return dataclasses.replace(op, reference=reference)

    monkeypatch.setattr(interpret, "op_named", spoiled)
    found = device(lowered).decode(None, FEW)
    stats = found.records[0].stats.dsa
    assert stats is not None and found.ids == full.ids
    assert stats.broken_launches == stats.narrowed_steps > 5
    assert stats.broken_lists == 2 * stats.broken_launches


@pytest.mark.slow
def test_chosen_tokens_are_those_of_the_cpu_engine(
    lowered: LoweredEngine, checkpoints: Path
) -> None:
    """Log-probabilities along a narrowed context, where both engines emit the same tokens."""
    asked = options(checkpoints, output=checkpoints / "cpu", dsa_check_interval=0)
    building.build(BuildOptions(**asked), SilentProgress())
    cpu = Engine.load(checkpoints / "cpu")
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=FEW)
    theirs = run(cpu, [prompt()], params, speculation=None).records[0]
    ours = device(lowered).decode(None, FEW).records[0]
    whole = device(lowered).decode(None, 0).records[0]
    pairs = zip(ours.output_ids, theirs.output_ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS)
    assert same > 40 - PROMPT + 4

    def distance(record: Any) -> float:
        near = np.subtract(record.logprobs[:same], theirs.logprobs[:same])
        return float(np.abs(near).mean())

    assert 4 * distance(ours) < distance(whole), (distance(ours), distance(whole), same)


def test_only_narrowed_programs_hold_lists(lowered: LoweredEngine) -> None:
    for entry, program in lowered.programs:
        ops = Counter(call.op.name for call in program.ir.calls)
        lists = [
            "selected" in c.inputs for c in program.ir.calls if c.op.name == "PagedTreeAttention"
        ]
        assert ops["RmsIndexer"] == 2
        assert entry.narrows == ("narrowed" in entry.name)
        assert sum(lists) == ops["DsaIndexer"] == ops["DsaCheck"] == 2 * entry.narrows
        assert ops["DsaTally"] == entry.narrows


def refused(path: Path, message: str, **changes: Any) -> None:
    asked = BuildOptions(**options(path, output=path / "refused", backend="cuda", **changes))
    with pytest.raises(SpecbuildError, match=message):
        building.build(asked, SilentProgress())


def test_what_has_no_kernels_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    refused(checkpoints, "--dsa with --specpv: no CUDA step", **SPECPV)
    refused(checkpoints, "--dsa-check-interval is about checks", dsa_check_interval=9)
    refused(checkpoints, "--dsa-min-agreement is about checks", dsa_min_agreement=0.5)
    for folder, width in (("narrow", 8), ("latent", 16)):
        path = tmp_path / folder
        write_target(path / "t")
        write_indexers(path / "t", [1, 3], width=width)
        write_draft(path / "d")
    write_latents(tmp_path / "latent" / "t", {0: 12, 3: 12})
    refused(tmp_path / "narrow", "2 heads of 8 values, CUDA kernels take")
    refused(tmp_path / "latent", "layers 3 cache latents .* and have indexers")
