"""Guides on the example: teacher forcing, mixed batches, and JSON Schema's test suite."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest
import torch

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import RuntimeSettings

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 24},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
        "returns": {"enum": ["bool", "int", "str", "list", "None"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["function_name", "arguments", "returns", "line"],
    "additionalProperties": False,
}
SHAPES = [None, "default", DraftShape(1, 3, 3), DraftShape(3, 4, 12)]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0, seed=7),
    SamplingParams(0.9, top_k=40, top_p=0.95, seed=2),
    SamplingParams(0.9, min_p=0.05, frequency_penalty=0.4, seed=5),
]
# Below this gap, either of the best two tokens may be chosen: ONNX Runtime's bits depend on the
# number of rows.
GAP = 1e-3


@pytest.fixture(scope="module")
def engine(example_engine: Path) -> Engine:
    return Engine.load(example_engine, RuntimeSettings(device="cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    return [Prompt(str(i), prompt=json.loads(line)["prompt"]) for i, line in enumerate(lines)]


def test_an_engine_without_a_draft_accepts_forced_tokens(
    prompts: list[Prompt], tmp_path: Path
) -> None:
    """The outputs are those of one token per step, in fewer steps, alone and in a batch."""
    options = BuildOptions.from_flat(
        model=EXAMPLE / "target", output=tmp_path / "engine", max_batch_size=3, max_seq_len=512
    )
    build(options, SilentProgress())
    engine = Engine.load(options.output, RuntimeSettings(device="cpu"))
    assert not engine.manifest.drafters
    params = GenerateParams(max_new_tokens=96, guide=Guide.json(json.dumps(SCHEMA)))

    def records(group: list[Prompt], drafter: str) -> list[RunRecord]:
        events = engine.generate(group, params, drafter=drafter)
        by_index = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
        return [by_index[i] for i in range(len(group))]

    plain = records(prompts, "none")
    for found in (records(prompts, "auto"), [records([p], "auto")[0] for p in prompts]):
        assert [r.output_ids for r in found] == [r.output_ids for r in plain]
        steps, plain_steps = (sum(r.stats.steps for r in each) for each in (found, plain))
        assert steps < 0.6 * plain_steps


Logits = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def forced_logits() -> Logits:
    """Return a function: the target's logits [T, V] for a sequence, by transformers."""
    from transformers import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(EXAMPLE / "target", dtype=torch.float32).float()

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy()

    return logits


def records(
    engine: Engine, prompts: list[Prompt], params: list[GenerateParams], shape: object
) -> list[RunRecord]:
    events = engine.generate(prompts, params, speculation=shape)  # type: ignore[arg-type]
    finished = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [finished[i] for i in range(len(prompts))]


def near_ties(record: RunRecord, sampling: SamplingParams, logits: Logits, vocab: int) -> int:
    """Assert that each token is the best one that a new grammar allows; return the number of near
    ties.

    Only for sampling without cuts and penalties: greedy, and with a temperature.
    """
    tokenizer = (EXAMPLE / "target" / "tokenizer.json").read_text()
    tokens = llguidance.LLTokenizer(tokenizer, n_vocab=vocab, eos_token=[0])
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    text = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=form)
    matcher = llguidance.LLMatcher(tokens, text)
    prompt, output = list(record.prompt_ids), list(record.output_ids)
    rows, ties = logits([*prompt, *output])[len(prompt) - 1 :], 0
    # the reference draws by argmax of logits plus noise of (seed, position)
    noise = op_named("Choose")
    for i, token in enumerate(output):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=vocab, bitorder="little"))
        assert token in allowed
        left = allowed.tolist()
        best = _chosen(noise, rows[i], left, sampling, len(prompt) + i - 1)
        if best != token:
            # Without the other token it must be the best: the two were then nearly equal.
            without = [t for t in left if t != best]
            assert _chosen(noise, rows[i], without, sampling, len(prompt) + i - 1) == token
            assert sampling.temperature > 0 or abs(rows[i][best] - rows[i][token]) < GAP
            ties += 1
        assert matcher.consume_token(token)
    assert matcher.is_accepting()
    return ties


def _chosen(
    op: object, row: np.ndarray, allowed: list[int], sampling: SamplingParams, place: int
) -> int:
    masked = np.full_like(row, -1e30)
    masked[allowed] = row[allowed]
    choice, _ = op.reference(  # type: ignore[attr-defined]
        torch.from_numpy(masked)[None],
        torch.tensor([sampling.temperature], dtype=torch.float32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([1.0], dtype=torch.float32),
        torch.tensor([sampling.noise_seed], dtype=torch.int32),
        torch.tensor([place], dtype=torch.int32),
    )
    return int(choice)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_a_mask_over_teacher_forced_logits(
    engine: Engine,
    prompts: list[Prompt],
    forced_logits: Logits,
    sampling: SamplingParams,
    shape: object,
) -> None:
    params = GenerateParams(200, sampling, guide=Guide.json(SCHEMA))
    results = records(engine, prompts, [params] * len(prompts), shape)
    vocab = engine.manifest.target.vocab
    ties = sum(near_ties(record, sampling, forced_logits, vocab) for record in results)
    for record in results:
        assert record.finish_reason == "stop" and record.text is not None
        jsonschema.validate(json.loads(record.text), SCHEMA)
    print(f"{ties} of {sum(len(r.output_ids) for r in results)} tokens are near ties")
    assert ties <= 2


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_guide_does_not_change_other_sequences(
    engine: Engine, prompts: list[Prompt], sampling: SamplingParams
) -> None:
    plain = GenerateParams(60, sampling)
    guided = replace(plain, guide=Guide.json(SCHEMA), max_new_tokens=200)
    alone = [records(engine, [prompt], [plain], None)[0].output_ids for prompt in prompts]
    for shape in SHAPES:
        results = records(engine, [*prompts, prompts[0]], [plain] * 3 + [guided], shape)
        assert [record.output_ids for record in results[:3]] == alone
        jsonschema.validate(json.loads(results[3].text or ""), SCHEMA)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, object]]:
    """The schemas of JSON Schema's test suite, from jsonschema's source, with their names."""
    folder = tmp_path_factory.mktemp("suite")
    name = f"jsonschema=={version('jsonschema')}"
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", "jsonschema", name]
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", *fetch, "--dest", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"{name} cannot be fetched here: {fetched.stderr[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    return list(_schemas(archive))


def _schemas(archive: Path) -> Iterator[tuple[str, object]]:
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            _, folder, file = member.name.rpartition("/tests/draft2020-12/")
            if folder and file.endswith(".json") and "/" not in file:
                content = tar.extractfile(member)
                assert content is not None
                for group in json.load(content):
                    yield f"{file} {group['description']}", group["schema"]


def test_outputs_match_the_schemas_of_the_suite_or_are_rejected(
    engine: Engine, suite: list[tuple[str, object]]
) -> None:
    ends = {
        token: 25.0
        for token in range(engine.manifest.target.vocab)
        if engine.text is not None and engine.text.decode([token]).strip() in ('"', "}", "]")
    }
    # The output may end at once or later; unbounded outputs are not requested.
    biases = [{**ends, 0: 25.0}, {token: 12.0 for token in (0, *ends)}]
    samplings = [
        SamplingParams(logit_bias=biases[0]),
        *(SamplingParams(1.0, seed=i, logit_bias=biases[1]) for i in range(3)),
    ]
    counted: Counter[str] = Counter()
    for name, schema in suite:
        try:
            guide = Guide.json(schema)  # type: ignore[arg-type]
            engine.compile(guide)
        except RequestError:
            counted["refused"] += 1
            continue
        counted["compiled"] += 1
        params = [GenerateParams(96, sampling, guide=guide) for sampling in samplings]
        requests = [Prompt(str(i), prompt="value = ") for i in range(len(params))]
        for record in records(engine, requests, params, "default"):
            counted[record.finish_reason] += 1
            if record.finish_reason == "length":
                continue
            assert record.text is not None, name
            value = json.loads(record.text)
            validator = jsonschema.Draft202012Validator(schema)  # type: ignore[arg-type]
            assert validator.is_valid(value), f"{name}: {record.text}"
            counted["valid"] += 1
    print(dict(counted))
    assert counted["compiled"] + counted["refused"] >= 200 and counted["compiled"] >= 150
    assert counted["guide_failed"] == 0 and counted["valid"] >= 2 * counted["compiled"]
