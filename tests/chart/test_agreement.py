"""The chart, the operator and the images use the same names."""

import functools
import json
import subprocess
import sys
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer

import kubernetes_validate
import pytest
import typer

from millrace.core.config import TlsConfig
from millrace_operator.environment import defaults_from
from millrace_operator.main import app
from millrace_operator.manifests import config_file, naming, objects, pods
from millrace_operator.spec import parse_pool, parse_service
from support.chart import NEWEST, PROFILES, ROOT, Object, find, profile, render, values_of
from support.chart import objects as rendered
from support.custom_resources import SCHEMAS, defaulted
from support.pool_scene import pool_objects


def operator_container(name: str) -> Object:
    (deployment,) = [o for o in profile(name) if o["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment(name: str) -> dict[str, str]:
    return {e["name"]: e["value"] for e in operator_container(name)["env"] if "value" in e}


@functools.cache
def made(name: str) -> list[Object]:
    """Returns the operator's objects for a profile's ModelService and its pools."""
    (service,) = [deepcopy(o) for o in profile(name) if o["kind"] == "ModelService"]
    service["metadata"] |= {"uid": "uid-of-service", "generation": 1}
    context = pods.Context.of(
        parse_service(defaulted(SCHEMAS["ModelService"], service)),
        defaults_from(environment(name)),
    )
    found = objects.of_service(context)
    for pool in [o for o in found if o["kind"] in SCHEMAS]:
        pool = defaulted(SCHEMAS[pool["kind"]], deepcopy(pool))
        pool["metadata"] |= {"uid": f"uid-of-{pool['kind']}", "generation": 1}
        parsed = parse_pool(pool)
        found += pool_objects(parsed, context, 1)
    return found


def pod_specs(name: str) -> dict[str, Object]:
    """Returns all pods of a release, by component."""
    templates = [
        o["spec"]["template"]
        for o in [*profile(name), *made(name)]
        if o["kind"] in ("Deployment", "StatefulSet")
    ]
    return {t["metadata"]["labels"][naming.COMPONENT_LABEL]: t["spec"] for t in templates}


@pytest.mark.parametrize("name", PROFILES)
def test_the_operator_makes_valid_objects_of_what_values_say(name: str) -> None:
    for manifest in made(name):
        if not manifest["apiVersion"].startswith("millrace.dev/"):
            kubernetes_validate.validate(manifest, NEWEST, strict=True)


def violations(pod: Object) -> set[str]:
    """Checks Pod Security's level `restricted`, as its documentation lists the fields."""
    found = set()
    whole = pod.get("securityContext", {})
    if any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")):
        found.add("host namespaces")
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.add("seccomp")
    if any("hostPath" in volume for volume in pod.get("volumes", [])):
        found.add("hostPath")
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if {**whole, **own}.get("runAsNonRoot") is not True or own.get("runAsUser") == 0:
            found.add("root")
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.add("privilege")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.add("capabilities kept")
        if added := own.get("capabilities", {}).get("add"):
            found.add("+".join(added))
    return found


def test_pods_are_restricted_but_for_what_rdma_and_hostpath_need() -> None:
    pinned = {"root", "IPC_LOCK"}
    allowed = {
        ("rdma", "prefill"): pinned | {"hostPath"},
        ("rdma", "decode"): {"hostPath"},
        ("rdma", "proxy"): {"hostPath"},
        **{("everything", role): pinned for role in ("prefill", "decode", "kvp")},
    }
    for name in PROFILES:
        for component, pod in pod_specs(name).items():
            assert violations(pod) == allowed.get((name, component), set()), (name, component)


def test_the_operator_understands_its_arguments_and_environment() -> None:
    command = typer.main.get_command(app)
    for name in PROFILES:
        args = operator_container(name)["args"]
        told = command.make_context("millrace-operator", list(args)).params
        wanted = values_of(name).get("operator", {})
        assert list(told["namespace"]) == wanted.get("watchNamespaces", [])
        assert told["log_level"] == wanted.get("logLevel", "info")
        # The election's Role names the Lease.
        prefix = values_of(name).get("nameOverride", "millrace")
        election = find(profile(name), "Role", f"{prefix}-operator-election")
        assert election["rules"][1]["resourceNames"] == [told["lease_name"]]
        assert defaults_from(environment(name)).redis_secret == f"{prefix}-redis"
    images = defaults_from(environment("everything")).images
    assert images == {
        role: f"registry.example.com/serving/millrace-{role}:0.1.0-cu128" for role in images
    }


def test_tls_files_are_where_settings_look_for_them() -> None:
    container = operator_container("everything")
    given = {
        name.removeprefix("MILLRACE_TLS__").lower(): value
        for name, value in environment("everything").items()
        if name.startswith("MILLRACE_TLS__")
    }
    assert TlsConfig(**given).enabled
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "tls"]
    assert {path.rpartition("/")[0] for path in given.values()} == {mount["mountPath"]}
    # The store's URL names the authority's file as the services see it.
    url = find(profile("everything"), "Secret", "llm-redis")["stringData"]["url"]
    assert url.endswith(f"?ssl_ca_certs={config_file.FOLDER}/tls/ca.crt")
    proxy = pod_specs("everything")["proxy"]
    (config,) = [v for v in proxy["volumes"] if v["name"] == "config"]
    (files,) = [s["secret"]["items"] for s in config["projected"]["sources"] if "secret" in s]
    assert "tls/ca.crt" in [file["path"] for file in files]


def test_the_crds_are_in_the_image_where_the_operator_looks() -> None:
    folder = environment("minimal")["MILLRACE_CRDS"]
    assert f"COPY charts/millrace/crds {folder}\n" in (ROOT / "services/Dockerfile").read_text()


def test_redis_is_where_its_url_says() -> None:
    for name in ("minimal", "everything"):
        redis = f"{values_of(name).get('nameOverride', 'millrace')}-redis"
        found = profile(name)
        secret = find(found, "Secret", redis)["stringData"]
        assert f":{secret['password']}@{redis}.llm.svc:6379/0" in secret["url"]
        labels = find(found, "StatefulSet", redis)["spec"]["template"]["metadata"]["labels"]
        assert find(found, "Service", redis)["spec"]["selector"].items() <= labels.items()
        (spec,) = [o["spec"] for o in found if o["kind"] == "ModelService"]
        assert spec["redis"]["secretRef"] == {"name": redis, "key": "url"}


def test_ways_in_lead_to_the_gateways_service() -> None:
    service = find(made("everything"), "Service", "llm-proxy")
    (port,) = service["spec"]["ports"]
    ingress = find(profile("everything"), "Ingress", "llm")
    for path in ingress["spec"]["rules"][0]["http"]["paths"]:
        backend = path["backend"]["service"]
        assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    (rule,) = find(profile("everything"), "HTTPRoute", "llm")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": port["port"]}]
    assert set(rule["timeouts"].values()) == {"0s"}


def test_an_ingress_may_have_several_hosts() -> None:
    hosts = ["a.example.com", "b.example.com"]
    values = {**values_of("minimal"), "ingress": {"enabled": True, "hosts": hosts}}
    rules = find(rendered(values), "Ingress", "millrace")["spec"]["rules"]
    assert [rule["host"] for rule in rules] == hosts
    assert rules[0]["http"] == rules[1]["http"]
    assert [path["path"] for path in rules[0]["http"]["paths"]] == [
        *("/v1", "/tokenize", "/detokenize")
    ]


class Gateway(BaseHTTPRequestHandler):
    """A gateway that wants a key, but for its probes."""

    def do_GET(self) -> None:
        is_open = self.path == "/ready" or self.server.server_name == "open"
        body = json.dumps({"data": [{"id": "qwen2.5-7b"}]}).encode()
        self.send_response(200 if is_open else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("required", "name", "status"),
    [(False, "qwen2.5-7b", 0), (False, "another", 1), (True, "qwen2.5-7b", 0)],
)
def test_helm_test_passes_when_the_gateway_serves(required: bool, name: str, status: int) -> None:
    """Where keys are required, the list of models is closed to it."""
    values = values_of("minimal")
    values = {**values, "model": {**values["model"], "name": name}}
    values["gateway"] = {"keys": {"required": required, "secretRef": {"name": "api-keys"}}}
    (container,) = find(rendered(values), "Pod", "millrace-test")["spec"]["containers"]
    *command, gateway, wanted = container["command"]
    assert gateway == "http://millrace-proxy:80"
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.server_name = "closed" if required else "open"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        ran = subprocess.run(
            [sys.executable, *command[1:], url, wanted], check=False, capture_output=True, text=True
        )
        server.shutdown()
    assert ran.returncode == status, ran.stderr


def test_monitors_find_ports_that_pods_have() -> None:
    specs = pod_specs("everything")
    names = {c: {p["name"] for p in s["containers"][0]["ports"]} for c, s in specs.items()}
    (service, operator) = [
        {e["port"] for e in o["spec"]["podMetricsEndpoints"]}
        for o in profile("everything")
        if o["kind"] == "PodMonitor"
    ]
    assert all(names[c] & service for c in names if c not in ("redis", "operator"))
    assert names["operator"] >= operator
    assert "metrics" not in names["proxy"]  # else it would be read twice


def test_the_notes_lead_to_the_gateway() -> None:
    notes = render(values_of("everything"))["NOTES.txt"]
    assert "svc/llm-proxy 8080:8000" in notes and "ms/llm" in notes
