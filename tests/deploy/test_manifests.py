"""Kubernetes manifests and Dockerfile: valid, and in step with the server they start."""

import json
import re
import tomllib

import pytest
import yaml

from jaxllm import cli
from serving.http.middleware import OPEN_PATHS
from tests.serving.conftest import ROOT

DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def read(name):
    return yaml.safe_load((BASE / name).read_text())


@pytest.fixture(scope="module")
def pod():
    return read("deployment.yaml")["spec"]["template"]["spec"]


def words(instruction):
    return json.loads(re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.M)[-1])


@pytest.mark.parametrize("name", ["deployment.yaml", "service.yaml"])
def test_manifests_follow_kubernetes_own_schema(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(read(name), version, strict=True)
    broken = read(name)
    broken["spec"]["surprise"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_kustomizations_name_files_that_exist():
    for folder in (BASE, BASE.parent / "gpu"):
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert kustomization["kind"] == "Kustomization"
        for resource in kustomization["resources"]:
            assert (folder / resource).exists(), resource
    assert set(read("kustomization.yaml")["resources"]) == {
        path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml"
    }


def test_the_patch_for_gpus_fits_the_deployment():
    patches = yaml.safe_load((BASE.parent / "gpu" / "kustomization.yaml").read_text())["patches"]
    for operation in yaml.safe_load(patches[0]["patch"]):
        place = read("deployment.yaml")
        *parents, last = operation["path"].strip("/").split("/")
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        assert operation["op"] == "add" or last in place


def test_selectors_match_the_pods():
    labels = read("deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        read("deployment.yaml")["spec"]["selector"]["matchLabels"],
        read("service.yaml")["spec"]["selector"],
        read("podmonitor.yaml")["spec"]["selector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels.items()


def test_ports_are_those_of_the_container(pod):
    (port,) = pod["containers"][0]["ports"]
    assert str(port["containerPort"]) in words("ENTRYPOINT")
    (service,) = read("service.yaml")["spec"]["ports"]
    (monitor,) = read("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert service["targetPort"] == monitor["port"] == port["name"]
    assert monitor["path"] == "/metrics"


def test_probes_need_no_key_and_leave_time_to_start(pod):
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert set(paths.values()) | {"/metrics"} <= OPEN_PATHS
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600


def test_the_server_understands_its_arguments(pod):
    (container,) = pod["containers"]
    program, *fixed = words("ENTRYPOINT")
    assert program == "jaxllm"
    arguments = cli._parser().parse_args([*fixed, *container["args"]])
    assert arguments.host == "0.0.0.0" and arguments.model == "/models"
    assert cli._parser().parse_args([*fixed, *words("CMD")]).model == "/models"
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + arguments.shutdown_timeout + 10


def test_every_mount_has_a_volume(pod):
    mounts = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
    assert sorted(mounts) == sorted(volume["name"] for volume in pod["volumes"])


def test_the_dockerfile_copies_what_there_is_and_installs_extras_there_are():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert named and all(extra in extras for group in named for extra in group.split(","))
    assert "USER 1000" in DOCKERFILE
    hosts = re.findall(r"https?://([\w.]+)", DOCKERFILE)
    assert set(hosts) <= {"127.0.0.1"}
