"""Manifests without engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from geometries import gpt_oss_parts

from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry, Eagle3Record
from specbuild.runtime.engine_dir.drafters.record import DRAFT_ROLES
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.manifest import (
    CacheGroup,
    DraftShape,
    Limits,
    Manifest,
    Port,
    Role,
    StoredFile,
)
from specbuild.runtime.engine_dir.rope_scaling import YarnScaling

LIMITS = Limits(
    max_seq_len=64, max_batch_size=2, max_rows=32, draft_top_k=4, draft_depth=5, draft_tokens=20
)
CHAIN = DraftShape(draft_top_k=1, draft_depth=3, draft_tokens=3)
TARGET = TargetGeometry(
    model_type="gpt_oss",
    layers=2,
    hidden=16,
    vocab=100,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=8,
    max_positions=8192,
    rope=Rope(150000.0, YarnScaling(factor=32.0, original_max_positions=64)),
    eos_token_ids=(0, 2),
    **gpt_oss_parts(2, inner=8),
)
DRAFT = Eagle3Geometry(
    architecture="LlamaForCausalLMEagle3",
    hidden=16,
    vocab=50,
    q_heads=2,
    kv_heads=2,
    head_dim=8,
    inner=24,
    rms_eps=1e-5,
    rope=Rope(theta=10000.0),
    aux_layers=(0, 1, 1),
    max_positions=128,
    d2t_form="offsets",
    sliding_window=0,
    own_embedding=False,
    own_head=True,
    norm_before_fc=False,
    input_width="embedding_and_hidden",
    norm_before_residual=False,
    norm_output=False,
)
DRAFTER = Eagle3Record(cache_group="draft", roles=DRAFT_ROLES, geometry=DRAFT)


def cache_group(name: str, layers: tuple[int, ...], pages: int, window: int) -> CacheGroup:
    return CacheGroup(
        name=name,
        layers=layers,
        kv_heads=2,
        k_width=8,
        v_width=8,
        page_size=4,
        pages=pages,
        window=window,
        dtype="float32",
        pool_axes=("kv_heads", "pages", "page_size", "width"),
    )


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., Manifest]:
    """Return a function that makes manifests with the fields that the command line reads."""

    def make(
        *,
        limits: Limits = LIMITS,
        draft_default: DraftShape | None = CHAIN,
        draft: bool = True,
    ) -> Manifest:
        # 85 slots in pages of 4, and a window of 8 with 32 rows
        groups = [cache_group("full", (1,), 1 + 2 * 22, 0)]
        groups.append(cache_group("sliding", (0,), 1 + 2 * 11, 8))
        token_ids = Port("token_ids", "int32", ("T",))
        role = Role("graphs/target.onnx", (token_ids,), (), ("w",), ops={"MatMul": 3, "Add": 1})
        return Manifest(
            format_version=FORMAT_VERSION,
            specbuild_version="0.1.0",
            backend="cpu",
            device="cpu",
            target=TARGET,
            drafters=(DRAFTER,) if draft else (),
            limits=limits,
            draft_default=draft_default if draft else None,
            cache_groups=tuple(groups),
            roles={"target": role},
            tensors={},
            options={"page_size": 4},
            warnings=("field x is not known",),
            files={"weights.safetensors": StoredFile(5000, "0" * 32)},
        )

    return make
