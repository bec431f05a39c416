"""Manifests of ``deploy/``: what Kubernetes' schemas cannot see, that they fit the commands and the images."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import shadowkv.cli
import shadowkv.ray.serve
import shadowkv.serve.__main__
from shadowkv.engine.config import EngineConfig
from shadowkv.serve.http.settings import ServerSettings

ROOT = Path(__file__).parents[2]
SERVERS = {
    "kubernetes.yaml": (shadowkv.serve.__main__, "server"),
    "kuberay.yaml": (shadowkv.ray.serve, "front"),
}
"""Files of ``deploy/``: the module whose command it runs, and the container that it runs in."""


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    [found] = [one for one in objects(name) if one["kind"] == kind]
    return found


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Specs of all its pods."""
    for one in objects(name):
        spec = one["spec"]
        for owner in (spec, spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", [])):
            if "template" in owner:
                yield owner["template"]["spec"]


@pytest.mark.parametrize("name", SERVERS)
def test_server(name: str) -> None:
    module: ModuleType
    module, container_name = SERVERS[name]
    deployment, service = of_kind(name, "Deployment"), of_kind(name, "Service")
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    assert container["name"] == container_name
    args = module.parse(container["args"])
    EngineConfig.from_args(args)  # raises where flags do not go together
    settings = ServerSettings.from_args(args)

    [port] = container["ports"]
    assert port["containerPort"] == args.port
    assert [one["targetPort"] for one in service["spec"]["ports"]] == [port["name"]]
    if name == "kubernetes.yaml":
        assert template["spec"]["restartPolicy"] == "Always"  # where its engine has died
    probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
    assert {"startupProbe", "readinessProbe"} <= probes.keys()
    assert all(one["httpGet"] == {"path": "/health", "port": port["name"]} for one in probes.values())
    assert (
        service["spec"]["selector"] == template["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    )
    assert template["spec"]["terminationGracePeriodSeconds"] > settings.shutdown_timeout


def test_commented_flag() -> None:
    """Two GPUs, as the comment says."""
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    [flag] = re.findall(r"# - (--tensor-parallel-size=\S+)", text)
    [container] = of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    args = [one for one in container["args"] if not one.startswith("--kv-")]
    config = EngineConfig.from_args(shadowkv.serve.__main__.parse([*args, flag]))
    assert config.tensor_parallel_size == 2


@pytest.mark.parametrize("name", SERVERS)
def test_volumes_and_users(name: str) -> None:
    claims = {one["metadata"]["name"] for one in objects(name) if one["kind"] == "PersistentVolumeClaim"}
    claimed = set()
    users = re.findall(r"--uid (\d+)", (ROOT / "docker" / "Dockerfile.cuda").read_text())
    for pod in pods(name):
        mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        claimed |= {
            one["persistentVolumeClaim"]["claimName"] for one in pod.get("volumes", []) if "emptyDir" not in one
        }
        assert [str(pod["securityContext"][key]) for key in ("runAsUser", "fsGroup")] == users * 2
    assert claimed == claims


@pytest.mark.parametrize("name", SERVERS)
def test_where_engines_run(name: str) -> None:
    """Pods with a GPU have the directory of segments, and a home whose cache is a volume."""
    [container] = of_kind(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    directory = SERVERS[name][0].parse(container["args"]).kv_disk_dir
    containers = [one for pod in pods(name) for one in pod["containers"]]
    [engine] = [one for one in containers if "nvidia.com/gpu" in one["resources"]["limits"]]
    paths = {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert {str(directory), "/home/shadowkv/.cache"} <= paths


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_image(name: str) -> None:
    """What it is built of is there, and its command, and the one of its comment, are the server's."""
    text = (ROOT / "docker" / name).read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert source.startswith("--from=") or ((ROOT / source).exists() and source not in ignored)
    needed = "LICENSE README.md constraints.txt csrc eval models pyproject.toml setup.py shadowkv"
    assert not set(needed.split()) & set(ignored)
    [extras] = re.findall(
        r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    asked = {extra for some in re.findall(r"EXTRAS=(\S+)", text) for extra in some.split(",")}
    assert asked and asked <= set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    [command] = re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)
    program, subcommand, *flags = json.loads(command)
    assert (program, subcommand in shadowkv.cli.COMMANDS) == ("shadowkv", True)
    comment = re.sub(r"\\\n#", "", text)
    [example] = re.findall(r"^# +docker run .* shadowkv:\w+ +(.*)", comment, re.MULTILINE)
    args = shadowkv.serve.__main__.parse([*flags, *example.split()])
    EngineConfig.from_args(args)
    ports = re.findall(r"EXPOSE (\d+)|//localhost:(\d+)/health|-p (\d+):(\d+)", text)
    assert {port for found in ports for port in found if port} == {str(args.port)} and len(ports) == 3


def test_ray_cluster() -> None:
    """The front asks for the workers that there are, of their size, by Ray's version and the operator's name."""
    cluster = of_kind("kuberay.yaml", "RayCluster")
    [front] = of_kind("kuberay.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    args = shadowkv.ray.serve.parse(front["args"])
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["replicas"] == args.replicas
    assert group["rayStartParams"] == {"num-cpus": str(args.cpus_per_replica), "num-gpus": "1"}
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    addresses = [one["value"] for one in front["env"] if one["name"] == "RAY_ADDRESS"]
    assert addresses == [f"{cluster['metadata']['name']}-head-svc:6379"]
