"""Cases of RmsMoe over prompt chunks: experts of several tiles and of few rows, real sizes."""

from __future__ import annotations

from dataclasses import replace

from specbuild.plugins_cuda.cases import Case
from specbuild.plugins_cuda.rms_moe.cases import (
    DEEPSEEK_V3,
    GEMMA4,
    GLM_FLASH,
    KIMI_K2,
    QWEN3_BF16,
    QWEN3_NEXT,
    QWEN35_MOE,
    V2_LITE,
    Layer,
)

KERNEL_CASES: tuple[Case, ...] = (
    Layer(rows=300, live=289, hidden=96, inner=96, top_k=2, popular=True).case(
        "several tiles of one expert"
    ),
    Layer(rows=150, live=141, hidden=96, inner=96, popular=True, bf16=True).case(
        "several tiles of one expert, bf16"
    ),
    replace(
        DEEPSEEK_V3, rows=150, live=141, hidden=96, inner=96, experts=16, top_k=3, bf16=True
    ).case("DeepSeek-V3's choice, several tiles of the shared expert, bf16"),
    replace(
        DEEPSEEK_V3, rows=20, live=19, inner=32, experts=4, top_k=2, groups=1, groups_chosen=1
    ).case("rows of 7168 values"),
    replace(KIMI_K2, rows=40, live=37, hidden=96, inner=32).case("384 experts"),
    replace(QWEN3_NEXT, rows=40, live=37, hidden=96, inner=32).case("top 10 of 512 experts"),
    replace(QWEN35_MOE, rows=150, live=141, hidden=96, inner=96, experts=16, top_k=3).case(
        "several tiles of a shared expert with a gate"
    ),
    replace(GEMMA4, rows=150, live=141, hidden=96, inner=96, experts=16).case(
        "Gemma 4's router and GELU"
    ),
    replace(GEMMA4, rows=512, live=500).case("gpu: gemma-4-26b-a4b, 512 rows"),
    replace(V2_LITE, rows=512, live=500).case("gpu: deepseek-v2-lite, bf16, 512 rows"),
    replace(GLM_FLASH, bf16=False, rows=2048).case("gpu: glm-4.7-flash, 2048 rows"),
    replace(GLM_FLASH, rows=512, live=509).case("gpu: glm-4.7-flash, bf16, 512 rows"),
    replace(DEEPSEEK_V3, rows=512, live=500, experts=32).case(
        "gpu: deepseek-v3, 32 experts, 512 rows"
    ),
    replace(KIMI_K2, rows=1024, inner=128).case("gpu: kimi-k2, experts of 128, 1024 rows"),
    replace(QWEN3_BF16, rows=512, live=500).case("gpu: qwen3-30b-a3b, bf16, 512 rows"),
    replace(QWEN35_MOE, rows=512, live=500).case("gpu: qwen3.5-35b-a3b, 512 rows"),
    replace(QWEN3_NEXT, rows=512, live=500).case("gpu: qwen3-next, bf16, 512 rows"),
    Layer(rows=150, live=141, hidden=1056, inner=96, experts=6, top_k=2).case(
        "weights of several stages, an odd number of blocks"
    ),
    Layer(rows=80, live=77, hidden=160, inner=1056, experts=4, top_k=2, popular=True).case(
        "few rows of some experts, several of others, inner of an odd number of blocks"
    ),
    Layer(rows=512, live=509, hidden=2880, inner=2880, experts=128, top_k=4).case(
        "gpu: gpt-oss-120b, 512 rows"
    ),
    Layer(rows=512, hidden=2880, inner=2880, experts=32, top_k=4).case(
        "gpu: gpt-oss-20b, 512 rows"
    ),
    Layer(rows=2048, hidden=2880, inner=2880, experts=32, top_k=4).case(
        "gpu: gpt-oss-20b, 2048 rows"
    ),
    Layer(rows=1024, live=1000, hidden=2880, inner=2880, experts=32, top_k=4).case(
        "gpu: gpt-oss-20b, 1024 rows, 24 padding"
    ),
    Layer(rows=2048, hidden=2880, inner=2880, experts=128, top_k=4).case(
        "gpu: gpt-oss-120b, 2048 rows"
    ),
    Layer(rows=1024, hidden=2880, inner=2880, experts=8, top_k=4, popular=True).case(
        "gpu: 1024 rows of the same 4 experts"
    ),
)
