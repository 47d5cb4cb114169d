"""A gateway of several ModelServices: its file of models, its pods, and what its status says."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from millrace.core.config import load_config
from millrace.core.config.models import Canary, ModelConfig, read_models_file
from millrace_operator.observed import ObservedService
from millrace_operator.reconcile.actions import Apply, Report, SetStatus
from millrace_operator.reconcile.conditions import by_type
from millrace_operator.reconcile.service import reconcile_service
from millrace_operator.spec import parse_service
from support.custom_resources import DEFAULTS, model_service

NEXT = model_service(
    "next",
    model={"name": "chat-next", "uri": "/models/next", "maxContextTokens": 8192},
    weights={"persistentVolumeClaim": {"claimName": "next-weights"}},
    settings={"proxy.tool_parser": "hermes", "scheduler.policy": "fcfs"},
)
HUB = model_service("hub", model={"name": "qwen", "uri": "Qwen/Qwen2.5-7B-Instruct"})
GATEWAY = {
    "aliases": ["gpt-4o-mini"],
    "canary": {"service": "next", "percent": 5},
    "models": [{"service": "next"}, {"service": "hub", "aliases": ["big", "bigger"]}],
}


def actions(*others: dict[str, Any], **gateway: Any) -> list[Any]:
    own = parse_service(model_service(gateway=gateway))
    listed = {one["metadata"]["name"]: one for one in others}
    return reconcile_service(own, ObservedService(listed=listed, now_s=1e4), DEFAULTS)


def made(found: list[Any], kind: str, name: str) -> dict[str, Any]:
    manifests = [action.manifest for action in found if isinstance(action, Apply)]
    return next(m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))


def models(found: list[Any]) -> list[ModelConfig]:
    text = made(found, "ConfigMap", "chat-config")["data"]["models.toml"]
    return read_models_file(text, load_config())


def problem(found: list[Any]) -> str:
    [status] = [action.status for action in found if isinstance(action, SetStatus)]
    reports = [action for action in found if isinstance(action, Report)]
    degraded = by_type(status)["Degraded"]
    assert [report.message for report in reports] == (
        [degraded["message"]] if degraded["status"] == "True" else []
    )
    return degraded["message"]


def test_the_file_lists_every_model_with_its_fleet_names_and_settings():
    found = actions(NEXT, HUB, **GATEWAY)
    assert problem(found) == ""
    own, following, hub = models(found)
    assert own == ModelConfig(
        name="chat",
        model="/models/chat",
        scheduler="chat-scheduler:7070",
        aliases=("gpt-4o-mini",),
        canary=Canary(model="chat-next", percent=5.0),
    )
    assert (following.model, following.scheduler) == ("/others/next/next", "next-scheduler:7070")
    config = following.config(load_config())
    assert config.proxy.tool_parser == "hermes"
    assert (config.engine.max_context_tokens, config.proxy.park_timeout_s) == (8192, 300)
    assert (hub.name, hub.model) == ("qwen", "Qwen/Qwen2.5-7B-Instruct")
    assert hub.aliases == ("big", "bigger")


def test_the_gateways_pods_read_the_file_and_every_models_folder():
    deployment = made(actions(NEXT, HUB, **GATEWAY), "Deployment", "chat-proxy")
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert "proxy.models_file=/etc/millrace-models/models.toml" in container["args"]
    assert "--model" not in container["args"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts["models"] == "/etc/millrace-models"
    assert mounts["weights-next"] == "/others/next"
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod["volumes"]}
    assert claims["weights-next"] == {"claimName": "next-weights", "readOnly": True}


def test_another_model_from_a_hub_does_not_restart_the_pods():
    """The proxy follows the file: a ConfigMap changes, the pod's template does not."""
    one = actions(NEXT, models=[{"service": "next"}])
    two = actions(NEXT, HUB, models=[{"service": "next"}, {"service": "hub"}])
    deployments = [made(found, "Deployment", "chat-proxy") for found in (one, two)]
    assert deployments[0] == deployments[1]
    assert len(models(one)) + 1 == len(models(two)) == 3


def test_a_gateway_of_one_model_names_it_in_its_arguments():
    found = actions()
    assert "models.toml" not in made(found, "ConfigMap", "chat-config")["data"]
    container = made(found, "Deployment", "chat-proxy")["spec"]["template"]["spec"]["containers"][0]
    assert "--model" in container["args"]


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([], "models[0].service is 'next'; there is no such ModelService"),
        (
            [model_service("next", redis={"secretRef": {"name": "elsewhere"}})],
            "models[0].service is 'next', whose spec.redis differs",
        ),
        (
            [model_service("next", settings={"proxy.port": "1"})],
            "models[0].service is 'next', whose spec is wrong: spec.settings[proxy.port]",
        ),
    ],
)
def test_a_service_that_can_t_be_served_is_named_and_the_others_go_on(others, named):
    found = actions(*others, HUB, **GATEWAY)
    assert named in problem(found)
    own, hub = models(found)
    assert (own.name, own.canary, hub.name) == ("chat", None, "qwen")


def test_two_services_of_one_name_change_nothing():
    found = actions(model_service("next"), models=[{"service": "next"}])
    assert "has two services of the model 'chat'" in problem(found)
    assert not [action for action in found if isinstance(action, Apply)]
