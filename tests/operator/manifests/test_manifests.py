"""The applied objects: every object is valid, and Millrace reads its content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from millrace.core.config import AuthConfig, TenantConfig, load_config
from millrace.core.config.tenants import Access
from millrace.core.limits.rules import Limits
from millrace.core.request import Slo
from millrace_operator.manifests import instances, objects, pods
from millrace_operator.manifests.config_file import digest_for, text
from millrace_operator.manifests.naming import TEMPLATE_LABEL, owner
from millrace_operator.manifests.pods import Context
from millrace_operator.spec import Defaults, SpecError, parse_pool, parse_service
from support.custom_resources import DEFAULTS, SCHEMAS, defaulted, model_service, pool
from support.pod_arguments import read_arguments
from support.pool_scene import pool_objects

DOCKERFILE = Path(__file__).parents[3] / "services" / "Dockerfile"

EVERYTHING: dict[str, Any] = {
    "model": {"name": "m", "uri": "/models/m", "revision": "2", "maxContextTokens": 65536},
    "weights": {"persistentVolumeClaim": {"claimName": "weights", "subPath": "m"}},
    "sloClasses": [
        {"name": "chat", "ttftSeconds": "0.5", "tbtMilliseconds": 50, "e2eSeconds": "9"},
        {"name": "a b", "weight": 2},
    ],
    "tenants": [
        {
            "name": "acme",
            "keySha256": ["0a" * 32],
            "weight": 3,
            "models": ["llama"],
            "sloClasses": ["chat", "a b"],
            "limits": {"requestsPerMinute": 60, "tokensPerDay": 10**9, "concurrency": 4},
        }
    ],
    "settings": {"engine.max_batch": "32", "proxy.max_inflight": "99"},
    "scheduling": {"policy": "lars", "planner": "cdsp"},
    "redis": {"secretRef": {"name": "redis"}},
    "tls": {"secretName": "certificates"},
    "gateway": {
        "replicas": 3,
        "adminTokenSecretRef": {"name": "admin"},
        "files": {"claimName": "batch-files"},
        "keys": {"required": True, "secretRef": {"name": "api-keys", "key": "k.toml"}},
        "template": {"spec": {"tolerations": [{"key": "spot", "operator": "Exists"}]}},
    },
    "scheduler": {"template": {"spec": {"priorityClassName": "high"}}},
    "prefill": {"replicas": 3, "gpus": 4},
    "decode": {"gpus": 0, "stages": 2},
    "kvp": {"gpuResource": "amd.com/gpu"},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "claim": {"persistentVolumeClaim": {"claimName": "weights"}},
    "host": {"hostPath": {"path": "/data"}},
    "image": {"image": {"reference": "registry.example/llama:1"}},
    "hub": {"hub": {"secretRef": {"name": "hub"}, "cache": {"sizeLimit": "80Gi"}}},
}


MIXED: dict[str, Any] = {"prefill": None, "decode": {"role": "mixed", "stages": 2, "gpus": 0}}


def context_of(defaults: Defaults = DEFAULTS, **spec: Any) -> Context:
    return Context.of(parse_service(model_service(**spec)), defaults)


def all_objects(**spec: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns all objects of a service and its pools, by kind and name."""
    context = context_of(**spec)
    found = objects.of_service(context)
    for manifest in list(found):
        if manifest["kind"] in SCHEMAS:
            child = defaulted(SCHEMAS[manifest["kind"]], manifest)
            child["metadata"]["uid"] = "u"
            parsed = parse_pool(child)
            found += pool_objects(parsed, context, 2)
    return {(m["kind"], m["metadata"]["name"]): m for m in found}


def main(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "spec",
    [{}, EVERYTHING, MIXED, *({"weights": w} for w in WEIGHTS.values())],
    ids=["minimal", "everything", "mixed", *WEIGHTS],
)
def test_every_object_is_valid(spec):
    found = all_objects(**spec)
    for (kind, _), manifest in found.items():
        if kind in SCHEMAS:
            continue
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert len(found) == (19 if "kvp" in spec else 11 if spec is MIXED else 15)


def test_the_services_read_their_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(all_objects(**EVERYTHING)["ConfigMap", "chat-config"]["data"]["config.toml"])
    config = load_config(file)
    assert config.slo_classes["chat"] == Slo(ttft_s=0.5, tbt_s=0.05, e2e_s=9.0, class_name="chat")
    assert config.slo_classes["a b"] == Slo(class_name="a b")
    access = Access(
        models=("llama",),
        slo_classes=("chat", "a b"),
        limits=Limits(requests_per_minute=60, tokens_per_day=10**9, concurrency=4),
    )
    acme = TenantConfig(key_sha256=("0a" * 32,), weight=3.0, access=access)
    assert config.tenants == {"acme": acme}
    keys_file = "/etc/millrace-keys/keys.toml"
    assert config.auth == AuthConfig(require_key="on", keys_file=keys_file)
    assert config.weights.classes == {"default": 1.0, "chat": 1.0, "a b": 2.0}
    assert config.weights.tenants == {"default": 1.0, "acme": 3.0}
    assert (config.scheduler.policy, config.scheduler.planner) == ("lars", "cdsp")
    assert config.scheduler.max_kv_tokens_per_worker == 262_144
    assert config.scheduler.max_kvp_degree == 17  # the KV owner, too
    assert (config.engine.max_batch, config.engine.max_context_tokens) == (32, 65536)
    assert (config.proxy.max_inflight, config.proxy.default_ttft_slo_ms) == (99, 10_000)
    assert (config.proxy.park_timeout_s, config.proxy.max_parked) == (300, 1024)
    assert config.files.url == "/files"
    assert config.telemetry.metrics_port == 9090
    assert config.tls.key_file == "/etc/millrace/tls/tls.key"


@pytest.mark.parametrize(
    ("files", "url", "claims"),
    [
        ({}, "none", []),
        ({"url": "s3://bucket/folder"}, "s3://bucket/folder", []),
        ({"claimName": "batch-files"}, "/files", ["batch-files"]),
    ],
)
def test_the_gateway_has_its_files(tmp_path, files, url, claims):
    found = all_objects(gateway={"files": files})
    file = tmp_path / "config.toml"
    file.write_text(found["ConfigMap", "chat-config"]["data"]["config.toml"])
    assert load_config(file).files.url == url
    pod = found["Deployment", "chat-proxy"]["spec"]["template"]["spec"]
    volumes = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert list(volumes.values()) == claims
    assert "files.group=llm/chat" in pod["containers"][0]["args"]
    mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
    assert all(mounts[name] == {"name": name, "mountPath": "/files"} for name in volumes)
    # A new volume belongs to root, and the gateway writes as another user.
    assert pod["securityContext"].get("fsGroup") == (65532 if claims else None)
    assert f"USER {pods.USER}:{pods.USER}\n" in DOCKERFILE.read_text()


def test_keys_that_nobody_has_are_not_required():
    keys = {"required": True}
    with pytest.raises(SpecError, match=r"keys\.required is true, but nobody has a key"):
        all_objects(gateway={"keys": keys})
    assert all_objects(gateway={"keys": keys}, settings={"auth.stored_keys": "on"})
    assert all_objects(
        gateway={"keys": keys}, tenants=EVERYTHING["tenants"], sloClasses=EVERYTHING["sloClasses"]
    )
    assert all_objects(gateway={"keys": {**keys, "secretRef": {"name": "api-keys"}}})


def test_the_file_of_keys_is_mounted_in_the_gateway_alone():
    mounts = {}
    for (kind, name), manifest in all_objects(**EVERYTHING).items():
        if kind in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]["spec"]
            mounts[name] = {m["mountPath"]: m for m in main(manifest)["volumeMounts"]}
            if "/etc/millrace-keys" in mounts[name]:
                [volume] = [v for v in pod["volumes"] if v["name"] == "keys"]
                items = [{"key": "k.toml", "path": "keys.toml"}]
                secret = {"name": "api-keys", "items": items}
                assert volume["projected"] == {"sources": [{"secret": secret}]}
    having = [name for name, found in mounts.items() if "/etc/millrace-keys" in found]
    assert having == ["chat-proxy"]


def test_the_file_takes_any_text(tmp_path):
    strange = 'a"b\\c\n\t\x7fé😀]'
    file = tmp_path / "config.toml"
    file.write_text(
        text({"store": {"key_prefix": strange}, "slo_classes": {strange: {"ttft_s": 1.0}}}),
        encoding="utf-8",
    )
    config = load_config(file)
    assert config.store.key_prefix == strange
    assert config.slo_classes[strange].ttft_s == 1.0


@pytest.mark.parametrize(
    "kind, name",
    [
        ("Deployment", "chat-scheduler"),
        ("Deployment", "chat-proxy"),
        ("StatefulSet", "chat-prefill"),
        ("StatefulSet", "chat-decode"),
    ],
)
def test_the_command_line_is_millraces(kind, name, tmp_path):
    command, given = read_arguments(main(all_objects(**EVERYTHING)[kind, name])["args"], tmp_path)
    if command != "scheduler":
        assert (given["model"], given["model_name"]) == ("/models/m", "m")
        assert given["scheduler"] == "chat-scheduler:7070"
    if command in ("prefill", "decode"):
        assert (given["instance_id"], given["host"]) == ("$(POD_NAME)", "$(POD_IP)")
        assert (given["port"], given["drain_timeout_s"]) == (7071, 600)
        assert given["stages"] == (2 if command == "decode" else None)


def test_mixed_instances_have_a_decode_pools_pods_and_a_command_of_their_own(tmp_path):
    mixed, decode = (
        all_objects(prefill=prefill, decode={"role": role, "stages": 2, "gpus": 0})
        for prefill, role in ((None, "mixed"), ({}, "decode"))
    )
    assert not [name for kind, name in mixed if "prefill" in name or kind == "PrefillGroup"]
    assert mixed["DecodePool", "chat-decode"]["spec"]["role"] == "mixed"
    arguments = main(mixed["StatefulSet", "chat-decode"])["args"]
    command, given = read_arguments(arguments, tmp_path)
    assert command == "colocated"
    assert (given["role"], given["stages"], given["drain_timeout_s"]) == ("mixed", 2, 600)
    assert (given["instance_id"], given["scheduler"]) == ("$(POD_NAME)", "chat-scheduler:7070")
    assert arguments[3:] == main(decode["StatefulSet", "chat-decode"])["args"][1:]
    # All else equals a decode instance's pod: image, labels of policies and budgets.
    pods = [found["StatefulSet", "chat-decode"]["spec"]["template"] for found in (mixed, decode)]
    for pod in pods:
        del pod["spec"]["containers"][0]["args"], pod["metadata"]["labels"][TEMPLATE_LABEL]
    assert pods[0] == pods[1]


def test_pods_are_restricted():
    for (kind, _), manifest in all_objects(**EVERYTHING).items():
        if kind not in ("Deployment", "StatefulSet"):
            continue
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        allowed = {"projected", "emptyDir", "persistentVolumeClaim"}
        assert all(allowed & v.keys() for v in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounted = {m["mountPath"] for m in container["volumeMounts"]}
            assert {"/tmp", "/cache"} <= mounted
            # The pool's status shows why a container ended.
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_selectors_read_only_what_never_changes():
    for (kind, _), manifest in all_objects(**EVERYTHING).items():
        if kind in ("Deployment", "StatefulSet"):
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            selector = manifest["spec"]["selector"]["matchLabels"]
            assert selector.items() <= labels.items()
            assert not {"millrace.dev/template", "millrace.dev/revision"} & selector.keys()


def test_devices():
    found = all_objects(**EVERYTHING)
    assert main(found["StatefulSet", "chat-prefill"])["resources"] == {
        "limits": {"nvidia.com/gpu": "4"}
    }
    assert "resources" not in main(found["StatefulSet", "chat-decode"])
    assert main(found["StatefulSet", "chat-kvp"])["resources"] == {"limits": {"amd.com/gpu": "1"}}


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def test_secrets_come_as_references():
    found = all_objects(
        **EVERYTHING,
    )
    gateway = environment(main(found["Deployment", "chat-proxy"]))
    redis = {"secretKeyRef": {"name": "redis", "key": "url"}}
    assert gateway["MILLRACE_STORE__URL"] == redis
    assert gateway["MILLRACE_PROXY__ADMIN_TOKEN"] == {
        "secretKeyRef": {"name": "admin", "key": "token"}
    }
    ranks = all_objects(prefill={"tensorParallel": 4, "gpus": 0})["StatefulSet", "chat-prefill"]
    assert environment(main(ranks))["MILLRACE_ENGINE__TENSOR_PARALLEL"] == "4"
    assert "resources" not in main(ranks)
    stages = all_objects(decode={"stages": 3, "tensorParallel": 2})["StatefulSet", "chat-decode"]
    assert main(stages)["resources"] == {"limits": {"nvidia.com/gpu": "6"}}
    hub = environment(main(all_objects(weights=WEIGHTS["hub"])["StatefulSet", "chat-decode"]))
    assert hub["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize("on_timeout, grace_s", [("Migrate", 160), ("Abort", 160), ("Wait", 86460)])
def test_kubernetes_waits_longer_than_the_instance_drains(on_timeout, grace_s):
    drain = {"timeoutSeconds": 100, "onTimeout": on_timeout}
    manifest = all_objects(decode={"drain": drain})["StatefulSet", "chat-decode"]
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == grace_s
    arguments = main(manifest)["args"]
    assert arguments[arguments.index("--drain-timeout-s") + 1] == str(grace_s - 60)


def test_budgets():
    found = all_objects(gateway={"replicas": 1})
    assert found["PodDisruptionBudget", "chat-proxy"]["spec"]["minAvailable"] == 0
    for name in ("chat-scheduler", "chat-prefill", "chat-decode"):
        budget = found["PodDisruptionBudget", name]["spec"]
        assert budget["maxUnavailable"] == 1
        kind = "Deployment" if name == "chat-scheduler" else "StatefulSet"
        assert budget["selector"] == found[kind, name]["spec"]["selector"]


def test_a_pool_has_no_replicas_of_the_operators():
    found = all_objects(prefill={"replicas": 3})
    assert "replicas" not in found["PrefillGroup", "chat-prefill"]["spec"]
    assert found["PrefillGroup", "chat-prefill"]["metadata"]["annotations"] == {
        "millrace.dev/initial-replicas": "3",
        "millrace.dev/applied": found["PrefillGroup", "chat-prefill"]["metadata"]["annotations"][
            "millrace.dev/applied"
        ],
    }


def test_children_go_with_their_owner():
    for (kind, name), manifest in all_objects().items():
        (reference,) = manifest["metadata"]["ownerReferences"]
        assert reference["controller"], (kind, name)
    assert owner(parse_service(model_service()))["blockOwnerDeletion"] is False


# ---- changes that make pods new


def template_of(child: dict[str, Any], **spec: Any) -> str:
    made = instances.instance(parse_pool(child), context_of(**spec))
    return made["metadata"]["labels"][TEMPLATE_LABEL]


def revision_of(**spec: Any) -> str:
    return context_of(**spec).revision


def test_the_template_changes_with_what_a_pod_reads_and_with_nothing_else():
    child = pool()
    before = template_of(child)
    assert template_of(pool(replicas=7)) == before
    assert template_of(child, slo={"ttftSeconds": "3"}) == before  # the gateway's
    assert template_of(child, scheduling={"policy": "fcfs"}) == before  # the scheduler's
    assert template_of(pool(autoscaling={"maxReplicas": 3})) == before
    assert template_of(child, settings={"engine.max_batch": "3"}) != before
    assert template_of(pool(template={"spec": {"nodeSelector": {"a": "b"}}})) != before
    turned = {"nodeSelector": {"b": "2", "a": "1"}}, {"nodeSelector": {"a": "1", "b": "2"}}
    assert len({template_of(pool(template={"spec": spec})) for spec in turned}) == 1


def test_mixed_pods_start_anew_for_the_settings_of_their_batches():
    child = pool(role="mixed")
    before = template_of(child)
    assert before != template_of(pool())
    assert template_of(child, settings={"mixed.t_target_ms": "9"}) != before
    assert template_of(child, scheduling={"policy": "fcfs"}) == before  # sent by the scheduler
    assert template_of(pool(), settings={"mixed.t_target_ms": "9"}) == template_of(pool())


def test_the_revision_changes_with_what_makes_kv():
    before = revision_of()
    model = {"name": "chat", "uri": "/models/chat"}
    assert revision_of(model=model | {"revision": "2"}) != before
    assert revision_of(model=model | {"uri": "/models/other"}) != before
    assert revision_of(model=model | {"maxContextTokens": 4096}) != before
    assert revision_of(settings={"engine.dtype": "bfloat16"}) != before
    assert revision_of(settings={"engine.max_batch": "3"}) == before


@pytest.mark.parametrize(
    "role, sections",
    [
        ("proxy", {"proxy.max_inflight": True, "engine.max_batch": False}),
        ("scheduler", {"scheduler.max_attempts": True, "proxy.max_inflight": False}),
        ("decode", {"engine.max_batch": True, "scheduler.max_attempts": False}),
        ("decode", {"scheduler.decode_headroom_tokens": True, "mixed.t_target_ms": False}),
        ("mixed", {"mixed.t_target_ms": True, "scheduler.max_attempts": False}),
        ("mixed", {"engine.max_batch": True, "scheduler.lease_s": True}),
        ("kvp", {"transfer.lease_s": True, "mixed.t_target_ms": False}),
        ("prefill", {"scheduler.lease_s": True, "telemetry.log_level": True}),
    ],
)
def test_a_role_starts_anew_for_what_it_reads(role, sections):
    values = {"telemetry.log_level": "debug"}
    before = digest_for(role, context_of().tables)
    for path, read in sections.items():
        changed = context_of(settings={path: values.get(path, "9")})
        assert (digest_for(role, changed.tables) != before) == read, path


def test_a_scheduler_starts_again_for_weights_and_names_and_not_for_keys_or_objectives():
    def digest(role, **spec):
        return digest_for(role, context_of(**spec).tables)

    tenant, chat = {"name": "a", "keySha256": ["0" * 64]}, {"name": "chat", "ttftSeconds": "1"}
    before = {
        role: digest(role, tenants=[tenant], sloClasses=[chat]) for role in ("scheduler", "proxy")
    }
    for spec, restarts in (
        ({"tenants": [{**tenant, "keySha256": ["1" * 64]}], "sloClasses": [chat]}, False),
        ({"tenants": [tenant], "sloClasses": [{**chat, "ttftSeconds": "2"}]}, False),
        ({"tenants": [{**tenant, "weight": 2}], "sloClasses": [chat]}, True),
        ({"tenants": [tenant], "sloClasses": [{**chat, "weight": 2}]}, True),
        ({"sloClasses": [chat]}, True),
    ):
        assert (digest("scheduler", **spec) != before["scheduler"]) == restarts
        assert digest("proxy", **spec) != before["proxy"]


# ---- errors that no server can check


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"settings": {"engine.max_batch": "none"}}, "engine.max_batch is 'none'"),
        ({"settings": {"engine.colour": "red"}}, "unknown field engine.colour"),
        ({"settings": {"colour": "red"}}, "write it as section.field"),
        ({"settings": {"slo_classes.a": "1"}}, "spec.sloClasses sets it"),
        ({"settings": {"tenants.a": "1"}}, "spec.tenants sets it"),
        ({"settings": {"auth.require_key": "on"}}, "spec.gateway.keys.required sets it"),
        (
            {"tenants": [{"name": "a", "keySha256": ["0" * 64], "sloClasses": ["x"]}]},
            "spec.tenants.a.slo_classes has 'x'; there are batch, default",
        ),
        (
            {"tenants": [{"name": n, "keySha256": ["0" * 64]} for n in "ab"]},
            r"spec.tenants.b.key_sha256 has 0+, which tenants.a has, too",
        ),
        ({"settings": {"store.url": "redis://x"}}, r"settings\[store.url\] is 'redis://x'; spec"),
        (
            {"sloClasses": [{"name": "c", "ttftSeconds": "0"}]},
            r"sloClasses\[c\].ttftSeconds is '0'",
        ),
        ({"scheduler": {"template": {"spec": []}}}, r"template.spec is \[\]; it must be a mapping"),
        (
            {"gateway": {"template": {"spec": {"volumes": "x"}}}},
            "volumes is 'x'; it must be a list",
        ),
        ({"gateway": {"template": {"spec": {"containers": [{}]}}}}, r"containers\[0\] has no name"),
    ],
)
def test_errors_name_the_field(spec, message):
    with pytest.raises(SpecError, match=message):
        objects.of_service(context_of(**spec))


def url_key(template: dict[str, Any]) -> str:
    """The key of the Secret that the pod's store.url comes from."""
    environment = template["spec"]["containers"][0]["env"]
    (found,) = [one for one in environment if one["name"] == "MILLRACE_STORE__URL"]
    return found["valueFrom"]["secretKeyRef"]["key"]


def test_each_service_has_its_own_user_of_redis_if_asked():
    own = {"redis": {"secretRef": {"name": "r", "key": "address", "perService": True}}}
    for context, stem in (
        (context_of(**own), "address"),
        (context_of(replace(DEFAULTS, redis_per_service=True)), "url"),
    ):
        assert url_key(pods.scheduler(context)) == f"{stem}-scheduler"
        assert url_key(pods.gateway(context)) == f"{stem}-proxy"
        for kind, role in (("PrefillGroup", "prefill"), ("DecodePool", "decode")):
            made = instances.instance(parse_pool(pool(kind)), context)
            assert url_key(made) == f"{stem}-{role}"
    assert url_key(pods.scheduler(context_of())) == "url"


def test_a_service_that_names_no_certificates_uses_those_of_the_release():
    by_release = replace(DEFAULTS, tls_secret="millrace-tls")
    for context, wanted in (
        (context_of(), None),
        (context_of(by_release), "millrace-tls"),
        (context_of(by_release, tls={"secretName": "own"}), "own"),
    ):
        pod = pods.scheduler(context)["spec"]
        (config,) = [one for one in pod["volumes"] if one["name"] == "config"]
        sources = config["projected"]["sources"]
        secrets = [one["secret"]["name"] for one in sources if "secret" in one]
        assert secrets == ([] if wanted is None else [wanted])
        assert context.config.tls.enabled == (wanted is not None)


def test_without_redis_or_images_nothing_is_made():
    with pytest.raises(SpecError, match=r"spec\.redis is missing"):
        objects.of_service(context_of(Defaults(images={"scheduler": "x"})))
    with pytest.raises(SpecError, match="container millrace of scheduler has no image"):
        defaults = Defaults(images={}, redis_secret="redis")
        objects.of_service(context_of(defaults))
