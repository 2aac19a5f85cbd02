"""The device loop with a plan of two ranks, interpreted in lockstep, with aborted requests.

After every program the states of all ranks must be equal, bit for bit: ``RankHost`` compares them.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoints import write_pair
from drafter_cases import CASES
from left_out import slow
from plan_host import PlanHost, lowered_engine, step_name
from rank_host import RankHost
from test_cuda_interpreted import NEAR, InterpretedRunner, engine_of

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.plugins_cuda.launches import Lowering
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import EXCHANGE_EPOCH
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, TokenEvent
from specbuild.runtime.sampling import SamplingParams

_WHOLE = ("p-eagle", "dflash", "jetspec", "mtp of DeepSeek-V3")
SHAPES = {"none": None, "chain": DraftShape(1, 2, 2), "tree": DraftShape(2, 2, 4)}
BATCH, TOKENS, REQUESTS = 3, 10, 14


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("checkpoints")
    write_pair(path)
    return lowered_engine(
        path / "target", path / "draft", lambda *_: Lowering(()),
        max_seq_len=128, max_batch_size=BATCH, page_size=16, tensor_parallel=2,
        draft_top_k=2, draft_depth=2, draft_tokens=4,
    )  # fmt: skip


@pytest.mark.parametrize("shape", ["tree", *slow("none", "chain")])
def test_no_token_depends_on_joins_and_aborts(lowered: LoweredEngine, shape: str) -> None:
    """The number of rounds passes 2³² meanwhile."""
    engine, runner = engine_of(lowered)
    host = RankHost(lowered)
    joined = InterpretedRunner(host, runner.gpu, engine.executor)
    engine.executor.runner = joined
    engine.executor.write(EXCHANGE_EPOCH, host.port(EXCHANGE_EPOCH).numpy() + (-40))
    draw, vocab = random.Random(2), engine.manifest.target.vocab
    loop = engine.decoder.loop(DraftSetting(SHAPES[shape]), text_stream=engine._text_stream)
    asked, tokens, ends = {}, {}, {}
    loop.open()
    while len(asked) < REQUESTS or not loop.idle:
        if len(asked) < REQUESTS and draw.random() < 0.4:
            ids = tuple(draw.randrange(vocab) for _ in range(draw.choice((1, 5, 40))))
            sampling = SamplingParams(temperature=float(draw.randrange(2)), seed=len(asked))
            params = GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)
            (request,) = engine.check_prompts([Prompt("", ids)], params)
            number = loop.add(request)
            asked[number], tokens[number] = (ids, sampling), []
        events = [] if loop.idle else loop.turn()
        running = [n for n, some in tokens.items() if some and n not in ends]
        if running and draw.random() < 0.1:
            aborted = loop.abort(draw.choice(running))
            events += [aborted] if aborted is not None else []
        for event in events:
            if isinstance(event, TokenEvent):
                tokens[event.request].append(event.token_id)
            elif isinstance(event, FinishEvent):
                ends[event.request] = event.record.finish_reason
    loop.close()
    assert set(ends.values()) == {"length", "abort"}
    assert 0 <= int(engine.executor.read(EXCHANGE_EPOCH)[0]) < 100_000
    for number, (ids, sampling) in asked.items():
        alone = tokens_alone(lowered, ids, sampling)
        got = tokens[number]
        assert len(got) == TOKENS or ends[number] == "abort"
        require_alike(lowered, list(ids), got, alone[: len(got)])


@pytest.mark.parametrize("name", ["mtp of MiMo", *slow(*_WHOLE)])
def test_each_rank_has_every_draft_completely(tmp_path: Path, name: str) -> None:
    """With its own keys, values or latents. ``RankHost`` compares the drafts' state as well."""
    draft, _ = CASES[name].write(tmp_path, True)
    shape = CASES[name].chain
    lowered = lowered_engine(
        tmp_path / "model", draft, lambda *_: Lowering(()), max_seq_len=128, max_batch_size=1,
        page_size=16, tensor_parallel=2, **asdict(shape),
    )  # fmt: skip
    runs = []
    for program in (step_name(1), step_name(1, shape)):
        host = RankHost(lowered)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, [3, 5, 7, 9, 11], TOKENS)
        runs.append([first, *host.generate(0, program, TOKENS - 1)])
    assert runs[0] == runs[1]


def tokens_alone(
    lowered: LoweredEngine, ids: tuple[int, ...], sampling: SamplingParams
) -> list[int]:
    """Return the tokens of a prompt in a batch of one without a draft."""
    host = RankHost(lowered)
    host.port("ignore_eos").fill_(1)
    how = {"temperature": sampling.temperature, "seed": sampling.seed}
    first, _ = host.admit(0, list(ids), TOKENS, **how)
    return [first, *host.generate(0, step_name(1), TOKENS - 1)]


def require_alike(
    lowered: LoweredEngine, ids: list[int], got: list[int], expected: list[int]
) -> None:
    """Require equal tokens up to a near tie: references round by the number of rows."""
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if at is None:
        return
    host: PlanHost = RankHost(lowered)
    host.give_pages(0)
    scores = host.score(0, [*ids, *expected[:at]])[-1]
    assert abs(scores[got[at]] - scores[expected[at]]) < NEAR
