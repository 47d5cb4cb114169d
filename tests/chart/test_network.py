"""NetworkPolicies admit the arrows of the architecture's picture, and no others."""

import pytest

from chart.network import OUTSIDE, Pod, allowed
from millrace_operator.manifests import naming
from support.chart import Object, find, objects, profile, values_of

WORKERS = ("prefill", "decode", "kvp")

#: Any port that NIXL may pick.
NIXL = 41234

#: The arrows between pods of one release: (from, to): ports. Workers talk on every port.
ARROWS: dict[tuple[str, str], set[int]] = {
    ("client", "proxy"): {8080},
    ("proxy", "scheduler"): {7070},
    ("proxy", "decode"): {7071},
    ("proxy", "prefill"): {7071},
    ("proxy", "redis"): {6379},
    ("scheduler", "redis"): {6379},
    ("prefill", "redis"): {6379},
    ("decode", "redis"): {6379},
    ("kvp", "redis"): {6379},
    ("operator", "scheduler"): {7070},
    **{(worker, "scheduler"): {7070} for worker in WORKERS},
    **{("prometheus", role): {9090} for role in ("scheduler", "operator", *WORKERS)},
    ("prometheus", "proxy"): {8080},
    **{(role, "dns"): {53} for role in ("proxy", "scheduler", "operator", *WORKERS)},
    # The peers that may reach the gateway: the minimal profile admits all.
    **{(role, "proxy"): {8080} for role in ("dns", "monitor")},
}
PORTS = {53, 80, 443, 6379, 6443, 7070, 7071, 8080, 9090, NIXL}


def pods(name: str, found: list[Object]) -> dict[str, Pod]:
    """Returns the release's pods with their labels, and some pods of others."""
    roles = ("proxy", "scheduler", *WORKERS)
    own = {role: Pod(role, "llm", naming.labels(name, role)) for role in roles}
    for role, kind in (("redis", "StatefulSet"), ("operator", "Deployment")):
        template = find(found, kind, f"{name}-{role}")["spec"]["template"]
        own[role] = Pod(role, "llm", template["metadata"]["labels"])
    others = {
        "client": Pod("client", "apps", {"app": "shop"}),
        "monitor": Pod("monitor", "llm", {"app": "monitor"}),
        "dns": Pod("dns", "kube-system", {"k8s-app": "kube-dns"}),
        "prometheus": Pod("prometheus", "mon", {"app.kubernetes.io/name": "prometheus"}),
    }
    return {**own, **others}


def policies(found: list[Object]) -> list[Object]:
    return [o for o in found if o["kind"] == "NetworkPolicy"]


def arrows(found: list[Object], all_pods: dict[str, Pod]) -> dict[tuple[str, str], set[int]]:
    """Returns all allowed connections to or from the release's pods."""
    of_others = {"client", "monitor", "dns", "prometheus"}
    open_ports = {
        (a, b): {port for port in PORTS if allowed(policies(found), source, to, port)}
        for a, source in all_pods.items()
        for b, to in all_pods.items()
        if not {a, b} <= of_others
    }
    return {ends: ports for ends, ports in open_ports.items() if ports}


def test_a_release_lets_through_the_arrows_of_the_picture_and_no_more() -> None:
    values = {**values_of("cpu"), "networkPolicy": {"apiServer": {"ports": [443]}}}
    found = objects(values)
    expected = {ends: set(ports) for ends, ports in ARROWS.items()}
    for a in WORKERS:
        for b in WORKERS:
            expected[a, b] = set(PORTS)
    seen = arrows(found, pods("millrace", found))
    # To any HTTPS server, since the API server's address is not known.
    for ends in [ends for ends in seen if ends[0] == "operator"]:
        seen[ends].discard(443)
    assert {ends: ports for ends, ports in seen.items() if ports} == expected


@pytest.mark.parametrize(("profile_name", "may"), [("cpu", False), ("minimal", True)])
def test_only_what_fetches_models_reaches_the_outside(profile_name: str, may: bool) -> None:
    found = profile(profile_name)
    all_pods = pods("millrace", found)
    for role in ("proxy", "prefill", "decode"):
        assert allowed(policies(found), all_pods[role], OUTSIDE, 443) == may
        assert not allowed(policies(found), all_pods[role], OUTSIDE, 80)
    for role in ("scheduler", "redis"):
        assert not allowed(policies(found), all_pods[role], OUTSIDE, 443)
    assert allowed(policies(found), all_pods["operator"], OUTSIDE, 443)


@pytest.mark.parametrize(
    ("files", "may"), [({"url": "s3://bucket/a"}, True), ({"claimName": "a"}, False), ({}, False)]
)
def test_the_gateway_reaches_a_store_of_files_elsewhere(files: Object, may: bool) -> None:
    found = objects({**values_of("cpu"), "gateway": {"files": files}})
    all_pods = pods("millrace", found)
    assert allowed(policies(found), all_pods["proxy"], OUTSIDE, 443) == may
    assert not allowed(policies(found), all_pods["decode"], OUTSIDE, 443)


def test_dns_may_have_any_address() -> None:
    """As NodeLocal DNSCache, and OpenShift's DNS on another port, need it."""
    open_dns = {"networkPolicy": {"dns": {"peers": [], "ports": [53, 5353]}}}
    for values, may in (({}, False), (open_dns, True)):
        found = objects({**values_of("cpu"), **values})
        for pod in pods("millrace", found).values():
            if pod.namespace == "llm" and pod.name not in ("redis", "monitor"):
                for port in (53, 5353):
                    assert allowed(policies(found), pod, OUTSIDE, port) == may


def test_clients_can_be_limited_and_further_ways_opened() -> None:
    found = profile("everything")
    all_pods = pods("llm", found)
    front = Pod("nginx", "ingress-nginx", {})
    assert allowed(policies(found), front, all_pods["proxy"], 8080)
    assert not allowed(policies(found), all_pods["client"], all_pods["proxy"], 8080)
    test = Pod("test", "llm", find(found, "Pod", "llm-test")["metadata"]["labels"])
    assert allowed(policies(found), test, all_pods["proxy"], 8080)
    collector = Pod("collector", "observability", {})
    assert allowed(policies(found), all_pods["prefill"], collector, 4317)
    researcher = Pod("prefill", "research", naming.labels("other", "prefill"))
    assert allowed(policies(found), researcher, all_pods["redis"], 6379)
    assert not allowed(policies(found), all_pods["operator"], OUTSIDE, 443)  # with an address


def test_another_models_pods_in_the_namespace_share_redis_alone() -> None:
    found = profile("cpu")
    all_pods = pods("millrace", found)
    for role in ("proxy", "prefill", "decode"):
        other = Pod(role, "llm", naming.labels("another", role))
        assert allowed(policies(found), other, all_pods["redis"], 6379)
        for target in ("scheduler", "prefill", "decode"):
            assert not any(allowed(policies(found), other, all_pods[target], p) for p in PORTS)


def test_a_gateway_reaches_the_other_models_that_it_serves() -> None:
    base = values_of("cpu")
    front = objects({**base, "gateway": {"models": [{"service": "back"}]}}, name="front")
    back = objects({**base, "networkPolicy": {"gateways": ["front"]}}, name="back")
    both = policies(front) + policies(back)
    proxy = Pod("proxy", "llm", naming.labels("front", "proxy"))
    for role, port in (("scheduler", 7070), ("prefill", 7071), ("decode", 7071)):
        target = Pod(role, "llm", naming.labels("back", role))
        assert allowed(both, proxy, target, port)
        stranger = Pod("proxy", "llm", naming.labels("another", "proxy"))
        assert not allowed(both, stranger, target, port)
        assert not allowed(policies(front), Pod("decode", "llm", {}), proxy, port)


def test_without_policies_there_is_none() -> None:
    given = {**values_of("minimal"), "networkPolicy": {"enabled": False}}
    assert not policies(objects(given))


def test_an_external_redis_is_reached_by_its_port() -> None:
    found = profile("external-redis")
    scheduler = Pod("scheduler", "llm", naming.labels("millrace", "scheduler"))
    assert allowed(policies(found), scheduler, OUTSIDE, 6380)
    assert not allowed(policies(found), scheduler, OUTSIDE, 6379)


@pytest.mark.parametrize(
    ("external", "ports"),
    [
        ({"url": "redis+sentinel://u:p:1@a,b:26380,a/llm/0?db=1"}, {26379, 26380, 6379}),
        ({"url": "rediss+sentinel://[::1]:7/llm"}, {7, 6379}),
        ({"url": "redis+sentinel://a/llm", "ports": [26379, 6390]}, {26379, 6390}),
        ({"url": "redis+cluster://u:p:1@a,b:6380,a"}, {6379, 6380}),
        ({"url": "rediss+cluster://[::1]:7/0?db=0"}, {7}),
        ({"existingSecret": "mine"}, {6379}),
        ({"existingSecret": "mine", "ports": [26379, 6379]}, {26379, 6379}),
    ],
)
def test_sentinels_clusters_and_their_servers_are_reached(
    external: Object, ports: set[int]
) -> None:
    given = {**values_of("minimal"), "redis": {"enabled": False}, "externalRedis": external}
    scheduler = Pod("scheduler", "llm", naming.labels("millrace", "scheduler"))
    found = policies(objects(given))
    tried = {7, 6379, 6380, 6390, 26379, 26380}
    assert {port for port in tried if allowed(found, scheduler, OUTSIDE, port)} == ports
