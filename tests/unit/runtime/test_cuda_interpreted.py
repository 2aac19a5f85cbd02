"""The device loop with a real plan. The interpreter replaces the kernels, and runs late."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_pair
from drafter_cases import CASES
from fake_gpu import FakeGpu
from p_eagle_drafts import write_p_eagle
from plan_host import PlanHost, lowered_engine, step_name
from toy_engine import run
from toy_model import toy_manifest

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.step import draft as draft_passes
from specbuild.builder.backends.cuda.step import programs
from specbuild.builder.backends.cuda.step.logit_processor_steps import processor_batches
from specbuild.plugins_cuda.choose.op import gumbel_noise
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.decode.logit_rows import adjust, log_probability
from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

CHAIN, TREE, LONG = DraftShape(1, 2, 2), DraftShape(2, 2, 4), DraftShape(1, 6, 6)
TOKENS = 14
# The references round differently with the number of rows, unlike the kernels.
NEAR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    write_pair(path)
    return path


@pytest.fixture(scope="module")
def lowered(folder: Path) -> LoweredEngine:
    return lower(folder)


def lower(path: Path, built_for: DraftShape = TREE) -> LoweredEngine:
    limits = dataclasses.asdict(built_for)
    return lowered_engine(
        path / "target", path / "draft", max_seq_len=128, max_batch_size=2, page_size=16, **limits
    )


class InterpretedRunner:
    """Start programs as a ProgramRunner does. Each runs when the stream reaches it."""

    def __init__(self, host: PlanHost, gpu: FakeGpu, executor: CudaExecutor) -> None:
        self.host, self.gpu, self.stream = host, gpu, executor.runner.stream
        self.started: list[str] = []
        memory, plan = executor._memory, host.plan
        for i, (buffer, address) in enumerate(zip(plan.buffers, memory.addresses, strict=True)):
            if buffer.space != "weights":
                host.memory._memory[i] = torch.from_numpy(gpu.view(address, buffer.bytes))

    def prepare(self, entry: ProgramEntry) -> None:
        assert entry in self.host.plan.programs

    def start(self, entry: ProgramEntry) -> None:
        self.started.append(entry.name)
        self.gpu.enqueue(self.stream, lambda: self.host.run(entry.name))

    def close(self) -> None:
        """Release nothing."""


def engine_of(lowered: LoweredEngine, **changes: object) -> tuple[Engine, InterpretedRunner]:
    """Return an engine with these programs. ``changes`` are applied to its manifest."""
    host, gpu = PlanHost(lowered), FakeGpu()
    executor = CudaExecutor(gpu, host.plan, lambda _: b"", lambda _: None)
    runner = InterpretedRunner(host, gpu, executor)
    executor.runner = runner
    toy = toy_manifest()
    manifest = dataclasses.replace(
        toy,
        backend="cuda",
        limits=lowered.engine_sizes.limits,
        cache_groups=lowered.engine_sizes.groups,
        target=dataclasses.replace(toy.target, vocab=host.port("score.logits").shape[1]),
        roles={},
        **changes,  # type: ignore[arg-type]
    )
    return Engine(manifest, executor), runner


def prompts(engine: Engine) -> list[list[int]]:
    random, vocab = np.random.default_rng(8), engine.manifest.target.vocab
    return [random.integers(0, vocab, n).tolist() for n in (21, 70, 1)]


def assert_alike(lowered: LoweredEngine, ids: list[int], pair: list[list[int]]) -> None:
    """Require equal tokens up to a position with two almost equal logits."""
    at = next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None)
    if at is None:
        return
    host = PlanHost(lowered)
    host.give_pages(0)
    rows = [*ids, *pair[0][:at]]
    for start in range(0, len(rows), 64):
        scores = host.score(0, rows[start : start + 64], start)[-1]
    assert abs(scores[pair[0][at]] - scores[pair[1][at]]) < NEAR


def assert_loop_and_plan_agree(lowered: LoweredEngine, shape: DraftShape | None) -> None:
    engine, runner = engine_of(lowered)
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    batch = prompts(engine)
    result = run(engine, batch, params, speculation=shape)
    assert {name for name in runner.started if name.startswith("step")} >= {step_name(2, shape)}
    for ids, tokens in zip(batch, result.ids, strict=True):
        host = PlanHost(lowered)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, ids, TOKENS)
        alone = [first, *host.generate(0, step_name(1, shape), TOKENS - 1)]
        assert_alike(lowered, ids, [alone[:TOKENS], tokens])


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
def test_the_loop_emits_the_tokens_of_the_plan(
    lowered: LoweredEngine, shape: DraftShape | None
) -> None:
    assert_loop_and_plan_agree(lowered, shape)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_fixed_form_changes_no_token(lowered: LoweredEngine, temperature: float) -> None:
    """The second root child alone has children, which no tree by scores has."""
    tree = StaticTree.of([-1, -1, 1, 1])
    params = GenerateParams(
        max_new_tokens=TOKENS, ignore_eos=True, sampling=SamplingParams(temperature, seed=4)
    )
    plain, _ = engine_of(lowered)
    batch = prompts(plain)
    expected = run(plain, batch, params, speculation=None)
    engine, runner = engine_of(lowered)
    result = run(engine, batch, params, speculation=tree)
    assert {name for name in runner.started if name.startswith("step")} >= {step_name(2, TREE)}
    for ids, *pair in zip(batch, expected.ids, result.ids, strict=True):
        if temperature:
            # Samples have no other scores by which two tokens could be as good as equal.
            assert pair[0][:8] == pair[1][:8]
        else:
            assert_alike(lowered, ids, pair)
    placed = tree.placed(TREE)
    assert placed is not None
    np.testing.assert_array_equal(runner.host.port("tree_form").numpy(), placed.form)
    proposed = sum(record.stats.proposed_tokens for record in result.records)
    steps = sum(record.stats.steps for record in result.records)
    assert proposed > 3 * steps - 10
    run(engine, batch[:1], params, speculation=TREE)
    assert not runner.host.port("tree_form").any()


def test_rejects_a_tree_without_a_program(lowered: LoweredEngine) -> None:
    engine, _ = engine_of(lowered)
    for parents in ([-1, -1, -1], [-1, 0, 1], [-1, -1, 0, 0, 1]):
        with pytest.raises(RequestError, match=r"no steps for the draft|was built for"):
            run(engine, [[1]], GenerateParams(), speculation=StaticTree.of(parents))


@pytest.mark.slow
def test_an_engine_runs_the_long_chain_that_it_was_built_for(folder: Path) -> None:
    assert_loop_and_plan_agree(lower(folder, LONG), LONG)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE, LONG], ids=["chain", "tree", "long chain"])
@pytest.mark.parametrize("name", CASES)
def test_the_loop_runs_every_kind_of_draft(tmp_path: Path, name: str, shape: DraftShape) -> None:
    case = CASES[name]
    if shape.draft_depth > case.chain.draft_depth:
        shape = case.chain
    draft, _ = case.write(tmp_path, True)
    limits = dataclasses.asdict(shape)
    engine = lowered_engine(
        tmp_path / "model", draft, max_seq_len=128, max_batch_size=2, page_size=16, **limits
    )
    assert_loop_and_plan_agree(engine, shape)


@pytest.mark.slow
def test_a_draft_of_three_layers_runs(folder: Path, tmp_path: Path) -> None:
    """P-EAGLE: prompts and plain steps attend in all layers but the last."""
    (tmp_path / "target").symlink_to(folder / "target")
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32, "inner": 64}
    write_p_eagle(tmp_path / "draft", target_layers=2, target_hidden=96, layers=3, **sizes)
    for shape in (LONG, TREE):
        assert_loop_and_plan_agree(lower(tmp_path, shape), shape)


def test_the_draft_keeps_up_without_drafting(lowered: LoweredEngine) -> None:
    """Steps without a draft ingest the same rows that drafting steps would."""
    ids, plain = prompts(engine_of(lowered)[0])[0], step_name(1)
    hosts = [PlanHost(lowered) for _ in range(2)]
    for host in hosts:
        host.port("ignore_eos").fill_(1)
        host.admit(0, ids, TOKENS)
    paused, steady = hosts
    capacity, pending_rows, emitted = paused.port("pending_tokens").shape[1], 1, []
    for _ in range(TOKENS - 3):
        full = pending_rows == capacity
        emitted += paused.step(f"{plain}.extends" if full else plain)[0].tokens
        pending_rows = 1 if full else pending_rows + 1
        assert int(paused.port("pending_count")[0]) == pending_rows
    drafted = steady.generate(0, step_name(1, CHAIN), len(emitted))
    assert_alike(lowered, ids, [drafted[: len(emitted)], emitted])
    held = min(int(h.port("length")[0]) - int(h.port("pending_count")[0]) for h in hosts)
    assert held > len(ids) + capacity
    rows = [draft_rows(lowered, host)[:, :held] for host in hosts]
    assert rows[0].abs().amin((0, 2, 3)).max() > 0
    torch.testing.assert_close(rows[0], rows[1], atol=NEAR, rtol=NEAR)


def test_the_draft_keeps_up_in_masked_steps(lowered: LoweredEngine) -> None:
    """For any number of pending rows at the first of them, alternating with steps that draft."""
    ids, plain = prompts(engine_of(lowered)[0])[0], step_name(1)
    masked, steady = (PlanHost(lowered) for _ in range(2))
    for host in (masked, steady):
        host.port("ignore_eos").fill_(1)
        host.admit(0, ids, TOKENS)
    emitted = []
    for name in (plain, plain, *["step@1.adjusted.extends"] * 4, step_name(1, CHAIN)):
        emitted += masked.step(name)[0].tokens
        if "adjusted" in name:
            assert int(masked.port("pending_count")[0]) == 1
    drafted = steady.generate(0, step_name(1, CHAIN), len(emitted))
    assert_alike(lowered, ids, [drafted[: len(emitted)], emitted])
    held = min(int(h.port("length")[0]) - int(h.port("pending_count")[0]) for h in (masked, steady))
    assert held > len(ids) + 5
    rows = [draft_rows(lowered, host)[:, :held] for host in (masked, steady)]
    torch.testing.assert_close(rows[0], rows[1], atol=NEAR, rtol=NEAR)


def test_the_draft_keeps_up_if_no_draft_fits(folder: Path, lowered: LoweredEngine) -> None:
    """Two sequences have more pending rows than a launch may have here, so they alternate."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (programs, draft_passes):
            patch.setattr(module, "MAX_DECODE_ROWS", 4)
        narrow = lower(folder)
    names = {entry.name for entry, _ in narrow.programs}
    assert {step_name(1, CHAIN), "step@2.extends"} <= names
    assert step_name(2, CHAIN) not in names
    paused, both = PlanHost(narrow), prompts(engine_of(lowered)[0])[:2]
    paused.port("ignore_eos").fill_(1)
    for row, ids in enumerate(both):
        paused.admit(row, ids, TOKENS)
    capacity, emitted = paused.port("pending_tokens").shape[1], ([], [])
    for step in range(TOKENS - 3):
        full = step > 0 and step % (capacity - 1) == 0
        for tokens, found in zip(emitted, paused.step(f"step@2{'.extends' * full}"), strict=True):
            tokens.extend(found.tokens)
    for row, ids in enumerate(both):
        steady = PlanHost(lowered)
        steady.port("ignore_eos").fill_(1)
        steady.admit(0, ids, TOKENS)
        drafted = steady.generate(0, step_name(1, CHAIN), len(emitted[row]))
        assert_alike(lowered, ids, [drafted[: len(emitted[row])], emitted[row]])
        ends = [(paused, row), (steady, 0)]
        held = min(int(h.port("length")[s]) - int(h.port("pending_count")[s]) for h, s in ends)
        assert held > len(ids) + capacity
        rows = [draft_rows(lowered, host, at)[:, :held] for host, at in ends]
        torch.testing.assert_close(rows[0], rows[1], atol=NEAR, rtol=NEAR)


def draft_rows(lowered: LoweredEngine, host: PlanHost, row: int = 0) -> torch.Tensor:
    """Return keys and values of a sequence in the draft's cache, [2, positions, heads, width]."""
    group = next(g for g in lowered.engine_sizes.groups if g.name == "draft")
    pool = host.memory.buffer("cache:draft").view(torch.bfloat16).float()
    pool = pool.view(2, -1, group.kv_heads, group.page_size, group.k_width)
    pages = host.port("page_table.draft")[row].long()
    return pool[:, pages].transpose(2, 3).flatten(1, 2)


def test_top_k_uses_the_programs_with_logits(lowered: LoweredEngine) -> None:
    engine, runner = engine_of(lowered)
    # With one token there is nothing to sample.
    sampling = SamplingParams(temperature=1.0, top_k=1, seed=4)
    params = GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)
    greedy = dataclasses.replace(params, sampling=SamplingParams())
    ids = prompts(engine)[0]
    drawn = run(engine, [ids], params, speculation=CHAIN).ids[0]
    assert step_name(1, CHAIN, full_logits=True) in runner.started
    assert_alike(lowered, ids, [run(engine, [ids], greedy, speculation=CHAIN).ids[0], drawn])


def test_scores_are_the_plans(lowered: LoweredEngine) -> None:
    engine, _ = engine_of(lowered)
    assert isinstance(engine.decoder, DeviceDecoder)
    ids = prompts(engine)[1]
    host = PlanHost(lowered)
    host.give_pages(0)
    expected = torch.cat([host.score(0, ids[s : s + 64], s) for s in range(0, len(ids), 64)])
    found = np.concatenate([scored.logits for scored in engine.decoder.score(ids)])
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logit_processors_select_the_tokens_of_the_host(
    lowered: LoweredEngine, temperature: float
) -> None:
    """A second sequence that drafts has the tokens that it has alone."""
    engine, runner = engine_of(lowered, drafted_logit_processors=True)
    # The last prompt is one token: its first output token is changed right behind it.
    drafting, *others = prompts(engine)
    sampling = SamplingParams(
        temperature, frequency_penalty=0.6, repetition_penalty=1.2, min_p=0.02, logit_bias={5: 1.0}
    )
    plain = GenerateParams(max_new_tokens=8, ignore_eos=True)
    changed = dataclasses.replace(plain, sampling=sampling, top_logprobs=4)
    both = run(engine, [others[1], drafting], [changed, plain], speculation=TREE)
    steps = {step_name(n, TREE, full_logits=True) for n in (1, 2)}
    assert {"adjust", step_name(2, TREE, full_logits=True)} <= set(runner.started)
    assert {name for name in runner.started if name.startswith("step")} <= steps
    alone = run(engine_of(lowered)[0], [drafting], plain, speculation=TREE)
    assert_alike(lowered, drafting, [alone.ids[0], both.ids[1]])
    record, ids = both.records[0], others[1]
    host = PlanHost(lowered)
    host.give_pages(0)
    rows = host.score(0, [*ids, *record.output_ids[:-1]])[len(ids) - 1 :].numpy()
    for i, (token, row) in enumerate(zip(record.output_ids, rows, strict=True)):
        mine = row.copy()
        output = np.array(record.output_ids[:i], np.int32)
        adjust(mine, changed, prompt=np.array(ids), output=output, eos_token_ids=())
        score, position = mine / (temperature or 1), len(ids) - 1 + i
        if temperature:
            noise = gumbel_noise(torch.tensor([0]), torch.tensor([position]), len(mine))
            score = score + noise[0].numpy()
        assert score[token] > score.max() - NEAR
        assert abs(record.logprobs[i] - log_probability(row, token)) < NEAR
        best = [t for t, _ in record.top_logprobs[i]]
        assert row[best].min() > np.sort(row)[-4] - NEAR


def test_steps_that_change_logits_are_few(lowered: LoweredEngine) -> None:
    names = [entry.name for entry, _ in lowered.programs]
    assert [name for name in names if "adjust" in name] == [
        "step@1.adjusted", "step@1.adjusted.extends",
        "step@2.adjusted", "step@2.adjusted.extends", "adjust",
    ]  # fmt: skip
    assert [processor_batches(n) for n in (1, 2, 8, 64, 100)] == [
        (1,), (1, 2), (1, 4, 8), (1, 4, 16, 64), (1, 4, 16, 64, 128),
    ]  # fmt: skip
