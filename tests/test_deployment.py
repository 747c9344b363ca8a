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
from nanovllm.config import Config, Recipe, load_config
from nanovllm.server.app import METRICS, PROBES

RECIPES = Path(__file__).parents[1] / "recipes"
DOCKER, KUBERNETES = RECIPES / "docker", RECIPES / "kubernetes"
FILES = sorted(DOCKER.rglob("*.yaml")) + sorted(KUBERNETES.rglob("*.yaml"))
RENDERED = ("one", "several", "prefill-decode")
PODS = [
    ("one", "nanovllm"),
    ("several", "nanovllm"),
    ("prefill-decode", "nanovllm-prefill"),
    ("prefill-decode", "nanovllm-decode"),
]  # names of rendered overlays, and of their workloads
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
    """Return the objects of a rendered overlay by kind, where each kind has one."""
    found = documents(KUBERNETES / f"{name}.yaml")
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def named(name: str, kind: str, of: str) -> dict[str, Any]:
    """Return the object of a rendered overlay with a kind and a name."""
    found = documents(KUBERNETES / f"{name}.yaml")
    (one,) = [o for o in found if (o["kind"], o["metadata"]["name"]) == (kind, of)]
    return one


def pod_of(name: str, workload: str = "nanovllm") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's specification of a workload, and its container."""
    kind = "StatefulSet" if workload.endswith("prefill") else "Deployment"
    pod = named(name, kind, workload)["spec"]["template"]["spec"]
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
    for flag, key in (
        ("host", "server.host"), ("port", "server.port"), ("role", "transfer.role"),
    ):  # fmt: skip
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
    found = documents(KUBERNETES / f"{name}.yaml")
    for one in found:
        if one["kind"] == "PodMonitor":
            jsonschema.validate(one["spec"], POD_MONITOR)
        else:
            kubernetes_validate.validate(one, "1.34", strict=True)
    wrong = next(one for one in found if one["kind"] == "Service")
    wrong["spec"]["ports"][0]["tagetPort"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the overlays")
@pytest.mark.parametrize("name", RENDERED)
def test_rendered_files_are_those_of_the_overlays(name: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [*yaml.safe_load_all(done.stdout)] == documents(KUBERNETES / f"{name}.yaml")


@pytest.mark.parametrize(("name", "workload"), PODS)
def test_times_of_a_pod(name: str, workload: str) -> None:
    pod, container = pod_of(name, workload)
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


@pytest.mark.parametrize("name", ["one", "several"])
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


@pytest.mark.parametrize(("name", "workload"), PODS)
def test_a_pod_has_no_rights(name: str, workload: str) -> None:
    pod, container = pod_of(name, workload)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in (container, *pod.get("initContainers", [])):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    gpus = [container["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")]
    assert gpus == ["1", "1"]
    env = {one["name"]: one for one in container["env"]}
    assert all("value" not in one for one in env.values())  # keys come from a Secret
    assert "account" not in {one["name"] for one in container["volumeMounts"]}


def recipe_of(workload: str) -> Recipe:
    """Return the recipe of a workload of prefill and decode."""
    return served([*entry_point()[0], *pod_of("prefill-decode", workload)[1]["args"]]).recipe


def test_decode_pods_reach_all_prefill_pods_and_nothing_else_does() -> None:
    """Each pod of the StatefulSet has a name, which is a peer of the decode server."""
    p, d = recipe_of("nanovllm-prefill").transfer, recipe_of("nanovllm-decode").transfer
    assert p is not None and d is not None and (p.role, d.role) == ("prefill", "decode")
    assert p.listen == "0.0.0.0:5600"
    workload = named("prefill-decode", "StatefulSet", "nanovllm-prefill")["spec"]
    service = named("prefill-decode", "Service", workload["serviceName"])["spec"]
    assert service["clusterIP"] == "None"
    pods = range(workload["replicas"])
    assert d.peers == [f"nanovllm-prefill-{at}.{workload['serviceName']}:5600" for at in pods]
    labels = [
        named("prefill-decode", kind, of)["spec"]["template"]["metadata"]["labels"]
        for kind, of in (("StatefulSet", "nanovllm-prefill"), ("Deployment", "nanovllm-decode"))
    ]
    policy = named("prefill-decode", "NetworkPolicy", "nanovllm-transfer")["spec"]
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert rule["ports"] == [{"port": 5600}]
    assert policy["podSelector"]["matchLabels"].items() <= labels[0].items()
    assert source["podSelector"]["matchLabels"].items() <= labels[1].items()
    for name, other in (("nanovllm-prefill", labels[1]), ("nanovllm-decode", labels[0])):
        for kind, where in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
            selector = named("prefill-decode", kind, name)["spec"][where]
            assert not selector.get("matchLabels", selector).items() <= other.items(), kind
    own = named("prefill-decode", "NetworkPolicy", "nanovllm-prefill")["spec"]["ingress"]
    assert [rule["ports"] for rule in own] == [[{"port": "http"}]]  # not the port of pages


def test_the_sidecar_is_before_the_decode_engine() -> None:
    """Clients and the endpoint picker use port 8000 of both roles. Only the sidecar has a token."""
    pod, container = pod_of("prefill-decode", "nanovllm-decode")
    (sidecar,) = pod["initContainers"]
    engine = recipe_of("nanovllm-decode").server
    assert sidecar["restartPolicy"] == "Always"
    assert {f"--vllm-port={engine.port}", "--port=8000", "--enable-ssrf-protection=true"} <= {
        *sidecar["args"]
    }
    assert recipe_of("nanovllm-prefill").server.port == sidecar["ports"][0]["containerPort"] == 8000
    assert [port["containerPort"] for port in container["ports"]] == [engine.port]
    assert (
        named("prefill-decode", "Service", "nanovllm-decode")["spec"]["ports"][0]["targetPort"]
        == sidecar["ports"][0]["containerPort"]
    )
    assert [one["name"] for one in sidecar["volumeMounts"]] == ["account"]
    role = named("prefill-decode", "Role", "nanovllm-sidecar-decode")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    for workload in ("nanovllm-prefill", "nanovllm-decode"):
        server = recipe_of(workload).server
        assert not server.metrics_key  # the endpoint picker's scraper has no key
        (secret,) = [
            one["valueFrom"]["secretKeyRef"]["key"]
            for one in pod_of("prefill-decode", workload)[1]["env"]
            if one["name"] == "NANOVLLM_TRANSFER_SECRET"
        ]
        assert secret == "transfer-secret"


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
