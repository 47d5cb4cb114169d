"""Groups of instances: Tetris section 5.1, instance group extension (GetGroup), and fixed groups.

A pool is written as its nodes: one list per node, in ascending order of node number, each with the
indices of its instances. For GetGroup every list has the shortest queue first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Group = tuple[int, ...]
Nodes = list[list[int]]


def by_node(nodes: Sequence[int]) -> Nodes:
    """The indices of each node's instances, ascending; `nodes[i]` numbers instance i's node."""
    numbers = sorted(set(nodes))
    return [[i for i, node in enumerate(nodes) if node == number] for number in numbers]


def shortest_first(nodes: Nodes, queue_s: Sequence[float]) -> Nodes:
    """Sorts each node with its shortest queue first; the lower index goes before its equals."""
    return [sorted(node, key=lambda i: (queue_s[i], i)) for node in nodes]


def within(nodes: Nodes, group: Iterable[int]) -> Nodes:
    """Returns the nodes' instances that are in `group`, without empty nodes."""
    members = set(group)
    left = [[i for i in node if i in members] for node in nodes]
    return [node for node in left if node]


def get_group(nodes: Nodes, initial: Group, size: int, queue_s: Sequence[float]) -> Group:
    """GetGroup: returns `initial` and the instances to add so that there are `size`, in that order.

    Instances are added within the nodes that already have members, shortest queue first. The
    missing instances come from the other nodes. If a node has as many instances, they come from the
    node whose last taken instance has the shortest queue. If none has, a whole node goes in (the
    node with the shortest queue, which is its longest member's, since a ring waits for all) and the
    search repeats for the rest. With equal nodes this gives the paper's k full nodes and one node's
    best. Where the paper leaves it open, the lower node and the lower index win.

    `nodes` hold at least `size` instances, those of `initial` among them.
    """
    members = set(initial)
    joined = [node for node in nodes if not members.isdisjoint(node)]
    others = [node for node in nodes if members.isdisjoint(node)]
    beside = [i for node in joined for i in node if i not in members]
    beside.sort(key=lambda i: (queue_s[i], i))
    group = [*initial, *beside[: size - len(initial)]]
    while (wanted := size - len(group)) > 0:
        fitting = [node for node in others if len(node) >= wanted]
        taken = min(fitting or others, key=lambda node: queue_s[node[:wanted][-1]])
        others.remove(taken)
        group += taken[:wanted]
    return tuple(group)


def fixed_groups(nodes: Sequence[int], size: int) -> tuple[Group, ...]:
    """Cuts a pool into groups of `size`, each on one node where possible (Tetris section 7.1).

    The nodes' remaining instances are joined in the order of nodes. Fewer than `size` instances at
    the end belong to no group.
    """
    groups: list[Group] = []
    over: list[int] = []
    for node in by_node(nodes):
        full = len(node) - len(node) % size
        groups += (tuple(node[at : at + size]) for at in range(0, full, size))
        over += node[full:]
    full = len(over) - len(over) % size
    groups += (tuple(over[at : at + size]) for at in range(0, full, size))
    return tuple(groups)
