"""The pods of an instance whose stages have pods of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from millrace_operator.manifests.group_objects import group_object, later_stages
from millrace_operator.manifests.instances import Group, Groups
from millrace_operator.manifests.naming import TEMPLATE_LABEL
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import Pod
from millrace_operator.spec import SpecError, parse_pool, parse_service
from support.custom_resources import DEFAULTS, model_service, pool
from support.pod_arguments import read_arguments

OWN: dict[str, Any] = {"stages": 3, "stagePods": "Own"}


def groups_of(
    kind: str = "PrefillGroup", *, of_service: dict[str, Any] | None = None, **spec: Any
) -> Groups:
    context = Context.of(parse_service(model_service(**(of_service or {}))), DEFAULTS)
    name = "chat-prefill" if kind == "PrefillGroup" else "chat-decode"
    return Groups.of(parse_pool(pool(kind, name, **(OWN | spec))), context)


def main(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


def both(group: Group) -> list[dict[str, Any]]:
    return [group.first, group.later]


def set_option(given: dict[str, Any], path: str) -> str:
    found = dict(setting.split("=", 1) for setting in given["settings"])
    return found[path]


@pytest.mark.parametrize(
    ("kind", "spec", "command"),
    [
        ("PrefillGroup", {}, "prefill"),
        ("DecodePool", {}, "decode"),
        ("DecodePool", {"role": "mixed"}, "colocated"),
    ],
)
def test_the_first_stage_names_the_pods_of_the_others(
    kind: str, spec: dict[str, Any], command: str, tmp_path: Path
) -> None:
    groups = groups_of(kind, **spec)
    group, name = groups.group(7), groups.pool.name
    found, given = read_arguments(main(group.first)["args"], tmp_path)
    assert (found, given["stages"]) == (command, 3)
    assert set_option(given, "engine.stage_hosts") == (
        f"{name}-7-0-1.{name}.llm.svc:7071,{name}-7-0-2.{name}.llm.svc:7071"
    )


def test_the_later_stages_wait_for_it_with_its_model_and_settings(tmp_path: Path) -> None:
    group = groups_of().group(0)
    command, given = read_arguments(main(group.later)["args"], tmp_path)
    assert (command, given["model"]) == ("stage", "/models/chat")
    assert (given["host"], given["port"]) == ("$(POD_IP)", 7071)
    assert given["settings"] == []
    hash_of = "millrace.dev/config"
    first, later = (one["metadata"]["annotations"][hash_of] for one in both(group))
    assert first == later


def test_pods_of_a_group_have_the_same_but_for_their_part() -> None:
    group = groups_of(tensorParallel=2).group(0)
    first, later = both(group)
    for part in ("image", "resources", "securityContext", "volumeMounts", "ports", "livenessProbe"):
        assert main(first)[part] == main(later)[part]
    assert main(first)["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert first["spec"]["volumes"] == later["spec"]["volumes"]
    labels = [one["metadata"]["labels"] for one in both(group)]
    differing = {k for k in labels[0] if labels[0][k] != labels[1][k]}
    assert differing == {"millrace.dev/stage"}


def test_the_store_is_the_first_stages_alone() -> None:
    names = [{one["name"] for one in main(pod)["env"]} for pod in both(groups_of().group(0))]
    assert names[0] - names[1] == {"MILLRACE_STORE__URL"}


def test_gpus_of_an_instance_are_shared_out() -> None:
    given = main(groups_of(gpus=6).group(0).later)
    assert given["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert "resources" not in main(groups_of(gpus=0).group(0).later)


@pytest.mark.parametrize("on_timeout", ["Migrate", "Wait"])
def test_the_later_stages_outlast_the_first(on_timeout: str, tmp_path: Path) -> None:
    group = groups_of(drain={"timeoutSeconds": 100, "onTimeout": on_timeout}).group(0)
    grace = [one["spec"]["terminationGracePeriodSeconds"] for one in both(group)]
    given = [read_arguments(main(one)["args"], tmp_path)[1] for one in both(group)]
    assert given[1]["drain_timeout_s"] >= grace[0] > given[0]["drain_timeout_s"]
    assert grace[1] > given[1]["drain_timeout_s"]


def test_groups_have_one_template_that_any_part_changes() -> None:
    def labels(groups: Groups) -> set[str]:
        pods = [pod for n in range(2) for pod in both(groups.group(n))]
        pods += both(groups.group(0, "elsewhere"))
        return {pod["metadata"]["labels"][TEMPLATE_LABEL] for pod in pods}

    found = [
        labels(groups_of()),
        labels(groups_of(stages=2)),
        labels(groups_of(drain={"timeoutSeconds": 7})),
        labels(groups_of(of_service={"settings": {"engine.max_batch": "8"}})),
        labels(groups_of(template={"spec": {"priorityClassName": "high"}})),
    ]
    assert [len(one) for one in found] == [1] * len(found)
    assert len(set.union(*found)) == len(found)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine.kv_pools": "shared"}, "engine.kv_pools] is 'shared'; with stagePods Own it must"),
        ({"transfer.kv_checksum": "on"}, "transfer.kv_checksum] is 'on'; with stagePods Own it"),
        ({"transfer.buffer_bytes": "4096"}, "transfer.buffer_bytes] is 4096; with stagePods Own"),
        ({"engine.stage_hosts": "a:1"}, "engine.stage_hosts] is 'a:1'; spec.prefill.stagePods and"),
    ],
)
def test_settings_that_forbid_it_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        groups_of(of_service={"settings": settings})
    assert str(refused.value).startswith(f"spec.settings[{said}")


def test_a_command_line_for_all_stages_is_refused() -> None:
    container = {"name": "millrace", "args": ["prefill"]}
    with pytest.raises(SpecError, match=r"containers\[millrace\].args is \['prefill'\]; with"):
        groups_of(template={"spec": {"containers": [container]}})


def test_statefulsets_are_valid_and_choose_their_own_pods() -> None:
    groups = groups_of()
    first = Pod(name="chat-prefill-1-0", uid="u", ordinal=1, template=groups.template)
    made = [group_object(groups, 1, "StatefulSet"), later_stages(groups, first)]
    for manifest in made:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    selectors = [one["spec"]["selector"]["matchLabels"] for one in made]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in made]
    chosen = [[all(one.get(k) == v for k, v in s.items()) for one in labels] for s in selectors]
    assert chosen == [[True, False], [False, True]]
    assert [one["spec"]["replicas"] for one in made] == [1, 2]
    assert made[1]["spec"]["ordinals"] == {"start": 1}
    owners = [one["metadata"]["ownerReferences"][0] for one in made]
    assert [(o["kind"], o["uid"]) for o in owners] == [
        ("PrefillGroup", "uid-of-chat-prefill"),
        ("Pod", "u"),
    ]


def test_a_leader_worker_set_has_the_same_pods_at_names_of_its_own_service(tmp_path: Path) -> None:
    groups = groups_of()
    made = group_object(groups, 1, "LeaderWorkerSet")
    assert made["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert made["spec"]["replicas"] == 1
    parts = made["spec"]["leaderWorkerTemplate"]
    assert (parts["size"], parts["restartPolicy"]) == (3, "None")
    assert parts["workerTemplate"] == groups.group(1).later
    _, given = read_arguments(main(parts["leaderTemplate"])["args"], tmp_path)
    assert set_option(given, "engine.stage_hosts") == (
        "chat-prefill-1-0-1.chat-prefill-1.llm.svc:7071,"
        "chat-prefill-1-0-2.chat-prefill-1.llm.svc:7071"
    )
    (args,) = [i for i, a in enumerate(main(parts["leaderTemplate"])["args"]) if "_hosts" in a]
    own = groups.group(1).first
    main(own)["args"][args] = main(parts["leaderTemplate"])["args"][args]
    assert own == parts["leaderTemplate"]


def test_a_leader_worker_set_gets_its_annotations_from_the_pod_template() -> None:
    own = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}
    template = {"metadata": {"annotations": {**own, "example.org/of-pods": "yes"}}}
    made = group_object(groups_of(template=template), 0, "LeaderWorkerSet")
    assert made["metadata"]["annotations"] == own
    assert "annotations" not in group_object(groups_of(), 0, "StatefulSet")["metadata"]
