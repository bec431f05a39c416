"""Manifests of ``deploy/``: what Kubernetes' schemas cannot see, that they fit the commands and the images."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from render_chart import CHART, RENDERED, digest, rendered

import shadowkv
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

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs Helm")
SEVERAL = ["cache.accessMode=ReadWriteMany", "segments.accessMode=ReadWriteMany"]


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
    selector = service["spec"]["selector"]
    assert selector == deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert template["spec"]["terminationGracePeriodSeconds"] > settings.shutdown_timeout + pause


def test_commented_flag() -> None:
    """Two GPUs, as the comment says."""
    comment = RENDERED.read_text().partition("# For two GPUs: ")[2].partition(".\n")[0]
    [flag] = re.findall(r"--[a-z-]+(?:=\d+)?", comment)
    [container] = of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    config = EngineConfig.from_args(shadowkv.serve.__main__.parse([*container["args"], flag]))
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


def test_the_manifest_is_the_chart_of_this_version() -> None:
    assert f" of the chart {digest()}." in RENDERED.read_text(), "run python scripts/render_chart.py"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == shadowkv.__version__


def test_the_schema_knows_every_value_of_the_chart() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any]) -> None:
        schema = next((one for one in schema.get("anyOf", []) if one.get("type") == "object"), schema)
        if "properties" in schema:
            assert schema["additionalProperties"] is False
            assert values.keys() == schema["properties"].keys() - {"global"}
            for name, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema["properties"][name])

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text()))


def test_flags_of_the_chart_are_no_values_of_their_own() -> None:
    """What templates set is refused among ``flags``, and is a flag of the server."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = {*schema["properties"]["flags"]["propertyNames"]["not"]["enum"]}
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert {*re.findall(r"--([a-z-]+)=", helpers)} == refused - {"host", "api-key"}
    told = re.findall(r"of their own are refused: (.*?)\.\n", (CHART / "values.yaml").read_text(), re.DOTALL)
    assert [{*re.findall(r"[a-z][a-z-]+", one)} for one in told] == [refused]


def helm(*values: str) -> list[dict[str, Any]]:
    """What the chart makes with these values; raises subprocess.CalledProcessError where it refuses them."""
    command = ["helm", "template", "shadowkv", str(CHART), *(f"--set={value}" for value in values)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@needs_helm
def test_the_manifest_is_what_helm_makes() -> None:
    assert RENDERED.read_text() == rendered()
    subprocess.run(["helm", "lint", "--strict", str(CHART)], check=True, capture_output=True)


@needs_helm
@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        (["gpus=2"], "tensor_parallel_size", 2),
        (["gpus=0"], "tensor_parallel_size", 1),
        (["gpus=2", "flags.data-parallel-size=2"], "data_parallel_size", 2),
        (["gpus=4", "flags.data-parallel-size=2"], "tensor_parallel_size", 2),
        (["gpus=2", "flags.data-parallel-size=null"], "data_parallel_size", 1),
        (["flags.enforce-eager=true"], "enforce_eager", True),
        (["flags.max-model-len=1000000"], "max_model_len", 1_000_000),
        (["flags.gpu-memory-utilization=0.95"], "gpu_memory_utilization", 0.95),
        (
            ["flags.no-enable-prefix-caching=true", "segments=null", "flags.kv-offload-gib=null"],
            "enable_prefix_caching",
            False,
        ),
        (["flags.served-model-name={a,b}"], "served_model_name", ("a", "b")),
        (["segments.gib=2000000"], "kv_disk_gib", 2_000_000),
        (["model=/models/it's odd"], "model", "/models/it's odd"),
    ],
)
def test_values_become_flags(values: list[str], field: str, expected: object) -> None:
    [deployment] = [one for one in helm(*values) if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    args = shadowkv.serve.__main__.parse(container["args"])
    EngineConfig.from_args(args)
    assert getattr(args, field) == expected
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 1)
    assert gpus == args.tensor_parallel_size * args.data_parallel_size


@needs_helm
def test_servers_that_come_and_go() -> None:
    switches = ["autoscaling", "serviceMonitor", "prometheusRule", "grafanaDashboard", "podDisruptionBudget"]
    made = {one["kind"]: one for one in helm(*SEVERAL, *(f"{one}.enabled=true" for one in switches))}
    deployment, service = made["Deployment"]["spec"], made["Service"]
    assert "replicas" not in deployment  # they are KEDA's
    assert deployment["strategy"]["type"] == "RollingUpdate"
    scaled = made["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == made["Deployment"]["metadata"]["name"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    assert queries[0] == 'avg(sum by (pod) (shadowkv:num_requests_waiting{namespace="default",service="shadowkv"}))'
    monitored = made["ServiceMonitor"]["spec"]
    assert monitored["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitored["jobLabel"]] == "shadowkv"
    assert {one["port"] for one in monitored["endpoints"]} == {one["name"] for one in service["spec"]["ports"]}
    assert made["PrometheusRule"]["spec"] == yaml.safe_load((CHART / "monitoring/alerts.yaml").read_text())
    assert [*made["ConfigMap"]["data"].values()] == [(CHART / "monitoring/dashboard.json").read_text()]
    assert made["PodDisruptionBudget"]["spec"]["selector"] == deployment["selector"]
    assert not {"ScaledObject", "ServiceMonitor", "PrometheusRule", "ConfigMap"} & {one["kind"] for one in helm()}


@needs_helm
def test_a_secret_of_the_chart() -> None:
    made = {one["kind"]: one for one in helm("secret.create=true", "secret.apiKeys={one,two}", "secret.name=mine")}
    assert made["Secret"]["stringData"] == {"api-keys": "one\ntwo"}
    [container] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    asked = {one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"]}
    assert asked == {made["Secret"]["metadata"]["name"]} == {"mine"}


@needs_helm
@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        (["replicas=2"], "several servers need ReadWriteMany"),
        (["autoscaling.enabled=true", SEVERAL[0]], "segments.accessMode=ReadWriteOnce"),
        ([*SEVERAL, "autoscaling.enabled=true", "autoscaling.minReplicas=9"], "is more than maxReplicas=4"),
        (["secret.create=true"], "without keys the server would answer anybody"),
        (["replica=2"], "additional properties 'replica' not allowed"),
        (["flags.port=80"], "invalid propertyName 'port'"),
        (["flags.enable-prefix-caching=false"], "/flags/enable-prefix-caching"),  # it is no-enable-prefix-caching=true
        (["model="], "/model"),
        (["gpus=3", "flags.data-parallel-size=2"], "gpus=3 must be a multiple of flags.data-parallel-size=2"),
        (["flags.data-parallel-size=2"], "gpus=1 must be a multiple of flags.data-parallel-size=2"),
        (["flags.data-parallel-size=0"], "flags.data-parallel-size=0 must be a whole number of engines, at least 1"),
        (["flags.data-parallel-size=1.5"], "flags.data-parallel-size=1.5 must be a whole number of engines"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: list[str], refusal: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        helm(*values)
    assert refusal in refused.value.stderr


def test_unit() -> None:
    """The unit's command, its configuration, and what it does when the server ends."""
    text = (ROOT / "deploy/systemd/shadowkv.service").read_text()
    entries = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    program, subcommand, flag, config = entries["ExecStart"].split()
    assert (Path(program).name, flag) == ("shadowkv", "--config") and subcommand in shadowkv.cli.COMMANDS
    assert f" deploy/systemd/serve.yaml {config}\n" in text and f" {entries['EnvironmentFile']} " in text
    args = shadowkv.serve.__main__.parse([flag, str(ROOT / "deploy/systemd/serve.yaml")])
    EngineConfig.from_args(args)
    assert int(entries["TimeoutStopSec"]) > ServerSettings.from_args(args).shutdown_timeout
    statuses = (ROOT / "docs/serving.md").read_text()
    [signals] = re.findall(r"^\| ([\d, ]+) \| SIGINT", statuses, re.MULTILINE)
    assert {*entries["SuccessExitStatus"].split()} == {*signals.split(", ")}
    home = f"/var/lib/{entries['StateDirectory']}"
    assert entries["Environment"] == f"HOME={home}" and args.kv_disk_dir.startswith(f"{home}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_by_systemd_own_tool(tmp_path: Path) -> None:
    text = (ROOT / "deploy/systemd/shadowkv.service").read_text()
    unit = tmp_path / "shadowkv.service"
    unit.write_text(re.sub(r"(?<=^ExecStart=)\S+", "/bin/true", text, flags=re.MULTILINE))  # it has to be there
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
