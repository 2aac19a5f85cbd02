"""Cases of RmsQkvRope in prefill: several tiles of tokens, and real sizes."""

from __future__ import annotations

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_qkv_rope.cases import GPT_OSS, LLAMA_8B, Heads, project

KERNEL_CASES: tuple[Case, ...] = (
    project(290, 96, padding=7),
    project(
        150,
        96,
        Heads(q=4, kv=2, width=80),
        padding=7,
        bias=False,
        rounding="llama",
        head_norms=True,
    ),
    project(
        140,
        96,
        Heads(q=0, kv=2, width=80),
        padding=7,
        bias=False,
        rounding="llama",
        head_norms=True,
    ),
    project(
        140,
        96,
        Heads(q=4, kv=2, width=80),
        norm=False,
        bias=False,
        padding=7,
        head_norms=True,
        whole=True,
    ),
    project(80, 96, Heads(q=4, kv=2, width=80), bias=False, padding=7, growth=True),
    *(
        project(
            1000,
            4096,
            LLAMA_8B,
            bias=False,
            page_size=64,
            rounding="llama",
            head_norms=normed,
            prefix="gpu: ",
        )
        for normed in (False, True)
    ),
    project(2048, 2880, GPT_OSS, page_size=64, prefix="gpu: "),
    project(1000, 2880, GPT_OSS, page_size=64, padding=24, prefix="gpu: "),
    project(2048, 5760, GPT_OSS, norm=False, bias=False, page_size=64, prefix="gpu: "),
)
