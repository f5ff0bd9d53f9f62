"""Network policies of a cluster, for a test: turned into rules of this node's iptables, until it is stopped.

What a network plug-in does on a cluster of one node whose pods hang on Docker's bridge: a pod that a policy is about
is left, and reached, by what some policy allows and by answers. Addresses are looked at after Services were
resolved, as the specification leaves it to plug-ins and most do. What it does not know it refuses to enforce, loudly.
``--clean`` takes the rules away.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
"""Of the cluster, as JSON."""

CHAIN = "TEST-POLICY"
PLACES: Sequence[tuple[str, Sequence[str]]] = (("FORWARD", ()), ("INPUT", ("-i", "docker0")))
POLL_S = 1.0


def ask(what: str) -> list[Object]:
    done = subprocess.run(["kubectl", "get", what, "-A", "-o", "json"], capture_output=True, text=True, check=True)
    items: list[Object] = json.loads(done.stdout)["items"]
    return items


def selects(selector: Object, given: Mapping[str, str] | None) -> bool:
    labels = given or {}
    wanted = (selector.get("matchLabels") or {}).items()
    return wanted <= labels.items() and all(holds(one, labels) for one in selector.get("matchExpressions") or ())


def holds(expression: Object, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"operator {expression['operator']}")


def directions(policy: Object) -> set[str]:
    given = policy.get("policyTypes") or (["Ingress", "Egress"] if "egress" in policy else ["Ingress"])
    return {one.lower() for one in given}


def has_address(pod: Object) -> bool:
    """A pod that has ended still names the address that it had, and another one has it by now."""
    is_over = pod["status"].get("phase") in ("Succeeded", "Failed")
    return bool(pod["status"].get("podIP")) and not is_over and not pod["spec"].get("hostNetwork")


class Cluster:
    """Pods, namespaces and policies at one moment."""

    def __init__(self, policies: Sequence[Object], namespaces: Sequence[Object], pods: Sequence[Object]) -> None:
        self.policies = policies
        self._namespaces = {one["metadata"]["name"]: one["metadata"].get("labels") for one in namespaces}
        self.pods = [one for one in pods if has_address(one)]

    def about(self, pod: Object, direction: str) -> list[Object]:
        place, labels = pod["metadata"]["namespace"], pod["metadata"].get("labels")
        return [
            one["spec"]
            for one in self.policies
            if one["metadata"]["namespace"] == place
            and selects(one["spec"]["podSelector"], labels)
            and direction in directions(one["spec"])
        ]

    def addresses(self, peer: Object, place: str) -> list[str]:
        """Of one entry of `from` or `to`."""
        if "ipBlock" in peer:
            return outside(peer["ipBlock"])
        spaces = {place}
        if "namespaceSelector" in peer:
            spaces = {name for name, labels in self._namespaces.items() if selects(peer["namespaceSelector"], labels)}
        return [
            pod["status"]["podIP"]
            for pod in self.pods
            if pod["metadata"]["namespace"] in spaces
            and selects(peer.get("podSelector", {}), pod["metadata"].get("labels"))
        ]


def outside(block: Object) -> list[str]:
    left = [ipaddress.IPv4Network(block["cidr"])]
    for taken in map(ipaddress.IPv4Network, block.get("except") or ()):
        left = [part for one in left for part in (one.address_exclude(taken) if taken.subnet_of(one) else [one])]
    return [str(one) for one in left]


def ports(rule: Object) -> list[list[str]]:
    if not rule.get("ports"):
        return [[]]
    if any(not isinstance(one.get("port"), int) or "endPort" in one for one in rule["ports"]):
        raise ValueError(f"ports {rule['ports']}")
    return [["-p", one.get("protocol", "TCP").lower(), "--dport", str(one["port"])] for one in rule["ports"]]


def chain_of(cluster: Cluster, pod: Object, direction: str, name: str) -> list[list[str]]:
    """The rules that stand for one direction of one pod: what is allowed goes on, and the rest ends there."""
    peers, side = ("from", "-s") if direction == "ingress" else ("to", "-d")
    lines: list[list[str]] = []
    place = pod["metadata"]["namespace"]
    for policy in cluster.about(pod, direction):
        for rule in policy.get(direction) or ():
            peer_addresses = [one for peer in rule.get(peers) or () for one in cluster.addresses(peer, place)]
            where = [[side, one] for one in peer_addresses] if rule.get(peers) else [[]]
            lines += [["-A", name, *one, *port, "-j", "RETURN"] for one in where for port in ports(rule)]
    return [*lines, ["-A", name, "-j", "DROP"]]


def rules(cluster: Cluster) -> str:
    """For iptables-restore."""
    chains, lines = [CHAIN], [["-A", CHAIN, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN"]]
    for direction, side in (("egress", "-s"), ("ingress", "-d")):
        for pod in cluster.pods:
            if not cluster.about(pod, direction):
                continue
            name = f"{CHAIN}-{direction[0].upper()}{len(chains)}"
            chains.append(name)
            lines.append(["-A", CHAIN, side, pod["status"]["podIP"], "-j", name])
            lines += chain_of(cluster, pod, direction, name)
    declared = [f":{name} - [0:0]" for name in chains]
    return "\n".join(["*filter", *declared, *(" ".join(one) for one in lines), "COMMIT", ""])


def iptables(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["iptables", "-w", *words], capture_output=True, text=True, check=False)


def place_first() -> None:
    """Ours come first, wherever others have put theirs."""
    for parent, which in PLACES:
        first = iptables("-S", parent, "1").stdout.split()
        if first[-1:] != [CHAIN]:
            iptables("-D", parent, *which, "-j", CHAIN)
            iptables("-I", parent, "1", *which, "-j", CHAIN)


def clean() -> None:
    for parent, which in PLACES:
        iptables("-D", parent, *which, "-j", CHAIN)
    mine = [line.split()[1] for line in iptables("-S").stdout.splitlines() if line.startswith(f"-N {CHAIN}")]
    for name in mine:
        iptables("-F", name)
    for name in mine:
        iptables("-X", name)


def main() -> None:
    if sys.argv[1:] == ["--clean"]:
        clean()
        return
    before = ""
    while True:
        try:
            now = rules(Cluster(ask("networkpolicies"), ask("namespaces"), ask("pods")))
        except subprocess.CalledProcessError as error:  # the API server is away: what was said last stays
            print(error.stderr, file=sys.stderr, flush=True)
        else:
            if now != before:
                subprocess.run(["iptables-restore", "-w", "--noflush"], input=now, text=True, check=True)
                print(f"{now.count(chr(10))} lines", flush=True)
                before = now
            place_first()
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
