"""Replicas of an engine on Ray Serve: ``serve run specbuild.runtime.serve.ray:build engine=PATH``.

Each replica is a process with its own engine and routes. Ray starts the replicas, routes requests
to them and replaces failed ones. Ray is imported when :func:`build` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError, SpecbuildError
from specbuild.runtime.serve.app import App, AppOptions
from specbuild.runtime.serve.parsers.output_formats import output_format
from specbuild.runtime.serve.service import ServiceOptions
from specbuild.runtime.settings import PrefixCaching, RuntimeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# "session" sends the requests of a session to the replica that caches its earlier turns.
_ROUTERS = {
    "session": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
    "load": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The options of ``serve run``, as ``name=value``.

    ``routing`` is ``session`` or ``load``. ``num_gpus`` is the number per replica; by default it is
    one, or zero for CPU engines. ``drain_s`` is the time that a replaced replica has to finish its
    requests.
    Raises RequestError if a value is invalid.
    """

    engine: str
    replicas: int = 1
    name: str = ""
    routing: str = "session"
    max_queue: int = 256
    num_gpus: float | None = None
    num_cpus: float = 1
    drain_s: float = 60
    api_key_file: str = ""
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.routing not in _ROUTERS:
            raise RequestError(f"routing is {self.routing!r}, must be {' or '.join(_ROUTERS)}")
        minimums = {"replicas": 1, "max_queue": 0, "num_gpus": 0, "num_cpus": 0, "drain_s": 0}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise RequestError(f"{name} is {value}, must be {minimum} or above")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> ReplicaOptions:
        """Return options from the strings of a command line. RequestError names the invalid one."""
        types = {field.name: str(field.type).split(" ", maxsplit=1)[0] for field in fields(cls)}
        if unknown := sorted(options.keys() - types.keys()):
            raise RequestError(f"{unknown[0]} is not an option; the options are {', '.join(types)}")
        if not options.get("engine"):
            raise RequestError(
                "the engine is missing: add engine=PATH, a path that exists on every machine"
            )
        return cls(**{name: _value(name, value, types[name]) for name, value in options.items()})

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the API keys of the key file. RequestError if it contains none."""
        if not self.api_key_file:
            return ()
        try:
            keys = tuple(Path(self.api_key_file).read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"api_key_file {self.api_key_file}: {error}") from error
        if not keys:
            raise RequestError(f"api_key_file {self.api_key_file} contains no key")
        return keys

    def gpus(self, manifest: Manifest) -> float:
        """Return the number of GPUs per replica."""
        if self.num_gpus is not None:
            return self.num_gpus
        return float(manifest.ranks * facts_of(manifest.backend).on_gpu)


class Replica:
    """One engine with the routes of ``specbuild serve``. Ray calls its methods."""

    def __init__(self, options: ReplicaOptions) -> None:
        caching: PrefixCaching = "auto" if options.prefix_cache else "off"
        engine = Engine.load(options.engine, RuntimeSettings(prefix_caching=caching))
        output_format_ = None
        if engine.text is not None:
            engine.text.check_template()
            eos = engine.manifest.target.eos_token_ids
            output_format_ = output_format(engine.text, eos, reasoning="auto", tool_calls="auto")
        names = (options.name or Path(options.engine).resolve().name,)
        service = ServiceOptions(names=names, max_queue=options.max_queue)
        self._app = App(
            engine, AppOptions(service=service, output_format=output_format_, keys=options.keys)
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application to which Ray sends requests."""
        return self._app.asgi

    def check_health(self) -> None:
        """Raise SpecbuildError if the engine failed, so that Ray replaces the replica."""
        if self._app.service.failure is not None:
            raise SpecbuildError(f"the engine failed: {self._app.service.failure}")


def build(arguments: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application of an engine.

    Raises RequestError for an invalid option, EngineFileError if there is no engine, and
    SpecbuildError without the extra ``ray``.
    """
    options = ReplicaOptions.read(arguments)
    manifest = read_manifest(Path(options.engine))
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise SpecbuildError("Ray is missing: pip install '.[ray]' in the checkout") from error
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="engine",
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.gpus(manifest)},
        # Ray must not reject requests: the replica answers 429 if its queue is full.
        max_ongoing_requests=manifest.limits.max_batch_size + options.max_queue + 16,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTERS[options.routing]),
    )
    return deployment.bind(options)


def _value(name: str, value: Any, type_: str) -> Any:
    """Return a value as the type of its option, converted if it is a string."""
    if not isinstance(value, str):
        return value
    if type_ == "bool":
        if value.lower() not in ("true", "false"):
            raise RequestError(f"{name} is {value!r}, must be true or false")
        return value.lower() == "true"
    try:
        return {"int": int, "float": float, "str": str}[type_](value)
    except ValueError as error:
        raise RequestError(f"{name} is {value!r}, must be a number") from error
