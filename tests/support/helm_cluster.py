"""The parts of an API server that Helm's `lookup` needs: discovery, Secrets, and ClusterRoles."""

from __future__ import annotations

import http.server
import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import helm_python as helm

from support.chart import CHART

DISCOVERY: Mapping[str, Any] = {
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": "rbac.authorization.k8s.io",
                "versions": [
                    {"groupVersion": "rbac.authorization.k8s.io/v1", "version": "v1"},
                ],
                "preferredVersion": {
                    "groupVersion": "rbac.authorization.k8s.io/v1",
                    "version": "v1",
                },
            }
        ],
    },
    "/apis/rbac.authorization.k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "rbac.authorization.k8s.io/v1",
        "resources": [
            {"name": "clusterroles", "kind": "ClusterRole", "namespaced": False, "verbs": ["list"]}
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}],
    },
}


@contextmanager
def _api_server(answers: Mapping[str, Any]) -> Iterator[str]:
    class ApiServer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {"kind": "Status", "code": 404}).encode())

        def log_message(self, *_: object) -> None:
            """Suppresses the server's log in the tests' output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def upgraded(
    values: Mapping[str, Any],
    secrets: Mapping[str, Mapping[str, bytes]],
    cluster_roles: Sequence[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Text by the template's file name, as an upgrade renders it where these objects are."""
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleList"}
    found: dict[str, Any] = {roles: {**kind, "items": list(cluster_roles)}}
    found |= {
        f"/api/v1/namespaces/llm/secrets/{name}": {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": "llm"},
            "data": {key: b64encode(content).decode() for key, content in data.items()},
        }
        for name, data in secrets.items()
    }
    with (
        _api_server({**DISCOVERY, **found}) as address,
        helm.Config(kube_apiserver=address, kubeconfig_content="", namespace="llm") as config,
        helm.Chart.load(CHART) as chart,
    ):
        files = config.render(
            chart, dict(values), name="millrace", namespace="llm", is_upgrade=True
        )
    return {name.removeprefix("millrace/templates/"): text for name, text in files.items()}
