"""What a test cluster makes of network policies: `tests/apparatus/k8s/policies.py`, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from tests.apparatus.k8s.policies import Cluster, rules

NAMES = {"metadata": {"name": "kube-system", "labels": {"kubernetes.io/metadata.name": "kube-system"}}}
OURS = {"metadata": {"name": "gspo", "labels": {}}}


def pod(name: str, address: str, namespace: str = "gspo") -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name}
    metadata = {"name": f"{name}-0", "namespace": namespace, "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"podIP": address}}


def policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "gspo"}, "spec": spec}


def lines(*policies: dict[str, Any]) -> list[str]:
    pods = [pod("api", "10.1.0.1"), pod("redis", "10.1.0.2"), pod("redis", "10.1.0.9", "kube-system")]
    made = rules(Cluster(policies, [NAMES, OURS], pods)).splitlines()
    return [line for line in made if line.startswith("-A")][1:]  # the first lets answers through


def selecting(name: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app.kubernetes.io/name": name}}}


def test_without_a_policy_everything_is_let_through() -> None:
    assert lines() == []


def test_a_pod_that_a_policy_is_about_is_reached_by_what_it_names_and_by_nothing_else() -> None:
    rule = {"from": [selecting("api")], "ports": [{"protocol": "TCP", "port": 6379}]}
    assert lines(policy(**selecting("redis"), policyTypes=["Ingress"], ingress=[rule])) == [
        "-A TEST-POLICY -d 10.1.0.2 -j TEST-POLICY-I1",
        "-A TEST-POLICY-I1 -s 10.1.0.1 -p tcp --dport 6379 -j RETURN",
        "-A TEST-POLICY-I1 -j DROP",
    ]


def test_policies_of_one_direction_add_up_and_leave_the_other_alone() -> None:
    outward = policy(podSelector={}, policyTypes=["Egress"])
    names = {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]}
    assert lines(outward, policy(**selecting("api"), policyTypes=["Egress"], egress=[names])) == [
        "-A TEST-POLICY -s 10.1.0.1 -j TEST-POLICY-E1",
        "-A TEST-POLICY-E1 -d 10.1.0.9 -j RETURN",
        "-A TEST-POLICY-E1 -j DROP",
        "-A TEST-POLICY -s 10.1.0.2 -j TEST-POLICY-E2",
        "-A TEST-POLICY-E2 -j DROP",
    ]


def test_what_is_left_out_of_a_block_of_addresses_is_not_reached() -> None:
    block = {"cidr": "10.0.0.0/30", "except": ["10.0.0.0/31"]}
    rule = {"to": [{"ipBlock": block}], "ports": [{"port": 443}]}
    made = lines(policy(**selecting("api"), policyTypes=["Egress"], egress=[rule]))
    assert made[1:] == [
        "-A TEST-POLICY-E1 -d 10.0.0.2/31 -p tcp --dport 443 -j RETURN",
        "-A TEST-POLICY-E1 -j DROP",
    ]


def test_a_pod_that_has_ended_does_not_speak_for_the_one_that_has_its_address_now() -> None:
    over = pod("backup", "10.1.0.1")
    over["status"]["phase"] = "Succeeded"
    made = rules(Cluster([policy(**selecting("backup"), policyTypes=["Egress"])], [NAMES, OURS], [over]))
    assert "10.1.0.1" not in made


def test_what_it_cannot_enforce_it_refuses() -> None:
    rule = {"from": [selecting("api")], "ports": [{"port": "redis"}]}
    with pytest.raises(ValueError, match="ports"):
        lines(policy(**selecting("redis"), policyTypes=["Ingress"], ingress=[rule]))
