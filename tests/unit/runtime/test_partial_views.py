"""Decoding with partial views of the toy model: visible tokens, and views that change nothing.

The toy is exact: a result changes if a single visible entry is missing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples
from toy_engine import TreeOfTokens, prompt, repeating, right, run, wrong
from toy_model import EOS, VOCAB, decode_plainly
from toy_partial import TOY_SPECPV, Seen, partial_engine, partial_manifest

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, SpecPv
from specbuild.runtime.errors import RequestError
from specbuild.runtime.lossy.specpv.host_tables import view_geometry
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=45), min_size=1, max_size=4
)
sampling = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 999)
)
# No draft, EAGLE3's chain and tree, and trees without a draft model.
drafts = st.sampled_from(
    [
        (None, None),
        (DraftShape(1, 3, 3), None),
        (DraftShape(2, 3, 6), None),
        (DraftShape(3, 4, 12), (right, [-1, 0, 1, 2])),
        (DraftShape(3, 4, 12), (repeating, [-1, -1, 0, 1, 1])),
        (DraftShape(3, 4, 12), (wrong, [-1, 0, 0])),
    ]
)
Draft = tuple[DraftShape | None, tuple[object, list[int]] | None]


def options(draft: Draft) -> dict[str, object]:
    shape, tree = draft
    drafter = "auto" if tree is None else TreeOfTokens(*tree, reads_aux_hidden=True)
    return {"speculation": shape, "drafter": drafter}


def plainly(engine: Engine, ids: list[int], count: int, sample: SamplingParams) -> list[int]:
    """Decode as far as the engine's longest context permits."""
    return decode_plainly(ids, min(count, engine.manifest.limits.max_seq_len - len(ids)), sample)


@examples(25)
@given(prompts, drafts, sampling, st.integers(1, 40))
@example([[0] * 25], (None, None), SamplingParams(temperature=1.0, seed=0), 40)  # to the limit
def test_a_view_of_everything_changes_nothing(
    batch: list[list[int]], draft: Draft, sample: SamplingParams, count: int
) -> None:
    engine, executor = partial_engine(partial_manifest(replace(TOY_SPECPV, n_retrieval_blocks=8)))
    params = GenerateParams(max_new_tokens=count, sampling=sample)
    result = run(engine, batch, params, **options(draft))
    assert result.ids == [plainly(engine, p, count, sample) for p in batch]
    for record in result.records:
        assert record.stats.specpv is not None
        assert record.stats.specpv.agreement in (None, 1.0)
    for seen in (s for launch in executor.seen for s in launch):
        assert seen.positions == list(range(len(seen.positions)))


@examples(15)
@given(prompts, drafts, sampling, st.integers(1, 40), st.booleans())
def test_output_without_partial_steps_equals_plain_decoding(
    batch: list[list[int]], draft: Draft, sample: SamplingParams, count: int, by_request: bool
) -> None:
    """With ``full_refresh_interval`` 0, or with a request that retrieves nothing."""
    specpv = TOY_SPECPV if by_request else replace(TOY_SPECPV, full_refresh_interval=0)
    engine, _ = partial_engine(partial_manifest(specpv))
    blocks = 0 if by_request else None
    params = GenerateParams(max_new_tokens=count, sampling=sample, specpv_retrieval_blocks=blocks)
    result = run(engine, batch, params, **options(draft))
    assert result.ids == [plainly(engine, p, count, sample) for p in batch]
    stats = [record.stats.specpv for record in result.records]
    assert all(s is not None and s.partial_steps == s.rechecked_tokens == 0 for s in stats)


def assert_promised(seen: Seen, config: SpecPv) -> None:
    """Require the sink, at most the budget of complete blocks, then everything up to the tree."""
    size, sink = config.block_size, config.n_sink_blocks * config.block_size
    end = seen.positions[-1] + 1
    assert seen.positions == sorted(set(seen.positions))
    hidden = sorted(set(range(end)) - set(seen.positions))
    assert all(sink <= p < seen.length - config.n_window_blocks * size for p in hidden)
    kept = {(p - sink) // size for p in hidden}
    assert len(hidden) == size * len(kept), "a block is hidden in part"
    if hidden:
        tail = hidden[-1] + 1
        shown = {(p - sink) // size for p in seen.positions if sink <= p < tail}
        assert len(shown) <= config.n_retrieval_blocks
        # No token between the last block and the window is unseen.
        assert set(range(tail, end)) <= set(seen.positions)


@examples(25)
@given(prompts, drafts, st.integers(10, 40))
def test_rows_see_sink_blocks_and_window(batch: list[list[int]], draft: Draft, count: int) -> None:
    engine, executor = partial_engine(partial_manifest())
    params = GenerateParams(max_new_tokens=count, ignore_eos=True)
    result = run(engine, batch, params, **options(draft))
    launches = [seen for launch in executor.seen for seen in launch]
    hiding = 0
    for seen in launches:
        assert_promised(seen, TOY_SPECPV)
        hidden = len(seen.positions) <= seen.positions[-1]
        hiding += hidden
        assert not (hidden and seen.chosen), "a view was chosen over a part of the context"
    stats = [record.stats.specpv for record in result.records]
    assert all(s is not None and s.invariant_failures == 0 for s in stats)
    assert sum(s.partial_steps for s in stats if s is not None) >= hiding
    for record, p in zip(result.records, batch, strict=True):
        assert len(record.output_ids) == min(count, 64 - len(p))


def test_full_and_partial_sequences_share_a_launch() -> None:
    """A sequence in a full step adds its buffered tokens; the others add only their trees."""
    engine, executor = partial_engine(partial_manifest())
    params = GenerateParams(max_new_tokens=24, ignore_eos=True)
    batch = [list(range(20)), list(range(5, 9)), list(range(3, 28))]
    run(engine, batch, params, speculation=DraftShape(1, 2, 2))
    mixed = [{s.chosen for s in launch} for launch in executor.seen if len(launch) > 1]
    assert {True, False} in mixed
    again = [s.rows for launch in executor.seen for s in launch if s.chosen]
    assert max(again) > 3
    assert max(again) <= TOY_SPECPV.n_spec_tokens_buf + 13


def test_an_end_of_sequence_in_a_partial_step_ends_the_request() -> None:
    def ending(sequence: object, path: tuple[int, ...], siblings: list[int]) -> int:
        del path, siblings
        return EOS if sequence.num_output_tokens > 8 else sequence.root

    engine, _ = partial_engine(partial_manifest())
    params = GenerateParams(max_new_tokens=40)
    drafter = TreeOfTokens(ending, [-1, 0], reads_aux_hidden=True)
    result = run(
        engine, [list(range(28)), [3]], params, drafter=drafter, speculation=DraftShape(3, 4, 12)
    )
    for record in result.records:
        assert record.finish_reason in ("eos", "length")
        assert EOS not in record.output_ids[:-1]


@pytest.mark.parametrize(
    ("asked", "message"),
    [(2, "retrieves 0 to 1"), (-1, "retrieves 0 to 1")],
)
def test_rejects_a_budget_out_of_range(asked: int, message: str) -> None:
    engine, _ = partial_engine(partial_manifest())
    with pytest.raises(RequestError, match=message):
        engine.check_prompts([prompt([1])], GenerateParams(specpv_retrieval_blocks=asked))


def test_a_budget_needs_an_engine_with_specpv() -> None:
    from toy_engine import toy_engine

    with pytest.raises(RequestError, match="built without SpecPV"):
        toy_engine().check_prompts([prompt([1])], GenerateParams(specpv_retrieval_blocks="auto"))


def test_a_view_has_room_for_the_deepest_draft_and_its_root() -> None:
    manifest = partial_manifest(TOY_SPECPV)
    assert view_geometry(manifest).deepest == manifest.limits.draft_depth + 1
