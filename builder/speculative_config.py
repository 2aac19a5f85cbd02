"""Speculation settings with the keys of other servers' configuration files, for builds and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

from specbuild.builder.option_group import RENAMED_OPTIONS, Option
from specbuild.builder.options import BuildOptions
from specbuild.builder.yaml_file import read_mapping, record_of, require_known, require_mapping
from specbuild.runtime.engine_dir.drafters.registry import HOST_NAMES, RECORDS, TARGET_LAYERS
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError

_BLOCK = "speculative_config"
# Keys for properties that were set at the build, and the names of their options.
_SPECPV = (
    "specpv_block_size",
    "specpv_n_sink_blocks",
    "specpv_n_retrieval_blocks",
    "specpv_n_window_blocks",
    "specpv_n_spec_tokens_buf",
    "specpv_partial_threshold",
    "specpv_full_refresh_interval",
)
_DSA = ("dsa_top_k", "dsa_threshold")
if TYPE_CHECKING:
    Method: TypeAlias = str
else:
    Method = Literal[(*RECORDS, "none")]


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The settings of drafts and lossy modes in a configuration file; None is unset.

    A build uses all except ``enable_prefix_caching``. A run uses ``enable_speculative_decoding``,
    ``method``, ``enable_target_tree`` and ``enable_prefix_caching``; the others must match the
    engine. ``method`` "suffix" runs only suffix decoding; ``enable_suffix_decoding`` builds it in
    addition to a draft. A drafter that proposes on the host has such a key, and one for each of its
    settings. ``mla_latent_dim`` is the rank of the checkpoint's latents.
    """

    enable_speculative_decoding: bool | None = None
    method: Method | None = None
    enable_target_tree: bool | None = None
    enable_specpv: bool | None = None
    specpv_block_size: int | None = None
    specpv_n_sink_blocks: int | None = None
    specpv_n_retrieval_blocks: int | None = None
    specpv_n_window_blocks: int | None = None
    specpv_n_spec_tokens_buf: int | None = None
    specpv_partial_threshold: int | None = None
    specpv_full_refresh_interval: int | None = None
    enable_mla_kv_compression: bool | None = None
    mla_latent_dim: int | None = None
    enable_dsa_indexer: bool | None = None
    dsa_top_k: int | None = None
    dsa_threshold: int | None = None
    enable_suffix_decoding: bool | None = None
    suffix_cache_max_depth: int | None = None
    suffix_max_tokens: int | None = None
    suffix_min_token_prob: float | None = None
    suffix_cached_tokens: int | None = None
    enable_prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        if self.enable_speculative_decoding is True and self.method == "none":
            raise SpecbuildError(
                "enable_speculative_decoding is true and method none: they contradict each other"
            )
        for kind in HOST_NAMES:
            if self.method == kind and self._enabled(kind) is False:
                raise SpecbuildError(
                    f"method is {kind} and {_enabling(kind)} false: they contradict each other"
                )
        for names, enabled in (
            (_SPECPV, "enable_specpv"),
            (_DSA, "enable_dsa_indexer"),
            *((_settings(kind), _enabling(kind)) for kind in HOST_NAMES),
        ):
            given = [name for name in names if getattr(self, name) is not None]
            if given and getattr(self, enabled) is False:
                raise SpecbuildError(f"{given[0]} is given, but {enabled} is false")

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return settings from decoded YAML or JSON; SpecbuildError names an unknown key."""
        return record_of(cls, data, where)

    @property
    def drafts(self) -> bool:
        """Whether a draft may propose tokens."""
        return self.enable_speculative_decoding is not False and self.method != "none"

    @property
    def host_drafter(self) -> str | None:
        """The kind of host drafter that is built into an engine, or None."""
        return next((kind for kind in HOST_NAMES if self._requires(kind)), None)

    def _enabled(self, kind: str) -> bool | None:
        """Return the value of the key that enables a host drafter, or None."""
        enabled: bool | None = getattr(self, _enabling(kind), None)
        return enabled

    def _requires(self, kind: str) -> bool:
        enabled = self._enabled(kind)
        given = any(getattr(self, name) is not None for name in _settings(kind))
        return given or self.method == kind if enabled is None else enabled

    def build_options(self) -> dict[str, Any]:
        """Return the options of a build by flat names, for ``BuildOptions.from_flat``."""
        found: dict[str, Any] = {n: getattr(self, n) for n in (*_SPECPV, *_DSA)}
        if self.drafts:
            found |= {n: getattr(self, n) for kind in HOST_NAMES for n in _settings(kind)}
            found["drafter"] = self.host_drafter
        found |= {"specpv": self.enable_specpv, "dsa": self.enable_dsa_indexer}
        if self.enable_mla_kv_compression is not None:
            found["no_mla"] = not self.enable_mla_kv_compression
        if self.drafts and self.enable_target_tree is False:
            found["draft_top_k"] = 1
        if self.drafts and self.method in RECORDS:
            argument = RECORDS[self.method].BUILD_ARGUMENT
            if argument in TARGET_LAYERS:
                found["draft"] = Path(str(argument))
        return {name: value for name, value in found.items() if value is not None}

    def run_options(self) -> dict[str, Any]:
        """Return the options of ``run`` and ``serve`` by flat names."""
        found: dict[str, Any] = {}
        if not self.drafts:
            found["no_spec"] = True
        elif self.method is not None and not any(map(self._enabled, HOST_NAMES)):
            found["drafter"] = self.method
        if self.drafts and self.enable_target_tree is False:
            found["draft_top_k"] = 1
        if self.enable_prefix_caching is not None:
            found["no_prefix_cache"] = not self.enable_prefix_caching
        return found

    def check(self, manifest: Manifest) -> None:
        """Raise SpecbuildError for the first key that does not match the engine."""
        self._check(_built(manifest), "the engine was built with")
        self.check_latents(manifest.target)
        kinds = [drafter.kind for drafter in manifest.drafters]
        if self.method not in (None, "none", *kinds):
            raise SpecbuildError(
                f"the configuration says method {self.method}, the engine was built with "
                f"{', '.join(kinds) or 'no draft'}"
            )

    def check_latents(self, target: TargetGeometry) -> None:
        """Raise SpecbuildError if a model's layers do not cache the requested latents."""
        ranks = {rank for rank in target.latent_dims if rank}
        rank = ranks.pop() if len(ranks) == 1 else None
        facts = {"enable_mla_kv_compression": any(target.latent_dims), "mla_latent_dim": rank}
        self._check(facts, "the model has")

    def _check(self, facts: Mapping[str, Any], whose: str) -> None:
        for name, value in facts.items():
            asked = getattr(self, name)
            if asked is not None and asked != value:
                raise SpecbuildError(
                    f"the configuration says {name} {_text(asked)}, {whose} {_text(value)}"
                )


@dataclass(frozen=True)
class EngineConfig:
    """A configuration file: options by flat names such as ``max_seq_len``, and speculation.

    ``sections`` are for one command each: ``build``, ``run``, ``serve``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    where: str = "the configuration"

    SECTIONS: ClassVar[tuple[str, ...]] = ("build", "run", "serve")

    @classmethod
    def from_yaml(cls, file: str | Path) -> Self:
        """Read a file; keys of speculation are in ``speculative_config:`` or at the top level.

        Raises SpecbuildError if it cannot be read, or a value of speculation is invalid.
        """
        where, data = str(file), read_mapping(Path(file))
        sections = {
            name: require_mapping(data.pop(name) or {}, f"{where}, {name}")
            for name in cls.SECTIONS
            if name in data
        }
        speculative = dict(require_mapping(data.pop(_BLOCK, None) or {}, f"{where}, {_BLOCK}"))
        for entry in fields(SpeculativeConfig):
            # A name that is also an option's belongs to speculation: both have the same meaning.
            if entry.name in data:
                if entry.name in speculative:
                    raise SpecbuildError(f"{where}: {entry.name} stands there twice")
                speculative[entry.name] = data.pop(entry.name)
        config = SpeculativeConfig.of(speculative, f"{where}, {_BLOCK}")
        options = {name.replace("-", "_"): value for name, value in data.items()}
        return cls(options, config, sections, where)

    def written(self, command: str) -> dict[str, Any]:
        """Return the options of a command from its section and from the rest, the section first."""
        own = self.sections.get(command, {})
        found = dict(self.options) | {k.replace("-", "_"): v for k, v in own.items()}
        return {RENAMED_OPTIONS.get(name, name): value for name, value in found.items()}

    def of_command(self, command: str) -> dict[str, Any]:
        """Return :meth:`written`, and the effects of speculation on options that it lacks."""
        spoken = self.speculative_config
        meant = spoken.build_options() if command == "build" else spoken.run_options()
        return meant | self.written(command)

    def build_options(self) -> BuildOptions:
        """Return the arguments of ``specbuild.builder.build.build``.

        Raises SpecbuildError for an unknown option, or a missing one.
        """
        given = self.of_command("build")
        known = {option.name: option for option in BuildOptions.options()}
        require_known(given, known, self.where)
        missing = [name for name in ("model", "output") if name not in given]
        if missing:
            raise SpecbuildError(f"{self.where}: {missing[0]} is missing")
        places = {name for name, value in given.items() if value and _is_path(known[name])}
        options = BuildOptions.from_given(given | {name: Path(given[name]) for name in places})
        return options if self.speculative_config.drafts else replace(options, draft=None)


def _is_path(option: Option) -> bool:
    """Return whether a value is a path in a type that could also be another."""
    alone = option.type is Path or Path in get_args(option.type)
    return alone and option.described.read is None


def _built(manifest: Manifest) -> dict[str, Any]:
    """Return the properties of an engine, by the keys of a configuration."""
    specpv, dsa = manifest.specpv, manifest.dsa
    found: dict[str, Any] = {
        "enable_specpv": specpv is not None,
        "enable_dsa_indexer": dsa is not None,
    }
    entries: list[tuple[tuple[str, ...], Any, str]] = [
        (_SPECPV, specpv, "specpv_"),
        (_DSA, dsa, "dsa_"),
    ]
    for kind in filter(_has_keys, HOST_NAMES):
        drafter = next((d for d in manifest.host_drafters if d.kind == kind), None)
        found[_enabling(kind)] = drafter is not None
        entries.append((_settings(kind), drafter, f"{kind}_"))
    for names, record, prefix in entries:
        for name in names:
            found[name] = None if record is None else getattr(record, name.removeprefix(prefix))
    return found


def _text(value: Any) -> str:
    return {None: "nothing", True: "true", False: "false"}.get(value, str(value))


def _enabling(kind: str) -> str:
    """Return the key that enables a host drafter."""
    return f"enable_{kind}_decoding"


def _has_keys(kind: str) -> bool:
    """Return whether a host drafter has its own keys."""
    return any(entry.name == _enabling(kind) for entry in fields(SpeculativeConfig))


def _settings(kind: str) -> tuple[str, ...]:
    """Return the keys that set a host drafter."""
    return tuple(e.name for e in fields(SpeculativeConfig) if e.name.startswith(f"{kind}_"))
