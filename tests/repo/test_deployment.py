"""Files of ``examples/deploy``: their commands, probes and options exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.parse
from pathlib import Path

import pytest
import typer.main
import yaml
from packaging.specifiers import SpecifierSet

from specbuild.cli.main import command_line
from specbuild.runtime.serve.routes import OPERATIONS
from specbuild.runtime.serve.server import DRAIN_TIMEOUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
UNIT = DEPLOY / "specbuild.service"
MANIFEST = DEPLOY / "kubernetes.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPEN_PATHS = {o.path for o in OPERATIONS if o.method.upper() == "GET" and o.is_open}
USER_ID = 10001


def instructions() -> list[tuple[str, str]]:
    """Name and argument of every instruction of the Dockerfile; RUN and CMD lines are joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def serve_options(words: list[str]) -> dict[str, object]:
    """Parse the arguments of ``specbuild`` and return the parameters. Nothing runs."""
    assert words[0] == "serve"
    command = typer.main.get_command(command_line()).commands["serve"]
    return command.make_context("serve", words[1:]).params


def copied_sources() -> list[str]:
    """The paths that the Dockerfile copies from the checkout."""
    words = [line.split() for line in arguments("COPY")]
    return [source for line in words if "--from" not in line[0] for source in line[:-1]]


def test_the_image_has_all_files_of_an_installation() -> None:
    assert [path for path in copied_sources() if not (ROOT / path).exists()] == []
    stages = {line.split(" AS ")[1] for line in arguments("FROM") if " AS " in line}
    others = {m[1] for line in arguments("COPY") if (m := re.match(r"--from=(\S+)", line))}
    assert others == stages
    for image in arguments("FROM"):
        (version,) = re.findall(r"^python:(\d+\.\d+)-slim", image)
        assert version in SpecifierSet(PROJECT["requires-python"])


def test_pip_accepts_the_installation_of_the_image(tmp_path: Path) -> None:
    """Resolve from the installed packages: a copy without a needed file has no metadata."""
    for path in copied_sources():
        if (ROOT / path).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, tmp_path / path, ignore=ignored)
        else:
            shutil.copy(ROOT / path, tmp_path / path)
    (run,) = [line for line in arguments("RUN") if "pip install" in line]
    pip = run.partition("&&")[2].replace("${EXTRAS}", arguments("ARG")[0].partition("=")[2])
    words = shlex.split(pip)
    assert words[:2] == ["/opt/specbuild/bin/pip", "install"]
    offline = ["--dry-run", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, *words[2:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    assert "Would install specbuild-" in done.stdout


def test_the_image_serves_at_its_port() -> None:
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["specbuild"]
    assert "specbuild" in PROJECT["scripts"]
    options = serve_options(json.loads(arguments("CMD")[0]))
    assert str(options["port"]) == arguments("EXPOSE")[0]
    assert arguments("USER") == [f"{USER_ID}:{USER_ID}"]


def test_the_health_check_of_the_image_uses_a_path_of_the_server() -> None:
    probe = json.loads(arguments("HEALTHCHECK")[0].partition("CMD")[2])
    compile(probe[-1], "HEALTHCHECK", "exec")
    url = urllib.parse.urlsplit(re.findall(r"http://[^']+", probe[-1])[0])
    assert url.path in OPEN_PATHS
    assert str(url.port) == arguments("EXPOSE")[0]


def unit_values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_the_unit_serves_with_options_that_exist() -> None:
    (line,) = unit_values("ExecStart")
    program, *words = shlex.split(line)
    assert program == "/opt/specbuild/bin/specbuild"
    socket = Path(str(serve_options(words)["uds"]))
    assert socket.parent == Path("/run") / unit_values("RuntimeDirectory")[0]
    (credential,) = [value.partition(":")[0] for value in unit_values("LoadCredential")]
    assert f"${{CREDENTIALS_DIRECTORY}}/{credential}" in words
    assert int(unit_values("TimeoutStopSec")[0]) > DRAIN_TIMEOUT_S


def verified(unit: Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Use an installed program, and check that a wrong name is detected."""
    text = UNIT.read_text().replace("/opt/specbuild/bin/specbuild", shutil.which("true"))
    unit = tmp_path / "specbuild.service"
    unit.write_text(text)
    done = verified(unit)
    assert (done.returncode, "specbuild.service" in done.stderr) == (0, False), done.stderr
    unit.write_text(text.replace("KillMode=", "KilMode="))
    assert "KilMode" in verified(unit).stderr


def documents() -> dict[str, dict]:
    """Return the objects of the manifest by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict:
    return documents()["Deployment"]["spec"]["template"]["spec"]


def test_kubernetes_accepts_the_manifest() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs the package kubernetes-validate"
    )
    for part in documents().values():
        validator.validate(part, validator.latest_version(), strict=True)
    wrong = documents()["Deployment"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, validator.latest_version(), strict=True)


def test_the_deployment_probes_paths_of_the_server() -> None:
    (container,) = pod()["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["path"] for probe in probes} <= OPEN_PATHS
    assert {probe["port"] for probe in probes} <= ports.keys()
    assert serve_options(container["args"])["port"] == ports["http"]
    (service_port,) = documents()["Service"]["spec"]["ports"]
    assert service_port["targetPort"] in ports


def test_the_deployment_stops_after_running_requests() -> None:
    (container,) = pod()["containers"]
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause_s + DRAIN_TIMEOUT_S


def test_the_deployment_mounts_the_paths_that_it_reads() -> None:
    deployment = documents()["Deployment"]
    (container,) = pod()["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert container["args"][1] == mounts["engine"]
    assert f"--api-key-file={mounts['keys']}/keys" in container["args"]
    claim = volumes["engine"]["persistentVolumeClaim"]["claimName"]
    assert claim == documents()["PersistentVolumeClaim"]["metadata"]["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod()["securityContext"]["runAsUser"] == USER_ID
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert documents()["Service"]["spec"]["selector"] == labels
