"""Some layers of true geometries on a GPU against transformers in fp32.

What bf16 costs is measured beside it: transformers' own bf16 forward, on the same GPU, from the
same checkpoint. The engine may not be further from fp32 than a small factor of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from example_engine import on_gpu

from specbuild.builder.build import build
from specbuild.builder.checkpoint.target_parts import HEAD
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.options import SynthOptions
from specbuild.builder.synth.synth import TARGET_FOLDER, write_checkpoints
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.decode.device.decoder import DeviceDecoder
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

pytestmark = pytest.mark.timeout(600)

# Layers of each geometry: windows and full attention in turn, and a dense model's, which are alike.
LAYERS = {"gpt-oss-20b": 4, "llama-3.1-8b": 2}
# Within the sliding window of 128, and far over it.
LENGTHS = (64, 300)
OUTPUT_TOKENS = 16
# What a synthetic checkpoint's own values are multiplied by, all powers of two: its sublayers add
# only a few per cent to the stream, and no gate of it reaches the limit.
GAINS = {"o_proj.weight": 16, "down_proj.weight": 16, "_proj.bias": 8, "_proj_bias": 8}
DOUBLINGS = {"gate_up_proj_scales": 2, "down_proj_scales": -1}
LOGIT_STD = 3.0
# Largest quotients of the engine's error and that of transformers in bf16.
MEDIAN_FACTOR, MEAN_FACTOR, WORST_FACTOR = 1.2, 1.4, 2.5


def loud(model: SynthModel) -> SynthModel:
    """The same model with sublayers that weigh as much as the stream, and a head of its own.

    An error in any of them then stands far over the rounding, and no token is right by much.
    """
    tensors = model.target_tensors
    for name, tensor in tensors.items():
        gain = next((GAINS[end] for end in GAINS if name.endswith(end)), 1)
        doublings = next((DOUBLINGS[end] for end in DOUBLINGS if name.endswith(end)), 0)
        tensors[name] = _changed(tensor, gain, doublings)
    shape = tensors[HEAD].shape

    def head(first: int, end: int) -> torch.Tensor:
        rows, std = torch.arange(first, end), LOGIT_STD / math.sqrt(shape[1])
        return model.noise.weight("a head of its own", rows, shape[1], std)

    tensors[HEAD] = SynthTensor("BF16", shape, head)
    return model


def _changed(tensor: SynthTensor, gain: int, added: int) -> SynthTensor:
    return replace(tensor, part=lambda first, end: tensor.part(first, end) * gain + added)


def write_target(geometry: str, output: Path) -> Path:
    """The checkpoint of a loud model."""
    model = loud(SynthModel(SynthOptions(geometry, layers=LAYERS[geometry], prompts=1)))
    write_checkpoints(model, output, SilentProgress(), force=False)
    return output / TARGET_FOLDER


@dataclass(frozen=True)
class Forward:
    """Logits fp32 [T, V] of one sequence in transformers: all in fp32, and the layers in bf16."""

    ids: tuple[int, ...]
    fp32: np.ndarray
    bf16: np.ndarray


def forwards(path: Path, sequences: Sequence[tuple[int, ...]], device: str) -> list[Forward]:
    """Both forwards of every sequence. The head is fp32 in both, as in the engine."""
    model = load_target(path, device=device, teacher=False)
    model.set_experts_implementation("eager")
    head = model.lm_head.weight.data
    fp32 = [_logits(model, ids, head) for ids in sequences]
    # The parameters only: positions times rounded frequencies would be other positions.
    for parameter in model.model.parameters():
        parameter.data = parameter.data.bfloat16()
    bf16 = [_logits(model, ids, head) for ids in sequences]
    return [Forward(*parts) for parts in zip(sequences, fp32, bf16, strict=True)]


@torch.no_grad()
def _logits(model: torch.nn.Module, ids: tuple[int, ...], head: torch.Tensor) -> np.ndarray:
    tokens = torch.tensor([ids], device=head.device)
    states = model.model(tokens, use_cache=False).last_hidden_state[0]
    return (states.float() @ head.T).cpu().numpy()


def random_sequences(vocab: int) -> list[tuple[int, ...]]:
    """Tokens that nothing has chosen."""
    random = np.random.default_rng(12)
    return [tuple(random.integers(0, vocab, n).tolist()) for n in LENGTHS]


def row_errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Root mean square over the vocabulary, by row."""
    return np.sqrt(np.square(got - wanted).mean(axis=1))


def near_tie(forward: Forward) -> float:
    """Logits nearer to each other than this may change places in bf16: each has its own error."""
    return 4 * float(row_errors(forward.bf16, forward.fp32).max())


def check_errors(got: np.ndarray, forward: Forward) -> None:
    """AssertionError where the engine is further from fp32 than bf16 explains."""
    ours, theirs = row_errors(got, forward.fp32), row_errors(forward.bf16, forward.fp32)
    print(
        f"{len(ours)} rows, rms errors of the engine and of bf16: median {np.median(ours):.4f} "
        f"{np.median(theirs):.4f}, mean {ours.mean():.4f} {theirs.mean():.4f}, "
        f"worst {ours.max():.4f} {theirs.max():.4f}; rms logit {forward.fp32.std():.2f}"
    )
    assert np.median(ours) <= MEDIAN_FACTOR * np.median(theirs)
    assert ours.mean() <= MEAN_FACTOR * theirs.mean()
    assert ours.max() <= WORST_FACTOR * theirs.max()


def check_choices(got: np.ndarray, forward: Forward) -> int:
    """How many rows fp32 leaves no doubt of; AssertionError where the best token of one differs."""
    wanted, rows, near = forward.fp32, np.arange(len(got)), near_tie(forward)
    lost = wanted.max(axis=1) - wanted[rows, got.argmax(axis=1)]
    second = np.partition(wanted, -2, axis=1)[:, -2]
    clear = wanted.max(axis=1) - second >= near
    print(
        f"equal choices {(lost == 0).mean():.4f}, bf16's {_equal(forward.bf16, wanted):.4f}; "
        f"margins from {near:.3f} on: {clear.mean():.2f} of the rows, largest lost {lost.max():.3f}"
    )
    assert (lost[clear] == 0).mean() >= 0.99
    assert lost.max() < near
    assert (lost == 0).mean() >= _equal(forward.bf16, wanted) - 0.05
    return int(clear.sum())


def scores(engine: Engine, forward: Forward) -> np.ndarray:
    """By the kernels that decode and verify, up to 64 rows a launch."""
    assert isinstance(engine.decoder, DeviceDecoder)
    return np.concatenate([scored.logits for scored in engine.decoder.score(forward.ids)])


def _equal(got: np.ndarray, wanted: np.ndarray) -> float:
    return float((got.argmax(axis=1) == wanted.argmax(axis=1)).mean())


@pytest.fixture(scope="module", params=LAYERS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(request.param, tmp_path_factory.mktemp("checkpoint") / "synthetic")


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Engine]:
    output = target.parent / "engine"
    options = BuildOptions(
        model=target,
        output=output,
        backend="cuda",
        gpu="sm_90a",
        limits=LimitOptions(max_seq_len=512, max_batch_size=1),
    )
    build(options, SilentProgress())
    with on_gpu(output) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def decoded(engine: Engine) -> list[tuple[tuple[int, ...], list[float]]]:
    """Random prompts with what the engine adds to each, and the log-probabilities of that."""
    params = GenerateParams(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    found = []
    for ids in random_sequences(engine.manifest.target.vocab):
        events = engine.generate([Prompt("random", ids)], params, speculation=None)
        (record,) = [event.record for event in events if isinstance(event, FinishEvent)]
        found.append(((*ids, *record.output_ids), list(record.logprobs)))
    return found


@pytest.fixture(scope="module")
def expected(
    target: Path, decoded: list[tuple[tuple[int, ...], list[float]]]
) -> Iterator[list[Forward]]:
    yield forwards(target, [ids for ids, _ in decoded], "cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("number", range(len(LENGTHS)), ids=[f"{n} tokens" for n in LENGTHS])
def test_scores_are_as_near_to_fp32_as_bf16_allows(
    engine: Engine, expected: list[Forward], number: int
) -> None:
    check_errors(scores(engine, expected[number]), expected[number])


def test_choices_without_doubt_are_those_of_fp32(engine: Engine, expected: list[Forward]) -> None:
    """Few random rows are without doubt: those of all lengths count together."""
    assert sum(check_choices(scores(engine, forward), forward) for forward in expected) > 5


@pytest.mark.parametrize("number", range(len(LENGTHS)), ids=[f"{n} tokens" for n in LENGTHS])
def test_prefill_and_steps_choose_and_weigh_as_fp32_does(
    expected: list[Forward],
    decoded: list[tuple[tuple[int, ...], list[float]]],
    number: int,
) -> None:
    """A prompt by the prefill kernels, then one row at a time over what they cached."""
    forward, (ids, logprobs) = expected[number], decoded[number]
    rows = slice(LENGTHS[number] - 1, len(ids) - 1)
    wanted, bf16 = (torch.from_numpy(x[rows]).double() for x in (forward.fp32, forward.bf16))
    chosen = torch.tensor(ids[LENGTHS[number] :])[:, None]
    near = near_tie(forward)
    lost = wanted.max(dim=1).values - wanted.gather(1, chosen)[:, 0]
    assert float(lost.max()) < near
    theirs = (bf16.log_softmax(1) - wanted.log_softmax(1)).gather(1, chosen)[:, 0]
    ours = torch.tensor(logprobs).double() - wanted.log_softmax(1).gather(1, chosen)[:, 0]
    print(f"log-probabilities off by {ours.abs().mean():.4f}, bf16's by {theirs.abs().mean():.4f}")
    assert float(ours.abs().max()) < near
    assert float(ours.square().mean()) < (3 * row_errors(forward.bf16, forward.fp32).mean()) ** 2
