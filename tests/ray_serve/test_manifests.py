"""The manifests for Ray of examples/: by the schemas of Kubernetes and Ray Serve, and by headgate's own.

KubeRay's own schema comes with its operator and not as a package: `RayService` declares the fields used here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")

import kubernetes_validate
import yaml
from pydantic import BaseModel, ConfigDict, Field
from ray.serve.schema import RequestRouterConfig, ServeDeploySchema

from headgate_ray.gate import ray_config
from headgate_ray.router import HeadgateRouter

EXAMPLES = Path(__file__).parents[2] / "examples"
VERSION = "1.37"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Group(Part):
    rayStartParams: dict[str, str]  # noqa: N815
    template: dict


class WorkerGroup(Group):
    groupName: str  # noqa: N815
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)  # noqa: N815
    maxReplicas: int = Field(ge=0)  # noqa: N815


class Cluster(Part):
    rayVersion: str  # noqa: N815
    headGroupSpec: Group  # noqa: N815
    workerGroupSpecs: list[WorkerGroup]  # noqa: N815


class Spec(Part):
    serveConfigV2: str  # noqa: N815
    rayClusterConfig: Cluster  # noqa: N815


class RayService(Part):
    apiVersion: str = Field(pattern="^ray.io/v1$")  # noqa: N815
    kind: str = Field(pattern="^RayService$")
    metadata: dict[str, str]
    spec: Spec


def documents(name):
    return [*yaml.safe_load_all((EXAMPLES / name).read_text())]


def routers(config):
    """Every request_router_config in the arguments of a Serve configuration, checked."""
    found = []
    for app in ServeDeploySchema.model_validate(config).applications:
        pending = [app.args]
        while pending:
            here = pending.pop()
            if isinstance(here, dict) and "request_router_config" in here:
                found.append(RequestRouterConfig.model_validate(here["request_router_config"]))
            pending += here.values() if isinstance(here, dict) else here if isinstance(here, list) else []
    return found


def test_rayservice():
    (found,) = documents("kubernetes/rayservice.yaml")
    service = RayService.model_validate(found)
    cluster = service.spec.rayClusterConfig
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**named, "template": group.template}, VERSION, strict=True)
    (router,) = routers(yaml.safe_load(service.spec.serveConfigV2))
    assert router.get_request_router_class() is HeadgateRouter
    assert ray_config(router.request_router_kwargs).slots == 256


def test_the_application_of_the_documentation():
    """It is made as it stands there; docs/kubernetes.md says what it answered."""
    page = (EXAMPLES.parent / "docs" / "kubernetes.md").read_text("utf-8")
    made: dict = {"__name__": "page"}
    exec(page.split("```py\n")[1].split("```")[0], made)
    assert made["routing"].get_request_router_class() is HeadgateRouter
    assert made["Engine"].num_replicas == 8
    yaml_block = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["request_router_config"]
    assert ray_config(yaml_block["request_router_kwargs"]).slots == 256


def test_prefill_and_decode_have_routers_of_their_own():
    (found,) = documents("ray_llm_pd.yaml")
    made = routers(found)
    assert {each.request_router_class for each in made} == {"headgate_ray.router:HeadgateRouter"}
    named = {ray_config(each.request_router_kwargs).router.name for each in made}
    assert named == {"least-pending", "density-deep"}


@pytest.mark.parametrize("name", ["kubernetes/rayservice.yaml", "ray_llm_pd.yaml"])
def test_ray_serve_llm_takes_the_arguments(name):
    """Needs vLLM and pyarrow beside Ray (no GPU); skipped where they are not there."""
    pytest.importorskip("ray.serve.llm", reason="Ray Serve LLM imports vLLM and pyarrow; not installed")
    from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
    from ray.serve.llm import LLMServingArgs

    (found,) = documents(name)
    config = yaml.safe_load(found["spec"]["serveConfigV2"]) if "spec" in found else found
    (app,) = config["applications"]
    (PDServingArgs if "prefill_config" in app["args"] else LLMServingArgs).model_validate(app["args"])
