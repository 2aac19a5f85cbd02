"""Generate 100,000 tokens on two ranks, while sequences join and are aborted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from example_engine import CHAIN, TREE, build_example, every_other_sampled
from rank_engines import example_token_prompts, on_ranks

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.session import Stream
from specbuild.runtime.executors.cuda import ranked
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent

pytestmark = pytest.mark.timeout(300)

TOKENS = 100_000
# There are more streams than rows of a batch, so some wait.
STREAMS = 11
LONGEST = 96


def test_no_token_depends_on_joins_and_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round numbers restart from 0 every few steps, while sequences are running."""
    monkeypatch.setattr(ranked, "MAX_ROUNDS", 2000)
    restarts: list[int] = []
    restart = ranked.RankedExecutor._restart_rounds
    with on_ranks(build_example(tmp_path / "engine", tensor_parallel=2)) as engine:
        prompts = example_token_prompts(40)
        requests = engine.check_prompts(prompts, every_other_sampled(len(prompts), LONGEST))
        alone = [end_of(engine.session.add([each], DraftSetting(None))) for each in requests]
        monkeypatch.setattr(
            ranked.RankedExecutor,
            "_restart_rounds",
            lambda executor: (restarts.append(executor._rounds), restart(executor)),
        )
        draw, total, aborted = random.Random(3), 0, 0
        running: list[tuple[int, Stream]] = []
        while total < TOKENS or running:
            # Requests with equal settings run together.
            setting = DraftSetting((None, CHAIN, TREE)[total // 5000 % 3])
            while total < TOKENS and len(running) < STREAMS:
                number = draw.randrange(len(requests))
                stream = engine.session.add([requests[number]], setting)
                running.append((number, stream))
                if draw.random() < 0.33:
                    for _ in range(draw.randrange(8)):
                        next(stream)
                    stream.abort()
            number, stream = running.pop(draw.randrange(len(running)))
            result, expected = end_of(stream), alone[number]
            length = len(result.output_ids)
            assert length == LONGEST or result.finish_reason == "abort"
            assert result.output_ids == expected.output_ids[:length]
            assert result.logprobs is not None
            assert expected.logprobs is not None
            assert result.logprobs == expected.logprobs[:length]
            aborted += result.finish_reason == "abort"
            total += length
    print(f"{total} tokens, {aborted} requests aborted, {len(restarts)} restarts of the rounds")
    assert aborted > 50
    assert len(restarts) > 20


def end_of(stream: Stream) -> RunRecord:
    """Return the end of the only request."""
    return next(event.record for event in stream if isinstance(event, FinishEvent))
