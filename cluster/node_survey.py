"""Asks every node of the joined Ray cluster for its facts, in a task pinned to it; a silent node is a record too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from k3ray.cluster.node_facts import Inquiry, look
from k3ray.cluster.ray_driver import reason_of
from k3ray.cluster.ray_memory import RAY_DECIDES, memory_left
from k3ray.cluster.roots_file import RootsMap
from k3ray.cluster.topology import NodeFacts

ANSWER_S = 120.0  # a node may have to build its index first
LOOK_S = 10.0  # between two words on who is waited for


def survey(
    roots: RootsMap,
    threads: int | None = None,
    measure: bool = False,
    answer_s: float = ANSWER_S,
    say: Callable[[str], None] = lambda line: None,
    only: Collection[str] | None = None,
) -> list[NodeFacts]:
    """The facts of all living nodes, the driver's first, the others by name. only: ids of those that are asked.

    A node that cannot run the question (no k3ray, another Python) or does not answer in time has only a problem, and so
    has one that the roots file names and the cluster does not have. say: hears who is waited for. Raises NamedTwice.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: (node["NodeID"] != own, _key(node))
    )
    if only is None:
        for node in nodes:
            roots.refuse_twice(*_key(node))
    shown = names_of([_key(node) for node in nodes])
    inquiries = [
        _inquiry(node, name, roots, own, threads, measure)
        for node, name in zip(nodes, shown, strict=True)
        if only is None or node["NodeID"] in only
    ]
    asked = [
        ray.remote(look)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=inquiry.node_id, soft=False),
        )
        .remote(inquiry)
        for inquiry in inquiries
    ]
    _await(dict(zip(asked, (inquiry.name for inquiry in inquiries), strict=True)), answer_s, say)
    left = memory_left()
    answers = (_answer(inquiry, ref, answer_s) for inquiry, ref in zip(inquiries, asked, strict=True))
    found = [within_ray(facts, left.get(facts.node_id)) for facts in answers]
    return found if only is not None else [*found, *_absent(roots, nodes)]


def _await(asked: Mapping[Any, str], answer_s: float, say: Callable[[str], None]) -> None:
    """Wait for all answers. asked: ref -> the node's name. Ray takes a minute to believe that a host without power is
    gone: what is waited for is said meanwhile.
    """
    began, waiting = time.monotonic(), list(asked)
    while waiting and (left_s := answer_s - (time.monotonic() - began)) > 0:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(LOOK_S, left_s))
        if waiting and (waited_s := time.monotonic() - began) < answer_s:
            names = ", ".join(asked[ref] for ref in waiting)
            say(f"waiting for {names}: no answer for {waited_s:.0f} s, left out after {answer_s:g} s")


def _absent(roots: RootsMap, nodes: Sequence[dict[str, Any]]) -> list[NodeFacts]:
    """What the roots file names and is not there: a host that is down, or a mistake in writing."""
    known = {text for node in nodes for text in (node["NodeManagerHostname"], node["NodeManagerAddress"])}
    problem = (
        "named in the --roots file and no living node of the cluster has that name or address: `ray start` there, or "
        "correct the name"
    )
    return [NodeFacts("", name, "", problem=problem) for name in roots.unknown(known)]


def within_ray(facts: NodeFacts, left_bytes: int | None) -> NodeFacts:
    """The facts with no more memory than Ray can still give to actors there: it counts what other runs have declared.

    None: Ray does not say.
    """
    if left_bytes is None or facts.problem or facts.available_bytes <= left_bytes:
        return facts
    return replace(facts, available_bytes=left_bytes, decided_by=RAY_DECIDES)


def _inquiry(
    node: dict[str, Any], shown: str, roots: RootsMap, own: str, threads: int | None, measure: bool
) -> Inquiry:
    name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    folders = roots.of(name, address)
    here = node["NodeID"] == own
    return Inquiry(node["NodeID"], shown, address, folders, here, threads if here else None, measure)


def _answer(inquiry: Inquiry, ref: Any, answer_s: float) -> NodeFacts:
    try:
        facts: NodeFacts = ray.get(ref, timeout=0)
        return facts
    except ray.exceptions.GetTimeoutError:
        with suppress(ray.exceptions.RayError):
            ray.cancel(ref, force=True)
        problem = f"did not answer in {answer_s:g} s: is it overloaded, or its disk gone?"
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
        problem = "left the cluster while it was asked: is it running and reachable? `ray start` there again"
    except ray.exceptions.RayError as error:
        problem = f"could not answer ({reason_of(error)}): install the same k3ray, Python and Ray there"
    return NodeFacts(inquiry.node_id, inquiry.name, inquiry.address, driver=inquiry.driver, problem=problem)


def names_of(nodes: Sequence[tuple[str, str]]) -> list[str]:
    """What the nodes (host name, address) are called: hosts of one name have their address with it, and a number where
    even that is the same.
    """
    hosts = Counter(host for host, _ in nodes)
    named = [host if hosts[host] == 1 else f"{host} {address}" for host, address in nodes]
    whole, met = Counter(named), Counter[str]()
    for place, name in enumerate(named):
        met[name] += 1
        named[place] = name if whole[name] == 1 else f"{name} #{met[name]}"
    return named


def _key(node: dict[str, Any]) -> tuple[str, str]:
    return node["NodeManagerHostname"], node["NodeManagerAddress"]
