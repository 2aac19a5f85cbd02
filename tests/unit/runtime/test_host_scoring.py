"""Scores of engines on the host, compared with the toy models' definition."""

from __future__ import annotations

import pytest
from toy_engine import prompt, toy_engine
from toy_model import target_logits
from toy_partial import partial_engine, partial_manifest

from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams

IDS = [int(digit) for digit in "31415926535897932384626433832795028841"]


@pytest.mark.parametrize("prompt_tokens", [None, 1, 7, len(IDS)])
def test_scores_equal_the_logits_after_every_token(prompt_tokens: int | None) -> None:
    engine = toy_engine()
    seen = 0
    for rows in engine.decoder.score(IDS, prompt_tokens=prompt_tokens):
        assert rows.first == seen
        assert rows.aux_hidden is not None and len(rows.aux_hidden) == len(rows.logits)
        for i, logits in enumerate(rows.logits):
            expected = target_logits(IDS[: seen + i + 1])
            assert logits == pytest.approx(expected, abs=1e-6)
        seen += len(rows.logits)
    assert seen == len(IDS)
    assert engine.used_pages == 0


def test_steps_after_the_prompt_use_the_views_of_decoding() -> None:
    """The rows of a partial step see the views that decoding of these tokens has."""
    manifest = partial_manifest()
    decoding, decoded = partial_engine(manifest)
    params = GenerateParams(max_new_tokens=20, ignore_eos=True)
    events = list(decoding.generate([prompt(IDS[:20])], params, speculation=None))
    ids = [*IDS[:20], *events[-1].record.output_ids]
    scoring, scored = partial_engine(manifest)
    rows = list(scoring.decoder.score(ids, prompt_tokens=20))
    assert [r.first for r in rows[-20:]] == list(range(20, 40))
    partial = [[(s.positions, s.chosen) for s in launch] for launch in decoded.seen]
    again = [[(s.positions, s.chosen) for s in launch] for launch in scored.seen]
    # Decoding ends with the step that gives the last token; scoring takes that token up too.
    steps = len(partial) - 1
    assert again[-steps - 1 : -1] == partial[-steps:]
    assert any(chosen for launch in again for _, chosen in launch)


def test_rejects_requests_that_do_not_fit() -> None:
    engine = toy_engine()
    limit = engine.manifest.limits.max_seq_len
    for ids, words in (([], "0 tokens"), ([1] * (limit + 1), f"{limit + 1} tokens")):
        with pytest.raises(RequestError, match=words):
            engine.decoder.score(ids)
    with pytest.raises(RequestError, match="prompt_tokens is 3, must be 1 to 2"):
        engine.decoder.score([1, 2], prompt_tokens=3)


def test_rejects_an_engine_that_is_serving() -> None:
    engine = toy_engine()
    assert engine.decoder.device_lock.acquire(blocking=False)
    with pytest.raises(RequestError, match="serving"):
        next(engine.decoder.score(IDS))
