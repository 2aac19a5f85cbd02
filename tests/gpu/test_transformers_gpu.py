"""Some layers of published geometries on a GPU against transformers in fp32.

The error of bf16 is measured too, by transformers' bf16 forward of the same checkpoint on the same
GPU. The engine's error may exceed it by a small factor only.
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

# Layers of each geometry: alternating windows and full attention; a dense model's are equal.
LAYERS = {"gpt-oss-20b": 4, "llama-3.1-8b": 2}
# Within the sliding window of 128, and far beyond it.
LENGTHS = (64, 300)
OUTPUT_TOKENS = 16
# Factors of a synthetic checkpoint's values, all powers of two. Its sublayers alone add only a few
# per cent to the stream, and none of its gates reaches the limit.
GAINS = {"o_proj.weight": 16, "down_proj.weight": 16, "_proj.bias": 8, "_proj_bias": 8}
DOUBLINGS = {"gate_up_proj_scales": 2, "down_proj_scales": -1}
LOGIT_STD = 3.0
# The largest ratios of the engine's error to that of transformers in bf16.
MEDIAN_FACTOR, MEAN_FACTOR, WORST_FACTOR = 1.2, 1.4, 2.5


def amplified(model: SynthModel) -> SynthModel:
    """Return the model with sublayers as large as the stream, and a separate head.

    An error in any of them then exceeds rounding, and no token wins by a large margin.
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
    """Write the checkpoint of such a model."""
    model = amplified(SynthModel(SynthOptions(geometry, layers=LAYERS[geometry], prompts=1)))
    write_checkpoints(model, output, SilentProgress(), force=False)
    return output / TARGET_FOLDER


@dataclass(frozen=True)
class Forward:
    """Logits fp32 [T, V] of one sequence in transformers: all in fp32, and with bf16 layers."""

    ids: tuple[int, ...]
    fp32: np.ndarray
    bf16: np.ndarray


def forwards(path: Path, sequences: Sequence[tuple[int, ...]], device: str) -> list[Forward]:
    """Return both forwards of every sequence. The head is fp32 in both, as in the engine."""
    model = load_target(path, device=device, teacher=False)
    model.set_experts_implementation("eager")
    head = model.lm_head.weight.data
    fp32 = [_logits(model, ids, head) for ids in sequences]
    # Convert the parameters only: rounded frequencies would give other positions.
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
    """Return random tokens, which no model selected."""
    random = np.random.default_rng(12)
    return [tuple(random.integers(0, vocab, n).tolist()) for n in LENGTHS]


def row_errors(result: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the root mean square over the vocabulary of each row."""
    return np.sqrt(np.square(result - reference).mean(axis=1))


def near_tie(forward: Forward) -> float:
    """Return the difference below which bf16 may exchange logits, given the error of each."""
    return 4 * float(row_errors(forward.bf16, forward.fp32).max())


def check_errors(result: np.ndarray, forward: Forward) -> None:
    """Assert that the error of the engine against fp32 is explained by bf16."""
    actual, desired = row_errors(result, forward.fp32), row_errors(forward.bf16, forward.fp32)
    print(
        f"{len(actual)} rows, rms errors of the engine and of bf16: median {np.median(actual):.4f} "
        f"{np.median(desired):.4f}, mean {actual.mean():.4f} {desired.mean():.4f}, "
        f"worst {actual.max():.4f} {desired.max():.4f}; rms logit {forward.fp32.std():.2f}"
    )
    assert np.median(actual) <= MEDIAN_FACTOR * np.median(desired)
    assert actual.mean() <= MEAN_FACTOR * desired.mean()
    assert actual.max() <= WORST_FACTOR * desired.max()


def check_choices(result: np.ndarray, forward: Forward) -> int:
    """Assert that the best token is equal in rows without near ties; return their number."""
    reference, rows, near = forward.fp32, np.arange(len(result)), near_tie(forward)
    lost = reference.max(axis=1) - reference[rows, result.argmax(axis=1)]
    second = np.partition(reference, -2, axis=1)[:, -2]
    clear = reference.max(axis=1) - second >= near
    print(
        f"equal choices {(lost == 0).mean():.4f}, bf16's {_equal(forward.bf16, reference):.4f}; "
        f"margins from {near:.3f} on: {clear.mean():.2f} of the rows, largest lost {lost.max():.3f}"
    )
    assert (lost[clear] == 0).sum() >= 0.99 * clear.sum()
    assert lost.max() < near
    assert (lost == 0).mean() >= _equal(forward.bf16, reference) - 0.05
    return int(clear.sum())


def scores(engine: Engine, forward: Forward) -> np.ndarray:
    """Score with the kernels that decode and verify, in launches of up to 64 rows."""
    assert isinstance(engine.decoder, DeviceDecoder)
    return np.concatenate([scored.logits for scored in engine.decoder.score(forward.ids)])


def _equal(result: np.ndarray, reference: np.ndarray) -> float:
    return float((result.argmax(axis=1) == reference.argmax(axis=1)).mean())


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
    """Random prompts, the engine's output tokens, and their log-probabilities."""
    params = GenerateParams(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    results = []
    for ids in random_sequences(engine.manifest.target.vocab):
        events = engine.generate([Prompt("random", ids)], params, speculation=None)
        (record,) = [event.record for event in events if isinstance(event, FinishEvent)]
        results.append(((*ids, *record.output_ids), list(record.logprobs)))
    return results


@pytest.fixture(scope="module")
def expected(
    target: Path, decoded: list[tuple[tuple[int, ...], list[float]]]
) -> Iterator[list[Forward]]:
    yield forwards(target, [ids for ids, _ in decoded], "cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("number", range(len(LENGTHS)), ids=[f"{n} tokens" for n in LENGTHS])
def test_the_error_of_scores_against_fp32_is_that_of_bf16(
    engine: Engine, expected: list[Forward], number: int
) -> None:
    check_errors(scores(engine, expected[number]), expected[number])


def test_tokens_without_near_ties_equal_fp32(engine: Engine, expected: list[Forward]) -> None:
    """Few random rows have no near tie, so those of all lengths are counted together."""
    assert sum(check_choices(scores(engine, forward), forward) for forward in expected) > 5


@pytest.mark.parametrize("number", range(len(LENGTHS)), ids=[f"{n} tokens" for n in LENGTHS])
def test_prefill_and_steps_agree_with_fp32(
    expected: list[Forward],
    decoded: list[tuple[tuple[int, ...], list[float]]],
    number: int,
) -> None:
    """Process a prompt by the prefill kernels, then one row at a time with its cache."""
    forward, (ids, logprobs) = expected[number], decoded[number]
    rows = slice(LENGTHS[number] - 1, len(ids) - 1)
    reference, bf16 = (torch.from_numpy(x[rows]).double() for x in (forward.fp32, forward.bf16))
    chosen = torch.tensor(ids[LENGTHS[number] :])[:, None]
    near = near_tie(forward)
    lost = reference.max(dim=1).values - reference.gather(1, chosen)[:, 0]
    assert float(lost.max()) < near
    desired = (bf16.log_softmax(1) - reference.log_softmax(1)).gather(1, chosen)[:, 0]
    actual = torch.tensor(logprobs).double() - reference.log_softmax(1).gather(1, chosen)[:, 0]
    print(
        f"log-probabilities off by {actual.abs().mean():.4f}, bf16's by {desired.abs().mean():.4f}"
    )
    assert float(actual.abs().max()) < near
    assert float(actual.square().mean()) < (3 * row_errors(forward.bf16, forward.fp32).mean()) ** 2
