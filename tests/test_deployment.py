"""Files for containers, Kubernetes and systemd fit the server's own options, routes and times."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from nanovllm.cli.commands import serve
from nanovllm.config import Config, load_config
from nanovllm.server.app import METRICS, PROBES

RECIPES = Path(__file__).parents[1] / "recipes"
DOCKER, KUBERNETES = RECIPES / "docker", RECIPES / "kubernetes"
FILES = sorted(DOCKER.rglob("*.yaml")) + sorted(KUBERNETES.rglob("*.yaml"))
RENDERED = ("one", "several")
ENDS_S = 5  # for processes to end after their last request
# Names of fields of Prometheus' operator, which kubernetes_validate does not have.
ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"port": {}, "path": {}, "interval": {}, "authorization": {}},
}
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "podMetricsEndpoints"],
    "properties": {"selector": {"type": "object"}, "podMetricsEndpoints": {"items": ENDPOINT}},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def objects(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a rendered overlay by kind."""
    found = documents(KUBERNETES / f"{name}.yaml")
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's specification of a rendered overlay, and its container."""
    pod = objects(name)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def entry_point() -> tuple[list[str], list[str]]:
    """Return the Dockerfile's entry point and its default arguments."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    values = dict(line.split(" ", 1) for line in lines if line.startswith(("ENTRYPOINT", "CMD ")))
    return json.loads(values["ENTRYPOINT"]), json.loads(values["CMD"])


def served(line: list[str]) -> Config:
    """Return the config of a command line `nanovllm serve ...`. Raise if an option is unknown."""
    assert line[:2] == ["nanovllm", "serve"]
    given = click.Context(serve, info_name="serve")
    parser_values, _, _ = serve.make_parser(given).parse_args(list(line[2:]))
    # Random weights, so that the checkpoint is not looked for.
    overrides = [*parser_values.get("overrides", []), "load.format=dummy"]
    for flag, key in (("host", "server.host"), ("port", "server.port")):
        overrides += [f"{key}={parser_values[flag]}"] if flag in parser_values else []
    return load_config(parser_values["recipe"], overrides)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_file_parses_and_pins_its_images(path: Path) -> None:
    assert documents(path)
    images = [line.split(":", 1)[1] for line in path.read_text().splitlines() if "image:" in line]
    assert all(":" in image and "latest" not in image for image in images)


@pytest.mark.parametrize("name", RENDERED)
def test_objects_are_valid(name: str) -> None:
    """In strict validation, a misspelt field is an error."""
    for kind, one in objects(name).items():
        if kind == "PodMonitor":
            jsonschema.validate(one["spec"], POD_MONITOR)
        else:
            kubernetes_validate.validate(one, "1.34", strict=True)
    wrong = objects(name)["Service"]
    wrong["spec"]["ports"][0]["tagetPort"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlays")
@pytest.mark.parametrize("name", RENDERED)
def test_rendered_files_are_those_of_the_overlays(name: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [*yaml.safe_load_all(done.stdout)] == documents(KUBERNETES / f"{name}.yaml")


@pytest.mark.parametrize("name", RENDERED)
def test_times_of_a_pod(name: str) -> None:
    pod, container = pod_of(name)
    config = served([*entry_point()[0], *container["args"]])
    shutdown_s, pause_s = (
        config.recipe.server.shutdown_s,
        container["lifecycle"]["preStop"]["sleep"],
    )
    assert pod["terminationGracePeriodSeconds"] > pause_s["seconds"] + shutdown_s + ENDS_S
    # /health is 503 while requests finish.
    alive = container["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > shutdown_s
    assert config.recipe.server.stall_s < alive["periodSeconds"] * alive["failureThreshold"]
    starts = container["startupProbe"]
    assert starts["periodSeconds"] * starts["failureThreshold"] >= 1800
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PROBES
        assert container[probe]["httpGet"]["port"] == "http"


@pytest.mark.parametrize("name", RENDERED)
def test_a_pod_s_parts_fit_each_other(name: str) -> None:
    found, (pod, container) = objects(name), pod_of(name)
    server = served([*entry_point()[0], *container["args"]]).recipe.server
    assert (server.host, [port["containerPort"] for port in container["ports"]]) == (
        "0.0.0.0",
        [server.port],
    )
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind, where in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
        selector = found[kind]["spec"][where]
        selector = selector.get("matchLabels", selector)
        assert selector and selector.items() <= labels.items(), kind
    for kind in {"Deployment", "PodDisruptionBudget", "PodMonitor"} & found.keys():
        assert found[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    if "PodMonitor" in found:
        (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
        assert (endpoint["path"], endpoint["port"]) == (METRICS, "http")
        secret = container["env"][0]["valueFrom"]["secretKeyRef"]
        assert endpoint["authorization"]["credentials"] == secret
    assert {one["name"] for one in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    claim = found["PersistentVolumeClaim"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    shared = claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert shared == (found["Deployment"]["spec"]["replicas"] > 1)


@pytest.mark.parametrize("name", RENDERED)
def test_a_pod_has_no_rights(name: str) -> None:
    pod, container = pod_of(name)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    gpus = [container["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")]
    assert gpus == ["1", "1"]
    env = {one["name"]: one for one in container["env"]}
    assert all("value" not in one for one in env.values())  # keys come from a Secret


def test_the_image_runs_the_server_without_a_shell_or_root() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    entry, arguments = entry_point()
    server = served([*entry, *arguments]).recipe.server
    assert (server.host, server.port) == ("0.0.0.0", 8000)
    assert "\nEXPOSE 8000\n" in text and "\nUSER 1000:0\n" in text and text.count("\nFROM ") == 2
    (probe,) = [line for line in text.splitlines() if line.strip().startswith('CMD ["python"')]
    assert f"http://127.0.0.1:8000{PROBES[0]}" in probe
    for volume in json.loads(text.partition("\nVOLUME ")[2].partition("\n")[0]):
        assert f" {volume}" in text.partition("RUN mkdir")[2].partition("&&")[0]
    copies = [line.split() for line in text.splitlines() if line.startswith("COPY ")]
    copied = {words[1] for words in copies if not words[1].startswith("--")}
    assert copied == {"pyproject.toml", "kernels", "nanovllm", "recipes"}
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert allowed[0] == "*" and {f"!{name}" for name in copied} <= {*allowed}


def test_compose_serves_prometheus_and_grafana() -> None:
    (compose,) = documents(DOCKER / "compose.yaml")
    service = compose["services"]["nanovllm"]
    command = [part.replace("${NANOVLLM_RECIPE:-demo}", "demo") for part in service["command"]]
    server = served([*entry_point()[0], *command]).recipe.server
    assert int(service["stop_grace_period"].removesuffix("s")) > server.shutdown_s + ENDS_S
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DOCKER / "Dockerfile"
    )
    (scraped,) = documents(DOCKER / "prometheus.yaml")[0]["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"nanovllm:{server.port}"]}]
    assert scraped["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert compose["secrets"]["api_key"] == {"environment": "NANOVLLM_API_KEY"}
    for one in compose["services"].values():
        for volume in one.get("volumes", []):
            source = volume.partition(":")[0]
            assert (DOCKER / source).exists() if source[0] == "." else source in compose["volumes"]
    (gpu,) = documents(DOCKER / "compose.gpu.yaml")
    assert gpu["services"].keys() == {"nanovllm"}


def test_the_systemd_service() -> None:
    lines = (RECIPES / "nanovllm.service").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line and line[0] not in "#[")
    command = values["ExecStart"].replace("${NANOVLLM_RECIPE}", "demo").split()
    assert command[0].endswith("/bin/nanovllm")
    server = served(["nanovllm", *command[1:]]).recipe.server
    assert int(values["TimeoutStopSec"]) > server.shutdown_s + ENDS_S
    assert (values["KillMode"], values["RestartPreventExitStatus"]) == ("mixed", "2")
    assert values["User"] == "nanovllm" and values["NoNewPrivileges"] == "yes"
