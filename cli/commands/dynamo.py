"""``specbuild dynamo``: run an engine as a worker of NVIDIA Dynamo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory, Threads
from specbuild.runtime.errors import SpecbuildError

_NEEDED = ("dynamo", "msgspec", "zmq", "uvloop", "prometheus_client")


def dynamo(
    engine: EngineDirectory,
    *,
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Checkpoint of the target; the frontend reads its config.json and tokenizer.",
        ),
    ],
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Name of the model in the API.",
            show_default="the name of the engine directory",
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="Dynamo's namespace.")
    ] = "dynamo",
    component: Annotated[
        str, typer.Option("--component", metavar="NAME", help="Dynamo's component.")
    ] = "backend",
    discovery_backend: Annotated[
        Literal["etcd", "file", "kubernetes", "mem"],
        typer.Option("--discovery-backend", help="Discovery of workers and frontends."),
    ] = "etcd",
    event_plane: Annotated[
        Literal["zmq", "nats"] | None,
        typer.Option("--event-plane", help="Transport of events.", show_default="Dynamo's"),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", metavar="N", min=0, help="Maximum number of waiting sequences."
        ),
    ] = 256,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Disable prefix caching.")
    ] = False,
    threads: Threads = None,
    _debug: Debug = False,
) -> None:
    """Serve an engine as a worker of NVIDIA Dynamo.

    Dynamo's frontend has the HTTP API, tokenizes, and handles chat templates and tool
    calls. Its router sends a prompt to the worker that has cached the longest prefix:
    the worker publishes the contents of its prefix cache.

    \b
    Examples:
    specbuild dynamo engine --model target
    specbuild dynamo engine --model target --discovery-backend file
    """
    from specbuild.runtime.engine_dir.files import check_sizes, read_manifest

    check_sizes(engine, read_manifest(engine))
    if not (model / "config.json").is_file():
        raise SpecbuildError(
            f"--model {model} has no config.json: give the checkpoint of the target"
        )
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SpecbuildError(
            f"specbuild dynamo needs {missing[0]}: pip install '.[serve,events]' in the checkout, "
            "and pip install --no-deps ai-dynamo ai-dynamo-runtime"
        )
    from specbuild.cli.dynamo.worker import WorkerOptions, serve_worker

    serve_worker(
        WorkerOptions(
            engine=engine,
            model=model.resolve(),
            name=served_model_name or engine.resolve().name,
            namespace=namespace,
            component=component,
            discovery=discovery_backend,
            event_plane=event_plane,
            threads=threads,
            max_queue=max_queue,
            prefix_cache=not no_prefix_cache,
        )
    )
