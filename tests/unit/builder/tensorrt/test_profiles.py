"""The profiles of TensorRT-RTX engines include every launch of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from engine_sizes import compute_engine_sizes
from geometries import gpt_oss_parts
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.backends.tensorrt.standard.profiles import role_profiles
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape, Port, Role
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.tensorrt.feeds import chosen_profile, profile_sizes

TARGET = TargetGeometry(
    model_type="gpt_oss", layers=2, hidden=64, vocab=256, q_heads=4, kv_heads=2, head_dim=16,
    layer_types=("sliding_attention", "full_attention"), sliding_window=8, max_positions=4096,
    rope=Rope(150000.0), eos_token_ids=(0,), **gpt_oss_parts(2),
)  # fmt: skip
DRAFT = Eagle3Geometry(
    architecture="eagle3", hidden=64, vocab=128, q_heads=4, kv_heads=2, head_dim=16, inner=64,
    rms_eps=1e-5, rope=Rope(10000.0), aux_layers=(0, 1), max_positions=None, d2t_form="offsets",
    sliding_window=0, own_embedding=False, own_head=True, norm_before_fc=False,
    input_width="embedding_and_hidden", norm_before_residual=True, norm_output=False,
)  # fmt: skip


def engine_sizes(batch: int, length: int, shape: DraftShape) -> EngineSizes:
    options = BuildOptions(
        model=Path(),
        output=Path(),
        backend="tensorrt-rtx",
        limits=LimitOptions(max_seq_len=length, max_batch_size=batch),
        drafting=DraftOptions(
            top_k=shape.draft_top_k, depth=shape.draft_depth, tokens=shape.draft_tokens
        ),
    )
    return compute_engine_sizes(options, TARGET, DRAFT)


shapes = st.builds(
    lambda k, d, part: DraftShape(
        k, d, max(1, round(part * min(DraftShape(k, d, 0).candidates, 40)))
    ),
    st.integers(1, 5),
    st.integers(1, 5),
    st.floats(0, 1),
)
drawn_sizes = st.builds(engine_sizes, st.integers(1, 5), st.sampled_from([64, 300, 1024]), shapes)


def role_of(built: EngineSizes, name: str, *scalars: str) -> Role:
    ports = tuple(Port(scalar, "int32", ()) for scalar in scalars)
    return Role("", ports, (), (), {}, role_profiles(built)[name])


def taken(role: Role, name: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes at which a launch runs; raise an error if no profile includes it."""
    profile = role.profiles[chosen_profile(name, role, sizes)]
    return profile_sizes(profile, sizes)


@examples(60)
@given(drawn_sizes, st.data())
def test_every_launch_has_a_profile_without_padding(
    built: EngineSizes, data: st.DataObject
) -> None:
    limits = built.limits
    batch = data.draw(st.integers(1, limits.max_batch_size))
    pages = {
        f"P_{group.name}": data.draw(st.integers(1, (group.pages - 1) // limits.max_batch_size))
        for group in built.target_groups
    }
    nodes = data.draw(st.integers(1, limits.draft_tokens + 1))
    words = data.draw(st.integers(1, -(-nodes // 32)))
    views = {"B": batch, "B1": batch + 1, **pages}
    target = role_of(built, "target")
    verified = {"T": batch * nodes, "R": batch * nodes, "W": words, **views}
    assert taken(target, "target", verified) == verified
    chunk = data.draw(st.integers(batch, limits.max_rows))
    prompt = {"T": chunk, "R": data.draw(st.integers(1, batch)), "W": 1, **views}
    assert taken(target, "target", prompt) == prompt
    choices = {"R": batch * nodes}
    assert taken(role_of(built, "choose"), "choose", choices) == choices
    k = data.draw(st.integers(1, limits.draft_top_k))
    for first in {1, k}:
        level = {"BF": batch * first, "B": batch, "F": first, "top_k": k}
        run = taken(role_of(built, "expand", "top_k"), "expand", level)
        assert {name: run[name] for name in level} == level
        assert (run["FK"], run["K"]) == (first * k, k)
    requested_tokens = data.draw(st.integers(1, limits.draft_tokens))
    most = DraftShape(limits.draft_top_k, limits.draft_depth, 0).candidates
    candidates = {
        "B": batch,
        "M": data.draw(st.integers(requested_tokens, most)),
        "draft_tokens": requested_tokens,
    }
    run = taken(role_of(built, "select", "draft_tokens"), "select", candidates)
    assert {name: run[name] for name in candidates} == candidates
    assert (run["N1"], run["W"]) == (requested_tokens + 1, -(-(requested_tokens + 1) // 32))


def test_a_launch_beyond_the_limits_has_no_profile() -> None:
    role = role_of(engine_sizes(2, 64, DraftShape(1, 3, 3)), "choose")
    assert taken(role, "choose", {"R": 8}) == {"R": 8}
    with pytest.raises(SpecbuildError, match="no profile for R 9"):
        taken(role, "choose", {"R": 9})
