"""Draft options against the limits and the default of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from specbuild.builder.options import TreeOptions
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits, Manifest
from specbuild.runtime.errors import SpecbuildError

LIMITS = Limits(
    max_seq_len=64, max_batch_size=2, max_rows=64, draft_top_k=4, draft_depth=5, draft_tokens=20
)
DEFAULT = DraftShape(1, 3, 3)


Choose = Callable[..., object]


@pytest.fixture
def chosen(make_manifest: Callable[..., Manifest]) -> Choose:
    """Return a function: the result of ``draft_setting_of`` for an engine with these limits."""

    def choose(
        options: TreeOptions,
        *,
        no_spec: bool = False,
        draft: bool = True,
        drafter: str | None = None,
    ) -> object:
        manifest = make_manifest(limits=LIMITS, draft_default=DEFAULT, draft=draft)
        setting = draft_setting_of(manifest, options, no_spec=no_spec, drafter=drafter)
        return setting.speculation

    return choose


def test_without_options_the_engine_selects_the_draft(chosen: Choose) -> None:
    assert chosen(TreeOptions()) == "default"
    assert chosen(TreeOptions(), no_spec=True) is None
    assert chosen(TreeOptions(), draft=False) is None
    assert chosen(TreeOptions(), draft=False, drafter="auto") is None


def test_selects_a_drafter_by_name(chosen: Choose) -> None:
    assert chosen(TreeOptions(), drafter="eagle3") == "default"
    assert chosen(TreeOptions(), drafter="none") is None
    assert chosen(TreeOptions(depth=2), drafter="eagle3") == DraftShape(1, 2, 2)
    with pytest.raises(SpecbuildError, match="has eagle3; use one of auto, eagle3, none"):
        chosen(TreeOptions(), drafter="mtp")
    with pytest.raises(SpecbuildError, match="has no drafter; use one of auto, none"):
        chosen(TreeOptions(), drafter="eagle3", draft=False)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (TreeOptions(top_k=2), DraftShape(2, 3, 10)),
        (TreeOptions(depth=5), DraftShape(1, 5, 5)),
        (TreeOptions(tokens=2), DraftShape(1, 3, 2)),
        (TreeOptions(top_k=4, depth=4), DraftShape(4, 4, 20)),
        (TreeOptions(top_k=4, depth=5, tokens=20), DraftShape(4, 5, 20)),
        (TreeOptions(top_k=1, depth=1, tokens=1), DraftShape(1, 1, 1)),
    ],
)
def test_missing_options_have_the_values_of_the_default(
    chosen: Choose, options: TreeOptions, shape: DraftShape
) -> None:
    assert chosen(options) == shape


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (TreeOptions(top_k=5), ("--draft-top-k 5", "(4)")),
        (TreeOptions(depth=6), ("--draft-depth 6", "(5)")),
        (TreeOptions(tokens=21), ("--draft-tokens 21", "(20)")),
        (TreeOptions(tokens=4), ("--draft-tokens 4", "3 nodes")),
        (TreeOptions(top_k=2, depth=2, tokens=7), ("--draft-tokens 7", "6 nodes")),
    ],
)
def test_rejects_values_above_the_limits(
    chosen: Choose, options: TreeOptions, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(SpecbuildError) as caught:
        chosen(options)
    assert all(number in str(caught.value) for number in numbers)


def test_rejects_contradicting_options(chosen: Choose) -> None:
    with pytest.raises(SpecbuildError, match="contradicts"):
        chosen(TreeOptions(top_k=1), no_spec=True)
    with pytest.raises(SpecbuildError, match="drafter none contradicts"):
        chosen(TreeOptions(top_k=1), drafter="none")
    assert chosen(TreeOptions(), drafter="eagle3", no_spec=True) is None
    with pytest.raises(SpecbuildError, match="no draft"):
        chosen(TreeOptions(top_k=1), draft=False)


def test_every_shape_of_two_options_is_within_limits_and_pool(chosen: Choose) -> None:
    for top_k, depth in itertools.product(range(1, 5), range(1, 6)):
        shape = chosen(TreeOptions(top_k=top_k, depth=depth))
        assert isinstance(shape, DraftShape)
        assert 1 <= shape.draft_tokens <= min(20, DraftShape(top_k, depth, 0).candidates)
