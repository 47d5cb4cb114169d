"""Computes the connections that NetworkPolicies allow, by the rules of the Kubernetes
documentation.

"Network Policies": if policies of a direction select a pod, it allows the connections that one of
them allows; other pods allow all. A connection needs both ends' consent. No pod has an address of
an ipBlock here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

#: An address that no pod has.
OUTSIDE = None


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str
    labels: Mapping[str, str]


def allowed(policies: Iterable[Object], source: Pod | None, to: Pod | None, port: int) -> bool:
    """Returns whether a TCP connection is allowed. OUTSIDE: an end that is no pod."""
    found = list(policies)
    return _one_way(found, "Egress", source, to, port) and _one_way(
        found, "Ingress", to, source, port
    )


def _one_way(
    policies: list[Object], direction: str, of: Pod | None, peer: Pod | None, port: int
) -> bool:
    if of is None:
        return True
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == of.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], of.labels)
    ]
    peers = "to" if direction == "Egress" else "from"
    return not selecting or any(
        _port_matches(rule, port) and _peer_matches(rule.get(peers), peer, of.namespace)
        for spec in selecting
        for rule in spec.get(direction.lower(), [])
    )


def _port_matches(rule: Object, port: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(p.get("protocol") == "TCP" and p.get("port") == port for p in ports)


def _peer_matches(peers: list[Object] | None, pod: Pod | None, own_namespace: str) -> bool:
    if not peers:
        return True
    return pod is not None and any(_is(peer, pod, own_namespace) for peer in peers)


def _is(peer: Object, pod: Pod, own_namespace: str) -> bool:
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": pod.namespace}
        here = _selects(peer["namespaceSelector"], labels)
    else:
        here = pod.namespace == own_namespace
    return here and _selects(peer.get("podSelector") or {}, pod.labels)


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(name) != value for name, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True
