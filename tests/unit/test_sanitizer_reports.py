"""Reports of compute-sanitizer are assigned to the reported kernel and the running piece."""

from __future__ import annotations

import pytest
from sanitizer_reports import reported, unexplained

LOG = """========= COMPUTE-SANITIZER
[1/3] 4 s: Linear decode  120 rows, 2880 to 144, residual
[2/3] 8 s: {label}
========= Error: Race reported between Read access at {kernel}+0x6650
=========     and Write access at {kernel}+0x63c0 [384 hazards]
=========
[3/3] 9 s: MlaAttention decode  absorbed: 6 heads, a tree
========= Barrier error detected. Divergent thread(s) in block.
=========     at attend_absorbed+0x6e20
=========     by thread (96,0,0) in block (1,0,0)
all 3 pieces ran
"""


def log(label: str, kernel: str) -> str:
    return LOG.format(label=label, kernel=kernel)


@pytest.mark.parametrize(
    ("label", "kernel", "wrong"),
    [
        ("PagedTreeAttention decode  decode", "attend_split", True),
        ("PagedTreeAttention decode  decode", "join_slots", False),
        ("Linear prefill {'columns': 128, 'wgmma': 0} 120 rows", "linear_gemm", True),
        ("Linear prefill {'columns': 128} 120 rows", "linear_gemm", False),
    ],
)
def test_false_reports_of_racecheck_are_limited_to_some_kernels(
    label: str, kernel: str, wrong: bool
) -> None:
    expected = set() if wrong else {(label, kernel)}
    assert unexplained("racecheck", log(label, kernel)) == expected
    absorbed = ("MlaAttention decode  absorbed: 6 heads, a tree", "attend_absorbed")
    assert unexplained("memcheck", log(label, kernel)) == {(label, kernel), absorbed}


def test_every_report_belongs_to_its_piece() -> None:
    assert len(list(reported(log("a", "b")))) == 3
    assert list(reported("all 3 pieces ran")) == []
