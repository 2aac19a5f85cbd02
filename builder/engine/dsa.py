"""The DSA settings of a build: defaults and checks."""

from __future__ import annotations

from dataclasses import asdict

from specbuild.builder.options import BuildOptions, DsaOptions
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape, Dsa
from specbuild.runtime.errors import SpecbuildError

DEFAULTS = Dsa(**DsaOptions.usual())


def dsa_of(
    options: BuildOptions, target: TargetGeometry, shape: DraftShape, *, max_seq_len: int
) -> Dsa | None:
    """Return the settings from options and config; None if the target's indexers are not used.

    Raises SpecbuildError with the values of an option that is out of range.
    """
    given = options.dsa.given()
    enabled = given.pop("enabled", None)
    indexer = target.indexer
    if indexer is None:
        if given:
            raise SpecbuildError(f"{DsaOptions.flag(next(iter(given)))} needs --dsa; add it")
        return None
    named = {"top_k": indexer.top_k, "threshold": indexer.threshold}
    named = {name: value for name, value in named.items() if value is not None}
    config = Dsa(**{**asdict(DEFAULTS), **named, **given})
    DsaOptions.check_bounds(asdict(config))
    if config.min_agreement > 1:
        raise SpecbuildError(
            f"--dsa-min-agreement is {config.min_agreement:g}, a share of tokens from 0 to 1"
        )
    if config.recent_tokens <= shape.draft_depth:
        raise SpecbuildError(
            f"--dsa-recent-tokens {config.recent_tokens} does not cover a draft of depth "
            f"{shape.draft_depth} and its root, so that drafts would change the output; raise it "
            f"to {shape.draft_depth + 1} or lower --draft-depth"
        )
    if enabled and config.threshold >= max_seq_len:
        raise SpecbuildError(
            f"--dsa-threshold {config.threshold} is never passed: the engine's longest sequence "
            f"has {max_seq_len} tokens; raise --max-seq-len or lower it"
        )
    return config


def dsa_warnings(config: Dsa | None, *, max_seq_len: int) -> tuple[str, ...]:
    """Warn about settings of a config that have no effect."""
    if config is None or config.threshold < max_seq_len:
        return ()
    return (
        f"DSA begins at {config.threshold} tokens, the engine's longest sequence has "
        f"{max_seq_len}: all of its tokens are attended to (--dsa-threshold)",
    )
