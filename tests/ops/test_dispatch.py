"""The tables that select a kernel: every rule is reached, and launches the kernels it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from attention_requests import latent, plain, swept

from specbuild.plugins_cuda.dispatch import Rule, first_rule, markdown_lines
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest
from specbuild.plugins_cuda.mla_attention import dispatch as latents
from specbuild.plugins_cuda.mla_attention.geometry import latent_geometry
from specbuild.plugins_cuda.paged_tree_attention import dispatch as attention
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError

SWEEPS: dict[str, tuple[Sequence[Rule[Any]], Callable[[], Iterator[LoweringRequest]]]] = {
    "PagedTreeAttention": (
        attention.TABLE,
        lambda: swept(
            plain, batch=(1, 8, 16), rows=(1, 2, 5, 20), width=(64, 96, 128, 256),
            pages=(2, 128, 1024), window=(0, 128, 2048), phase=("decode", "prefill"),
            lists=(False, True), views=(1, 8), tactic=({}, {"split_teams": 4}),
        ),
    ),
    "MlaAttention": (
        latents.TABLE,
        lambda: swept(
            latent, batch=(1, 8), rows=(1, 2, 5), entry=(128, 512), pages=(2, 128),
            window=(0, 128), phase=("decode", "prefill"), rebuilt=(False, True),
            v_width=(32, 64), lists=(False, True), tactic=({}, {"rows": 1}),
        ),
    ),
}  # fmt: skip


def rule_of(op: str, request: LoweringRequest) -> Rule[Any]:
    if op == "MlaAttention":
        return first_rule(latents.TABLE, latents.facts_of(request, latent_geometry(request)))
    return attention.rule_of(request)


def lowered(op: str, request: LoweringRequest) -> Lowering | None:
    """Return the launches, or None if the op rejects the sizes."""
    try:
        lowering = op_named(op).lowered(request)
    except SpecbuildError:
        return None
    return lowering if isinstance(lowering, Lowering) else None


@pytest.mark.parametrize("op", SWEEPS)
def test_every_rule_is_reached_and_launches_its_kernels(op: str) -> None:
    table, sweep = SWEEPS[op]
    launched: dict[int, set[tuple[str, ...]]] = {}
    for request in sweep():
        lowering = lowered(op, request)
        if lowering is None:
            continue
        rule = rule_of(op, request)
        files = tuple(launch.kernel.file for launch in lowering.launches)
        # The launched kernels are in the rule's order; some are launched for some sizes only.
        assert [name for name in rule.kernels if name in files] == list(files), (rule, request)
        launched.setdefault(table.index(rule), set()).add(files)
    assert sorted(launched) == list(range(len(table)))
    for index, variants in launched.items():
        assert {name for files in variants for name in files} == set(table[index].kernels)


@pytest.mark.parametrize(
    ("sizes", "form", "entries"),
    [
        ({}, "split", ["attend_split"]),
        ({"pages": 2}, "whole", ["attend_whole"]),
        ({"window": 128}, "whole", ["attend_whole"]),
        ({"window": 1024, "batch": 16}, "whole", ["attend_whole"]),
        ({"window": 1088}, "split", ["attend_split"]),
        ({"batch": 8}, "split_per_warp", ["attend_split_per_warp"]),
        ({"batch": 7}, "split", ["attend_split"]),
        ({"batch": 7, "tactic": {"split_teams": 8}}, "split_per_warp", ["attend_split_per_warp"]),
        ({"batch": 8, "tactic": {"split_teams": 0}}, "split", ["attend_split"]),
        ({"batch": 8, "width": 128}, "split_per_warp", ["attend_split_per_warp"]),
        ({"batch": 8, "width": 96}, "split", ["attend_split"]),
        ({"batch": 8, "pages": 273}, "split", ["attend_split"]),
        ({"rows": 12, "pages": 128}, "many", ["attend_many", "join_slots"]),
        ({"rows": 12, "pages": 127}, "split", ["attend_split"]),
        ({"rows": 12, "pages": 128, "width": 32}, "split", ["attend_split"]),
        ({"rows": 12, "pages": 128, "width": 96}, "split", ["attend_split"]),
        ({"rows": 12, "pages": 128, "width": 128}, "many", ["attend_many", "join_slots"]),
        ({"rows": 12, "pages": 128, "width": 256}, "wide", ["attend_wide"]),
        ({"rows": 5, "pages": 1024}, "many", ["attend_many", "join_slots"]),
        ({"rows": 5, "pages": 1024, "views": 8}, "split", ["attend_split"]),
        (
            {"rows": 20, "batch": 4, "pages": 128},
            "many",
            ["attend_few", "attend_many", "join_slots"],
        ),
        ({"lists": True, "rows": 4}, "listed", ["attend_whole_rows", "attend_selected"]),
        ({"lists": True, "batch": 8}, "listed", ["attend_whole_rows", "attend_selected"]),
        ({"phase": "prefill", "rows": 512}, "prompt", ["attend_full_prompt"]),
        ({"phase": "prefill", "rows": 512, "window": 64}, "prompt", ["attend_prompt"]),
        ({"phase": "prefill", "rows": 512, "width": 128}, "prompt", ["attend_full_prompt"]),
        ({"phase": "prefill", "rows": 512, "width": 96}, "prompt", ["attend_prompt"]),
        ({"phase": "prefill", "rows": 512, "width": 256}, "prompt", ["attend_full_prompt"]),
        ({"phase": "prefill", "rows": 512, "width": 512}, "wide", ["attend_wide"]),
    ],
)
def test_kernel_at_the_boundaries_of_each_rule(
    sizes: dict[str, Any], form: str, entries: list[str]
) -> None:
    """Each case is next to a size for which the next rule applies."""
    request = plain(**sizes)
    lowering = lowered("PagedTreeAttention", request)
    assert lowering is not None
    assert [launch.kernel.entry for launch in lowering.launches] == entries
    assert attention.rule_of(request).form == form


@pytest.mark.parametrize("op", SWEEPS)
def test_a_table_is_printed_with_a_reason_for_each_rule(op: str) -> None:
    table, _ = SWEEPS[op]
    head, line, *rows = markdown_lines(table)
    assert len(rows) == len(table)
    assert {text.count("|") for text in (head, line, *rows)} == {7}
    assert all(rule.why and rule.kernels for rule in table)
    assert not any(above == below for above, below in pairwise(rows))
