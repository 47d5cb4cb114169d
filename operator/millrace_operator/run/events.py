"""Posts Events on the operator's objects."""

from __future__ import annotations

import logging
import time
import uuid

from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import MANAGER
from millrace_operator.observed import Object
from millrace_operator.reconcile.actions import Report
from millrace_operator.run.kube import RESOURCES, Kube, micro_time

log = logging.getLogger(__name__)

#: Seconds after which the same Event on the same object is posted again.
EVENT_S = 600.0


class Events:
    """The Events that this operator posts. `identity` names the operator in them."""

    def __init__(self, kube: Kube, identity: str) -> None:
        self._kube = kube
        self._identity = identity
        self._posted: dict[tuple[str, str, str], float] = {}  # by time

    async def post(self, obj: Object, report: Report) -> None:
        """Posts an Event, unless the same Event was posted lately. A failure is only logged."""
        meta, now_s = obj["metadata"], time.monotonic()
        event = (meta["uid"], report.reason, report.message)
        self._posted = {e: at_s for e, at_s in self._posted.items() if now_s - at_s < EVENT_S}
        if event in self._posted:
            return
        self._posted[event] = now_s
        about = {name: meta[name] for name in ("name", "namespace", "uid")}
        manifest = {
            "apiVersion": RESOURCES["Event"].api_version,
            "kind": "Event",
            "metadata": {
                "name": f"{meta['name']}.{uuid.uuid4().hex[:16]}",
                "namespace": meta["namespace"],
            },
            "eventTime": micro_time(),
            "type": "Warning" if report.warning else "Normal",
            "reason": report.reason,
            "action": "Reconcile",
            "note": report.message[:1024],
            "reportingController": f"millrace.dev/{MANAGER}",
            "reportingInstance": self._identity,
            "regarding": {"apiVersion": obj["apiVersion"], "kind": obj["kind"], **about},
        }
        try:
            await self._kube.create(manifest)
        except MillraceError as error:
            log.warning("an Event was not posted: %s", error)
