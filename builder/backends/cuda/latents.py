"""Latent caches as CUDA kernels hold them: as wide as a whole number of an mma's steps."""

from __future__ import annotations

from dataclasses import replace

from specbuild.builder.limits import EnginePlan
from specbuild.runtime.kv_layout import padded_width
from specbuild.runtime.manifest import CacheGroup


def with_padded_latents(plan: EnginePlan) -> EnginePlan:
    """The plan whose latent pools have room for the zeros behind each latent."""
    return replace(plan, groups=tuple(_padded(group) for group in plan.groups))


def _padded(group: CacheGroup) -> CacheGroup:
    if not group.latent_widths:
        return group
    widths = tuple(padded_width(width) for width in group.latent_widths)
    return replace(group, k_width=max(widths), v_width=max(widths), latent_widths=widths)
