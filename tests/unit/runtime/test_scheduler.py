"""Prompts that share a launch, if launches of many rows are not batch-invariant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from left_out import examples
from prompt_cuts import cut_at_random
from toy_engine import run
from toy_model import VOCAB, ToyExecutor, toy_manifest

from specbuild.runtime.decode.host import decoder
from specbuild.runtime.decode.scheduler import Chunk, Scheduler
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import ExecutorCapabilities
from specbuild.runtime.request import GenerateParams

BATCH, NODES, MAX_ROWS = 3, 4, 24
INVARIANT = BATCH * NODES  # every verification is among these
CHAIN, TREE = DraftShape(1, 2, 2), DraftShape(2, 2, NODES - 1)
prompts = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=40)


class VariantToy(ToyExecutor):
    """A toy whose launches of many rows write other values for other numbers of rows."""

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(
            "toy", batch_invariant=True, device_step=False, invariant_rows=INVARIANT
        )

    def _attend(
        self, group: str, feeds: Mapping[str, np.ndarray], k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        rows = len(feeds["token_ids"])
        if group != "draft" and rows > INVARIANT:
            k = k + rows
        return super()._attend(group, feeds, k, v)


def variant_engine() -> Engine:
    """Return an engine whose longest prompts need two launches or more."""
    manifest = toy_manifest(max_batch_size=BATCH, max_rows=MAX_ROWS, limits=TREE)
    executor = VariantToy(manifest)
    return Engine(manifest, executor, pages_released=executor.poison)


@contextmanager
def launched() -> Iterator[list[tuple[Chunk, ...]]]:
    """Record the chunks of every launch of prompts."""
    found: list[tuple[Chunk, ...]] = []
    chunks = Scheduler._chunks

    def kept(scheduler: Scheduler, most: int) -> tuple[Chunk, ...]:
        found.append(chunks(scheduler, most))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_chunks", kept)
        yield found


@examples(15)
@given(st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=2, max_size=7))
def test_a_draft_changes_no_bit_of_prompts_either(batch: list[tuple[list[int], int]]) -> None:
    """Drafts end sequences at other times, so other prompts share a launch."""
    texts = [text for text, _ in batch]
    params = [GenerateParams(max_new_tokens=count, ignore_eos=True) for _, count in batch]
    engine = variant_engine()
    plain = run(engine, texts, params, speculation=None)
    for shape in (CHAIN, TREE):
        drafted = run(engine, texts, params, speculation=shape)
        assert drafted.ids == plain.ids
        for a, b in zip(plain.records, drafted.records, strict=True):
            assert a.logprobs == b.logprobs
    for text, wanted, record in zip(texts, params, plain.records, strict=True):
        alone = run(engine, [text], [wanted], speculation=None).records[0]
        assert (alone.output_ids, alone.logprobs) == (record.output_ids, record.logprobs)


@settings(max_examples=30, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=7))
def test_chunks_that_share_a_launch_are_few_rows(texts: list[list[int]]) -> None:
    with launched() as launches:
        run(variant_engine(), texts, GenerateParams(max_new_tokens=2), speculation=None)
    shared = [chunks for chunks in launches if len(chunks) > 1]
    assert all(sum(chunk.count for chunk in chunks) <= INVARIANT for chunks in shared)
    cuts: dict[int, list[int]] = {}
    for chunk in (chunk for chunks in launches for chunk in chunks):
        cuts.setdefault(chunk.sequence.index, []).append(chunk.count)
    for index, text in enumerate(texts):
        whole, left = divmod(len(text), MAX_ROWS)
        assert cuts[index] == [MAX_ROWS] * whole + [left] * (left > 0)


def test_short_prompts_fill_a_launch() -> None:
    """A prompt that does not fit gives its place to later ones."""
    with launched() as launches:
        texts = [[1] * 7, [2] * 8, [3] * 5]
        run(variant_engine(), texts, GenerateParams(max_new_tokens=1), speculation=None)
    counts = [[chunk.count for chunk in chunks] for chunks in launches if chunks]
    assert counts == [[7, 5], [8]]


@settings(max_examples=30, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=7), st.integers(0, 10**6))
def test_prompt_launches_end_at_multiples_of_the_step(texts: list[list[int]], seed: int) -> None:
    """Whatever a launch has capacity for: recurrent states in chunks depend on it."""
    step, manifest = 8, toy_manifest(max_batch_size=BATCH, max_rows=MAX_ROWS, limits=TREE)
    executor = ToyExecutor(manifest)
    engine = Engine(manifest, executor, pages_released=executor.poison)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "Scheduler", partial(Scheduler, prompt_step=step))
        with launched() as launches, cut_at_random(seed, MAX_ROWS):
            run(engine, texts, GenerateParams(max_new_tokens=2), speculation=None)
    for chunk in (chunk for chunks in launches for chunk in chunks):
        end = chunk.start + chunk.count
        assert chunk.count > 0
        assert end % step == 0 or end == len(texts[chunk.sequence.index])
