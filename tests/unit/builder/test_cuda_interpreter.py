"""The example engine's CUDA plan, interpreted on the CPU, against the CPU engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_graphs import EXAMPLE_LIMITS
from left_out import slow
from plan_host import PlanHost, fused_engine, step_name

from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.engine import (
    CudaModel,
    LoweredEngine,
    lower_engine,
)
from specbuild.builder.backends.cuda.fusions.quantize_weights import quantize_weights
from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.builder.backends.cuda.plan.plan_writer import (
    LoweredProgram,
    PlanWriter,
    lower_program,
    program_bytes,
)
from specbuild.builder.backends.cuda.step.ir import Call, ProgramIr, Storage, Tensor
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.engine.sizes import EngineSizes, with_limits
from specbuild.builder.graph.passes.cleanup import remove_unused
from specbuild.plugins_cuda.choose.op import gumbel_noise
from specbuild.plugins_cuda.launches import Lowering, Phase, Target, TensorInfo, Unsupported
from specbuild.plugins_cuda.linear.storage import MXFP4
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import NULL, POINTER, Program
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.engine_dir.tensor_table import without_table
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss"
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
TREE = DraftShape(**{name: EXAMPLE_LIMITS[name] for name in DraftShape.__dataclass_fields__})
TOKENS = 32
SEED = 7
FORCED_TOKENS = 120
RING_SLOTS = 400
# bf16 may exchange two logits that are closer than this.
NEAR_TIE = 0.1


@pytest.fixture(scope="module")
def fused() -> tuple[CudaModel, EngineSizes]:
    """Two sequences and trees of 8 nodes."""
    return fused_engine(EXAMPLE / "target", EXAMPLE / "draft", **EXAMPLE_LIMITS)


@pytest.fixture(scope="module")
def engine(fused: tuple[CudaModel, EngineSizes]) -> LoweredEngine:
    """Rings of 400 slots in windowed layers."""
    kernels = CallLowering(target_of("sm_90a"))

    def small_chunks(call: Call, phase: Phase) -> Lowering | Unsupported:
        if phase == "prefill" and any(t.shape[:1] > (256,) for t in call.outputs.values()):
            return Unsupported("a chunk of more rows needs a larger ring")
        return kernels(call, phase)

    return lower_engine(*fused, target_of("sm_90a"), small_chunks)


@pytest.fixture(scope="module")
def cpu(example_engine: Path) -> Engine:
    return Engine.load(example_engine)


@pytest.fixture(scope="module")
def prompts(cpu: Engine) -> list[list[int]]:
    """A prompt of over a chunk that ends within a page, a short one, and one past the ring."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert cpu.text is not None
    texts = [json.loads(line)["prompt"] for line in lines[:12]]
    ids = [list(cpu.text.encode(text, raw=True, most_tokens=1 << 15)) for text in texts]
    long = [token for prompt in ids for token in prompt]
    return [ids[0][:70], max(ids[1:6], key=len)[:23], long[: RING_SLOTS + 30]]


@pytest.fixture(scope="module")
def continued(cpu: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy outputs of the CPU engine for each prompt."""
    params = GenerateParams(max_new_tokens=FORCED_TOKENS, ignore_eos=True)
    results = []
    for ids in prompts[:2]:
        events = cpu.generate([Prompt("p", tuple(ids), None)], params, speculation=None)
        results.append([event.token_id for event in events if isinstance(event, TokenEvent)])
    return results


class Runs:
    """``TOKENS`` tokens of one sequence by steps of a program; each run is cached."""

    def __init__(self, engine: LoweredEngine) -> None:
        self.engine = engine
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, ids: list[int], program: str, temperature: float = 0.0) -> list[int]:
        key = (tuple(ids), program, temperature)
        if key not in self._known:
            host = PlanHost(self.engine)
            host.port("ignore_eos").fill_(1)
            first, _ = host.admit(0, ids, TOKENS, temperature=temperature, seed=SEED)
            tokens = [first, *host.generate(0, program, TOKENS - 1)]
            assert int(host.port("done")[0]) == 1 and len(tokens) == TOKENS
            self._known[key] = tokens
        return self._known[key]


@pytest.fixture(scope="module")
def runs(engine: LoweredEngine) -> Runs:
    return Runs(engine)


def assert_equal_up_to_near_ties(
    engine: LoweredEngine, ids: list[int], pair: list[list[int]], temperature: float = 0.0
) -> None:
    """Assert that sequences differ only after two tokens of nearly equal probability.

    Unlike the kernels, the references round differently with the number of rows.
    """
    differ = [i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
    if not differ:
        return
    at = differ[0]
    host = PlanHost(engine)
    host.give_pages(0)
    rows = [*ids, *pair[0][:at]]
    for start in range(0, len(rows), 64):
        scores = host.score(0, rows[start : start + 64], start)[-1]
    if temperature:
        position = torch.tensor([len(rows) - 1])
        noise = gumbel_noise(torch.tensor([SEED]), position, len(scores))[0]
        scores = scores / temperature + noise
    assert abs(scores[pair[0][at]] - scores[pair[1][at]]) < NEAR_TIE


def test_teacher_forcing_agrees_with_the_cpu_engine(
    engine: LoweredEngine, prompts: list[list[int]], continued: list[list[int]]
) -> None:
    equal = total = 0
    for ids, tokens in zip(prompts, continued, strict=False):
        host = PlanHost(engine)
        host.give_pages(0)
        rows = [*ids, *tokens]
        for start in range(0, len(rows) - 1, 64):
            logits = host.score(0, rows[start : start + 64], start)
            for row, logit in enumerate(logits, start):
                if len(ids) <= row + 1 < len(rows):
                    expected = rows[row + 1]
                    assert logit.max() - logit[expected] < NEAR_TIE
                    equal += int(logit.argmax()) == expected
                    total += 1
    assert total == 2 * FORCED_TOKENS
    # Which of two near ties is better depends on the order of additions of the CPU's kernels.
    assert equal / total >= 0.98


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["none", "chain", "tree"])
@pytest.mark.parametrize("prompt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_emit_the_tokens_of_the_cpu_engine(
    engine: LoweredEngine,
    runs: Runs,
    prompts: list[list[int]],
    continued: list[list[int]],
    shape: DraftShape | None,
    prompt: int,
) -> None:
    ids = prompts[prompt]
    tokens = runs(ids, step_name(1, shape))
    assert_equal_up_to_near_ties(engine, ids, [continued[prompt][:TOKENS], tokens])


@pytest.mark.parametrize(
    "shape", [pytest.param(None, marks=pytest.mark.slow), CHAIN], ids=["none", "chain"]
)
def test_the_ring_of_a_window_keeps_all_visible_tokens(
    engine: LoweredEngine,
    runs: Runs,
    cpu: Engine,
    prompts: list[list[int]],
    shape: DraftShape | None,
) -> None:
    ids = prompts[2]
    sliding = next(group for group in engine.engine_sizes.groups if group.name == "sliding")
    assert (sliding.pages - 1) // 2 * sliding.page_size == RING_SLOTS < len(ids)
    params = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    events = cpu.generate([Prompt("p", tuple(ids), None)], params, speculation=None)
    expected = [event.token_id for event in events if isinstance(event, TokenEvent)]
    tokens = runs(ids, step_name(1, shape))
    assert_equal_up_to_near_ties(engine, ids, [expected, tokens])


@pytest.mark.parametrize("shape", [*slow(CHAIN), TREE], ids=["chain", "tree"])
def test_a_draft_changes_no_token(
    engine: LoweredEngine, runs: Runs, prompts: list[list[int]], shape: DraftShape
) -> None:
    ids = prompts[1]
    plain = runs(ids, step_name(1))
    assert runs(ids, step_name(1, shape)) == plain
    with_logits = step_name(1, shape, full_logits=True)
    assert runs(ids, with_logits) == plain


@pytest.mark.parametrize(
    "program",
    [step_name(1, CHAIN), *slow(step_name(1, TREE, full_logits=True))],
)
def test_a_draft_changes_no_sampled_token(
    engine: LoweredEngine, runs: Runs, prompts: list[list[int]], program: str
) -> None:
    ids = prompts[1]
    pair = [runs(ids, name, temperature=0.9) for name in (step_name(1), program)]
    assert_equal_up_to_near_ties(engine, ids, pair, temperature=0.9)


def test_tokens_of_a_chain_are_accepted(engine: LoweredEngine, prompts: list[list[int]]) -> None:
    """The draft gets inputs like those in training, so most of its tokens are accepted."""
    host = PlanHost(engine)
    host.port("ignore_eos").fill_(1)
    host.admit(0, prompts[0], TOKENS)
    steps = []
    while not host.port("done")[0]:
        steps.append(host.step(step_name(1, CHAIN))[0])
    assert sum(len(step.tokens) for step in steps) == TOKENS - 1
    assert (TOKENS - 1) / len(steps) > 1.6
    assert sum(step.accepted for step in steps) > len(steps) / 2


@pytest.mark.slow
def test_a_quantized_draft_changes_no_token(
    fused: tuple[CudaModel, EngineSizes], runs: Runs, prompts: list[list[int]]
) -> None:
    """MXFP4 reduces the acceptance."""
    model, engine_sizes = fused
    models = dict(model.models)
    for role, projections in (("draft_fuse", 1), ("draft", 5)):
        models[role] = models[role].clone()
        assert quantize_weights(models[role], storage=MXFP4) == projections
        remove_unused(models[role])
    limits = replace(
        engine_sizes.limits, max_batch_size=1, draft_top_k=1, draft_tokens=CHAIN.draft_tokens
    )
    smaller = with_limits(engine_sizes, limits)
    coded = lower_engine(replace(model, models=models), smaller, target_of("sm_90a"))
    stored = [n for n in coded.weights if n.startswith("draft.") and "packed" in n]
    assert len(stored) == 6 and all(name.endswith(".packed.mxfp4") for name in stored)
    host = PlanHost(coded)
    host.port("ignore_eos").fill_(1)
    first, _ = host.admit(0, prompts[1], TOKENS)
    tokens, steps = [first], 0
    while not host.port("done")[0]:
        tokens += host.step(step_name(1, CHAIN))[0].tokens
        steps += 1
    assert tokens == runs(prompts[1], step_name(1))
    assert (TOKENS - 1) / steps > 1.4


def test_sequences_of_a_batch_are_independent(
    engine: LoweredEngine, runs: Runs, prompts: list[list[int]]
) -> None:
    """Two sequences step together; one ends first, and one row is initially idle."""
    alone = [runs(ids, step_name(1, CHAIN)) for ids in prompts[:2]]
    host = PlanHost(engine)
    host.port("ignore_eos").fill_(1)
    tokens = [[host.admit(0, prompts[0], TOKENS)[0]], []]
    name = step_name(2, CHAIN)
    for _ in range(2):
        idle = host.step(name)
        tokens[0] += idle[0].tokens
        assert idle[1].tokens == []
    tokens[1].append(host.admit(1, prompts[1], TOKENS)[0])
    while not host.port("done").all():
        for slot, step in enumerate(host.step(name)):
            tokens[slot] += step.tokens
    assert tokens == alone


def test_a_sequence_ends_at_its_first_eos(
    engine: LoweredEngine, runs: Runs, prompts: list[list[int]]
) -> None:
    plain = runs(prompts[0], step_name(1, CHAIN))
    eos = plain[TOKENS - 5]
    host = PlanHost(engine)
    host.port("eos_ids").fill_(-1)
    host.port("eos_ids")[0] = eos
    first, _ = host.admit(0, prompts[0], TOKENS)
    tokens = [first, *host.generate(0, step_name(1, CHAIN), TOKENS)]
    assert tokens == plain[: plain.index(eos, 1) + 1]


def programs_of(engine: LoweredEngine) -> Iterator[tuple[str, PlanWriter, LoweredProgram, Program]]:
    for entry, lowered in engine.programs:
        yield entry.name, engine.writer, lowered, engine.writer.program(lowered)


def test_live_buffers_of_a_program_do_not_overlap(engine: LoweredEngine) -> None:
    for name, writer, _, program in programs_of(engine):
        arena = next(i for i, b in enumerate(writer.buffers) if b.space == "arena")
        lives = program.lifetimes
        for i, a in enumerate(lives):
            assert a.offset + a.bytes <= writer.buffers[arena].bytes
            for b in lives[:i]:
                apart_in_time = a.last < b.first or b.last < a.first
                apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
                assert apart_in_time or apart, f"{name}: {a} and {b}"
        for index, call in enumerate(program.ops):
            for binding in (*call.inputs.values(), *call.outputs.values()):
                size = torch.Size(binding.shape).numel() * getattr(torch, binding.dtype).itemsize
                end = binding.offset + size
                assert end <= writer.buffers[binding.buffer].bytes
                assert binding.buffer != arena or any(
                    life.first <= index <= life.last
                    and life.offset <= binding.offset
                    and end <= life.offset + life.bytes
                    for life in lives
                ), f"{name}: {call.op} uses what is not alive"


def test_arguments_of_launches_are_within_their_buffers(engine: LoweredEngine) -> None:
    for name, writer, lowered, program in programs_of(engine):
        assert len(program.launches) == len(lowered.kernels) > 0
        for launch in program.launches:
            for argument in launch.arguments:
                if argument[0] == POINTER:
                    _, buffer, offset = argument
                    assert 0 <= offset < max(writer.buffers[buffer].bytes, 1), name
                    assert offset % 2 == 0
                else:
                    assert argument[0] != NULL or argument == (NULL,)
            assert 0 < launch.block <= 1024 and launch.shared_bytes <= 227 * 1024


def test_a_written_program_can_be_read(engine: LoweredEngine) -> None:
    *_, program = list(programs_of(engine))[-1]
    assert from_json(Program, without_table(json.loads(program_bytes(program))), "p") == program


def looked_up_twice() -> tuple[PlanInterpreter, Program]:
    """Return a program of x = table[ids], out = x[ids]: x is in the arena from op 0 to op 1."""
    gen = torch.Generator().manual_seed(0)
    table = torch.randn(5, 8, generator=gen).bfloat16()

    def tensor(name: str, space: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        info = TensorInfo(shape, dtype)
        return Tensor(Storage(name, space, info.nbytes), 0, info)  # type: ignore[arg-type]

    stored = tensor("table", "weights", (5, 8), "bfloat16")
    ports = {
        "ids": tensor("ids", "state", (4,), "int32"),
        "out": tensor("out", "state", (4, 8), "bfloat16"),
    }
    ir = ProgramIr("twice", "decode")
    inputs = {"token_ids": ports["ids"], "table": stored}
    x = ir.call("Embed", inputs, sizes={"H": 8})["x"]
    ir.call("Embed", {"token_ids": ports["ids"], "table": x}, outputs={"x": ports["out"]})
    lowered = lower_program(ir, lambda *_: Lowering(()))
    writer = PlanWriter([lowered], [stored], [], ports)
    memory = PlanInterpreter(writer.plan(Target(), 0, {}, []), lambda _: table)
    memory.port("ids").copy_(torch.tensor([3, 1, 2, 0]))
    return memory, writer.program(lowered)


def test_detects_buffers_that_are_released_too_early() -> None:
    memory, program = looked_up_twice()
    memory.run(program)
    assert memory.port("out").isfinite().all()
    (life,) = program.lifetimes
    memory.run(replace(program, lifetimes=(replace(life, last=0),)))
    assert memory.port("out").isnan().all()


def test_the_arena_is_poisoned_before_and_after_a_run() -> None:
    memory, program = looked_up_twice()
    memory.run(program)
    assert (memory.buffer("arena") == 0xFF).all()
