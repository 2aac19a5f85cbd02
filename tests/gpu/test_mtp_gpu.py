"""An MTP layer on a GPU: it drafts the tokens of plain torch, and changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_models import SIZES, VOCAB
from example_engine import (
    CHAIN,
    TREE,
    every_other_sampled,
    on_gpu,
    outputs,
    random_prompts,
    records,
)
from mimo_checkpoints import PlainMimoMtp, write_mimo
from synthetic_chains import expected_histogram
from synthetic_models import MAX_SEQ_LEN, run, successors

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import build_engine
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import Launch, Program, ProgramEntry
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt

LENGTHS, TOKENS = (5, 230, 40, 17), 64
THETA = 500.0
# For bf16 logits against an fp32 reference, relative to the largest.
TOLERANCE = 0.06


@dataclass(frozen=True)
class Model:
    """A random checkpoint, its MTP layer in plain torch, and its engine on the GPU."""

    path: Path
    plain: PlainMimoMtp
    engine: Engine


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """Models with the layer's weights in bf16, and in a lossy format."""
    folder = tmp_path_factory.mktemp("mtp")
    rope = {"rope_type": "default", "rope_theta": THETA}
    tensors = write_mimo(folder / "model", **SIZES, rope_parameters=rope)
    options = BuildOptions.from_flat(
        model=folder / "model", draft=Path("mtp"), output=folder / "engine", backend="cuda",
        max_seq_len=512, max_batch_size=4, draft_dtype=request.param, **asdict(TREE),
    )  # fmt: skip
    build(options, SilentProgress())
    heads = {"heads": SIZES["num_attention_heads"], "kv_heads": SIZES["num_key_value_heads"]}
    plain = PlainMimoMtp(tensors, **heads, eps=SIZES["rms_norm_eps"], theta=THETA)
    with on_gpu(options.output) as engine:
        yield Model(folder / "model", plain, engine)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_and_other_sequences_change_no_bit(model: Model, shape: DraftShape) -> None:
    """Compare tokens and log-probabilities, greedy and sampled, alone and in a batch."""
    prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
    pairs = list(zip(prompts, params, strict=True))
    plain = [outputs(records(model.engine, [p], [asked], None))[0] for p, asked in pairs]
    alone = [outputs(records(model.engine, [p], [asked], shape))[0] for p, asked in pairs]
    together = records(model.engine, prompts, params, shape)
    assert alone == plain and outputs(together) == plain
    assert sum(sum(record.stats.acceptance_histogram[1:]) for record in together) > 0


def test_logits_of_every_level_equal_plain_torch(model: Model) -> None:
    """Check every step with the target's states in transformers, fp32.

    A shift by one would be detected.
    """
    if model.engine.manifest.draft is None or model.engine.manifest.draft.dtype != "bf16":
        pytest.skip("plain torch has the weights in bf16")
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    assert isinstance(model.engine.executor, CudaExecutor)
    prompt = random_prompts(VOCAB, LENGTHS)[2]
    with kept_levels(model.engine.executor) as steps:
        (record,) = records(model.engine, [prompt], greedy, CHAIN)
    text = [*(prompt.prompt_ids or ()), *record.output_ids]
    states, errors = states_of(model.path, text), []
    for length, levels in steps:
        path = levels[:-1].argmax(axis=1).tolist()
        expected = model.plain.follow(states[:length], text[1 : length + 1], path).numpy()
        errors.append(np.abs(levels - expected).max(axis=1) / np.abs(expected).max())
    assert len(errors) > TOKENS // (CHAIN.draft_depth + 1)
    print("largest relative error by level:", np.max(errors, axis=0))
    assert np.max(errors) < TOLERANCE


def states_of(path: Path, ids: list[int]) -> torch.Tensor:
    """Return transformers' states after the final norm, [T, H] fp32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(path)
    reference_model = Qwen2ForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        states: torch.Tensor = reference_model.model(torch.tensor([ids])).last_hidden_state[0]
    return states


@contextmanager
def kept_levels(executor: CudaExecutor) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Record each step's length of the first sequence, and its logits by level [D, V].

    The step's kernels are launched singly, and the logits of a level are read before the launch
    that selects its candidates.
    """
    runner, start = executor.runner, executor.runner.start
    recorded: list[tuple[int, np.ndarray]] = []

    def start_and_keep(entry: ProgramEntry) -> None:
        if entry.kind != "step" or not entry.draft_depth:
            start(entry)
            return
        program, levels = runner.described(entry), []
        length, done = (int(executor.read(name, rows=1)[0]) for name in ("length", "done"))
        configs = runner.program(entry).launches
        for i, (config, launch) in enumerate(zip(configs, program.launches, strict=True)):
            if chooses(program, i, launch):
                logits = program.ops[launch.op].inputs["logits"]
                data = executor.peek(logits.buffer, logits.offset, 4 * logits.shape[-1])
                levels.append(data.view(np.float32).copy())
            runner.gpu.launch(config, runner.stream)
        if not done:  # otherwise it is queued before the end is detected
            recorded.append((length, np.stack(levels)))

    runner.start = start_and_keep  # type: ignore[method-assign]
    try:
        yield recorded
    finally:
        runner.start = start  # type: ignore[method-assign]


def chooses(program: Program, index: int, launch: Launch) -> bool:
    """Return whether this is the first launch that reads a level's logits."""
    first = index == 0 or program.launches[index - 1].op != launch.op
    return first and program.ops[launch.op].op == "TreeExpand"


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SynthModel, Engine]]:
    sizes: dict[str, Any] = {"prompts": 6, "prompt_tokens": 24}
    model = SynthModel(SynthOptions("tiny-mimo", acceptance=0.78, draft_kind="mtp", **sizes))
    options = BuildOptions(
        model=Path("tiny-mimo"),
        output=tmp_path_factory.mktemp("synth") / "engine",
        backend="cuda",
        limits=LimitOptions(max_seq_len=MAX_SEQ_LEN, max_batch_size=4),
        drafting=DraftOptions(top_k=1, tokens=4),
    )
    build_engine(model, options, SilentProgress())
    with on_gpu(options.output) as engine:
        yield model, engine


@pytest.mark.parametrize("depth", [None, 1, 4])
def test_tokens_and_acceptance_follow_the_rules(
    synthetic: tuple[SynthModel, Engine], depth: int | None
) -> None:
    """Several sequences run together, and steps accept any number of draft tokens."""
    model, engine = synthetic
    target, draft = successors(model)
    shape = None if depth is None else DraftShape(1, depth, depth)
    prompts = [Prompt(str(i), tuple(ids), None) for i, ids in enumerate(model.prompts())]
    for record in run(engine, prompts, shape):
        expected = expected_histogram(record, target, draft, depth or 0)
        assert list(record.stats.acceptance_histogram) == expected
