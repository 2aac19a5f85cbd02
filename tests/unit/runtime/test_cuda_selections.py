"""DSA on a device: real sparse plans, with the interpreter instead of the kernels."""

from __future__ import annotations

import dataclasses
import re
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
from plan_host import PlanHost, lowered_engine, step_name
from test_cuda_interpreted import InterpretedRunner
from toy_engine import Run, run
from toy_model import toy_manifest

from specbuild.builder import build as building
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan import interpret
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams

CHAIN = DraftShape(1, 2, 2)
SIZES = {"max_seq_len": 96, "max_batch_size": 1, "draft_top_k": 1, "draft_depth": 2}
DSA = {"dsa": True, "dsa_top_k": 80, "dsa_threshold": 40, "dsa_recent_tokens": 4}
SPECPV = {
    "specpv": True,
    "specpv_block_size": 16,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 1,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 14,
    "specpv_partial_threshold": 64,
    "specpv_full_refresh_interval": 2,
}
VIEWED = {**SPECPV, "specpv_partial_threshold": 34}
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


@pytest.fixture(scope="module")
def latent(checkpoints: Path) -> LoweredEngine:
    """A layer with a window and one of two layers with indexers cache latents."""
    path = checkpoints / "latent"
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_latents(path / "t", {0: 12, 3: 12})
    write_draft(path / "d")
    return lowered_engine(**options(path))


@dataclasses.dataclass
class Device:
    """An engine whose programs the interpreter runs."""

    engine: Engine
    runner: InterpretedRunner

    def decode(self, shape: DraftShape | None, top_k: int | None, tokens: int = TOKENS) -> Run:
        params = GenerateParams(max_new_tokens=tokens, ignore_eos=True, dsa_top_k=top_k)
        return run(self.engine, [prompt()], params, speculation=shape)

    @property
    def steps(self) -> list[bool]:
        """Return whether each step was sparse."""
        return [kind == "sparse" for kind in self.kinds]

    @property
    def kinds(self) -> list[str]:
        """Return how each step's program attends."""
        steps = [name.split(".") for name in self.runner.started if name.startswith("step")]
        return [next((k for k in ("sparse", "checked") if k in s), "whole") for s in steps]


def device(lowered: LoweredEngine, *, specpv: bool = False, **changes: Any) -> Device:
    """Return the engine without checks, or with other values that programs do not contain."""
    dsa = lowered.engine_sizes.dsa
    assert dsa is not None
    host, gpu = PlanHost(lowered), FakeGpu()
    executor = CudaExecutor(gpu, host.plan, lambda _: b"", lambda _: None)
    runner = InterpretedRunner(host, gpu, executor)
    executor.runner = runner  # type: ignore[assignment]
    toy = toy_manifest()
    manifest = dataclasses.replace(
        toy,
        backend="cuda",
        limits=lowered.engine_sizes.limits,
        cache_groups=lowered.engine_sizes.groups,
        dsa=dataclasses.replace(dsa, **{"check_interval": 0, **changes}),
        specpv=lowered.engine_sizes.specpv if specpv else None,
        target=dataclasses.replace(toy.target, vocab=host.port("score.logits").shape[1]),
        roles={},
    )
    return Device(Engine(manifest, executor), runner)


def prompt() -> list[int]:
    return np.random.default_rng(7).integers(3, 250, PROMPT).tolist()


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_steps_are_sparse_from_the_threshold_on(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    whole, few, many = (device(lowered) for _ in range(3))
    full = whole.decode(shape, 0)
    sparse, everything = few.decode(shape, FEW), many.decode(shape, None)
    # Selecting all tokens is full attention.
    assert everything.ids == full.ids
    assert not any(whole.steps)
    assert not few.steps[0] and few.steps[-1] and few.steps == sorted(few.steps)
    same = [a == b for a, b in zip(sparse.ids[0], full.ids[0], strict=True)]
    # The token behind position t is the last that rows up to t decide.
    assert all(same[: 40 - PROMPT + 1]) and not all(same)
    stats = [decoded.records[0].stats for decoded in (full, sparse, everything)]
    counts = [s.dsa.narrowed_steps for s in stats if s.dsa is not None]
    assert counts[0] == 0 and 0 < counts[1] <= sum(few.steps)
    assert all(s.dsa is not None and s.dsa.broken_lists == 0 for s in stats)


@pytest.fixture(scope="module")
def latents(checkpoints: Path) -> Path:
    """Every layer caches latents."""
    path = checkpoints / "latents"
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_latents(path / "t", {0: 12, 1: 20, 2: 12, 3: 12})
    write_draft(path / "d")
    return path


@pytest.fixture(scope="module", params=["quest", "indexer", "latents"])
def viewed(checkpoints: Path, latents: Path, request: pytest.FixtureRequest) -> LoweredEngine:
    """Views of keys and values selected by keys, or by indexers; views of latents."""
    path = latents if request.param == "latents" else checkpoints
    score = "quest" if request.param == "quest" else "indexer"
    return lowered_engine(**options(path, **VIEWED, specpv_score=score))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_rows_select_tokens_within_partial_views(
    viewed: LoweredEngine, shape: DraftShape | None
) -> None:
    whole, everything, sparse = (device(viewed, specpv=True) for _ in range(3))
    full = whole.decode(shape, 0, TOKENS)
    assert everything.decode(shape, None).ids == full.ids
    found = sparse.decode(shape, FEW)
    assert found.ids != full.ids
    assert any(re.search(r"refresh-\d+\.sparse", name) for name in sparse.runner.started)
    dsa, specpv = found.records[0].stats.dsa, found.records[0].stats.specpv
    assert dsa is not None and specpv is not None
    assert dsa.broken_lists == 0 and dsa.narrowed_steps > 4 and specpv.partial_steps > 2
    checked = device(viewed, specpv=True, check_interval=1, min_agreement=0.0)
    again = checked.decode(shape, FEW)
    stats = again.records[0].stats.dsa
    assert stats is not None and 0 < stats.agreed_tokens < stats.checked_tokens
    if shape is None:
        assert again.ids == full.ids


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_keys_in_fp8_choose_nearly_the_same(
    lowered: LoweredEngine, checkpoints: Path, shape: DraftShape | None
) -> None:
    """They take half of the cache. The CPU engine rounds the same keys."""
    asked = options(checkpoints, dsa_key_dtype="fp8")
    fp8 = lowered_engine(**asked)
    bf16_cache, fp8_cache = (
        next(b.bytes for b in PlanHost(engine).plan.buffers if b.name == "cache:indexer")
        for engine in (lowered, fp8)
    )
    assert 2 * fp8_cache == bf16_cache
    assert device(fp8).decode(shape, None).ids == device(fp8).decode(shape, 0).ids
    host, found = PlanHost(fp8), device(fp8).decode(shape, FEW).records[0]
    assert found.stats.dsa is not None and found.stats.dsa.broken_lists == 0
    host.admit(0, prompt(), 9)
    assert host.memory.buffer("cache:indexer").count_nonzero() > 16 * PROMPT
    building.build(
        BuildOptions.from_flat(
            **asked, output=checkpoints / "fp8", dsa_check_interval=0, force=True
        ),
        SilentProgress(),
    )
    cpu = Engine.load(checkpoints / "fp8")
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=FEW)
    theirs = run(cpu, [prompt()], params, speculation=None).records[0]
    pairs = zip(found.output_ids, theirs.output_ids, strict=True)
    assert next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS) > 40 - PROMPT + 4


@pytest.mark.slow
def test_latents_are_sparse_like_keys(latent: LoweredEngine) -> None:
    lists = [
        sum("selected" in c.inputs for c in program.ir.calls if c.op.name == "MlaAttention")
        for entry, program in latent.programs if entry.sparse
    ]  # fmt: skip
    assert set(lists) == {1, 2}
    full = device(latent).decode(CHAIN, 0)
    assert device(latent).decode(CHAIN, None).ids == full.ids
    sparse = device(latent).decode(CHAIN, FEW)
    assert sparse.ids == device(latent).decode(None, FEW).ids != full.ids
    checked = device(latent, check_interval=1, min_agreement=0.0).decode(None, FEW)
    assert checked.ids == device(latent).decode(None, 0).ids
    stats = checked.records[0].stats.dsa
    assert stats is not None and 0 < stats.agreed_tokens < stats.checked_tokens
    assert stats.broken_lists == 0


def test_a_draft_changes_no_token(lowered: LoweredEngine) -> None:
    assert device(lowered).decode(None, FEW).ids == device(lowered).decode(CHAIN, FEW).ids


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_checks_emit_the_tokens_of_full_attention_and_count_selections(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    """Every sparse step is a check: the tokens are those of attention to everything."""
    full = device(lowered).decode(shape, 0)
    checked = device(lowered, check_interval=1, min_agreement=0.0)
    found = checked.decode(shape, FEW)
    stats = found.records[0].stats.dsa
    assert stats is not None and stats.narrowed_steps == stats.fallback_steps == 0
    # A tree's deepest rows reach the threshold in front of the step that is counted.
    assert set(checked.kinds) <= {"whole", "checked", *(["sparse"] if shape else [])}
    if shape is None:
        assert (found.ids, found.records[0].logprobs) == (full.ids, full.records[0].logprobs)
    # The last steps in flight may find the sequence done.
    assert 4 < stats.checked_steps <= checked.kinds.count("checked")
    assert stats.checked_tokens == stats.checked_steps + stats.accepted_whole
    assert 0 < stats.agreed_tokens < stats.checked_tokens


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["none", "chain"])
def test_a_check_counts_the_tokens_of_a_sparse_step(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    host, name = PlanHost(lowered), step_name(1, shape)
    # Where nothing is drafted the draft takes up in a check what waits for it.
    names = {"sparse": f"{name}.sparse", "": name}
    names["checked"] = f"{name}.checked" if shape else f"{name}.extends.checked"
    host.port("ignore_eos").fill_(1)
    host.admit(0, prompt(), 50)
    lasting = [b.name for b in host.plan.buffers if b.space in ("state", "cache", "ring")]
    seen = []
    for _ in range(12):
        place = int(host.port("step")[0])
        found = {}
        kept = {name: host.memory.buffer(name).clone() for name in lasting}
        for kind, counts, other in (("sparse", FEW, -1), ("", -1, -1), ("checked", -1, FEW)):
            for buffer, before in kept.items():
                host.memory.buffer(buffer).copy_(before)
            host.port("list_budget").fill_(counts)
            host.port("check_budget").fill_(other)
            [found[kind]] = host.step(names[kind])
        whole, sparse = found[""], found["sparse"]
        assert found["checked"] == whole
        tokens, agreed, accepted, sampled, broken = host.port("ring.checks")[place, 0].tolist()
        assert (tokens, accepted, sampled) == (
            len(whole.tokens), whole.accepted, sparse.accepted,
        )  # fmt: skip
        pairs = [a == b for a, b in zip(whole.tokens, sparse.tokens, strict=False)]
        assert sum(pairs) <= agreed <= sum(pairs) + max(0, accepted - sampled)
        assert broken == 0
        seen.append(agreed / tokens)
    assert 0 < sum(seen) < len(seen)


def test_low_agreement_falls_back_to_programs_without_lists(
    lowered: LoweredEngine,
) -> None:
    strict, lenient = (
        device(lowered, check_interval=4, min_agreement=least) for least in (1.0, 0.0)
    )
    stats = [d.decode(None, 1, tokens=40).records[0].stats.dsa for d in (strict, lenient)]
    fallen, kept = stats
    assert fallen is not None and kept is not None
    assert fallen.agreement is not None and fallen.agreement < 1.0
    assert fallen.fallback_steps > 4 and fallen.checked_steps > 8
    assert kept.fallback_steps == 0 and kept.narrowed_steps > 4
    threshold = strict.kinds.index("checked")
    assert strict.kinds[threshold:].count("whole") >= fallen.fallback_steps
    assert lenient.kinds[threshold:].count("whole") == 0
    # Steps launched before the eighth check was read are still sparse.
    assert strict.kinds[-8:].count("sparse") == 0
    for one in (fallen, kept):
        assert one.checked_steps + one.narrowed_steps + one.fallback_steps == 39 - (40 - PROMPT)


def test_invalid_lists_are_replaced_by_full_attention_and_counted(
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
def test_selected_tokens_equal_the_cpu_engine(lowered: LoweredEngine, checkpoints: Path) -> None:
    """Compare log-probabilities along a sparse context, while both emit the same tokens."""
    asked = options(checkpoints, output=checkpoints / "cpu", dsa_check_interval=0)
    building.build(BuildOptions.from_flat(**asked), SilentProgress())
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


def test_only_sparse_programs_have_lists(lowered: LoweredEngine) -> None:
    for entry, program in lowered.programs:
        ops = Counter(call.op.name for call in program.ir.calls)
        lists = [
            "selected" in c.inputs for c in program.ir.calls if c.op.name == "PagedTreeAttention"
        ]
        passes = 1 + entry.checks
        assert ops["RmsIndexer"] == 2 * passes
        assert entry.sparse == ("sparse" in entry.name or "checked" in entry.name)
        assert sum(lists) == ops["DsaIndexer"] == ops["DsaCheck"] == 2 * passes * entry.sparse
        assert ops["DsaTally"] == entry.sparse
        assert ops["DsaCompare"] == entry.checks == ("checked" in entry.name)


def refused(path: Path, message: str, **changes: Any) -> None:
    asked = BuildOptions.from_flat(
        **options(path, output=path / "refused", backend="cuda", **changes)
    )
    with pytest.raises(SpecbuildError, match=message):
        building.build(asked, SilentProgress())


def test_rejects_layers_without_kernels(checkpoints: Path, tmp_path: Path) -> None:
    asked = {**SPECPV, "specpv_score": "indexer", "dsa_key_dtype": "fp8"}
    refused(checkpoints, "summarize bf16 keys, but these are fp8", **asked)
    latent = tmp_path / "latent"
    write_target(latent / "t")
    write_indexers(latent / "t", [1, 3], width=16)
    write_latents(latent / "t", {3: 12})
    write_draft(latent / "d")
    asked["dsa_key_dtype"] = "bf16"
    refused(latent, "some full-attention layers cache latents .* take one of the two", **asked)
    write_target(tmp_path / "t")
    write_indexers(tmp_path / "t", [1, 3], width=8)
    write_draft(tmp_path / "d")
    refused(tmp_path, "2 heads of 8 values, but CUDA kernels support")
