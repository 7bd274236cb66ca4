"""Which objects are behind which load balancer."""

import random

import pytest

from schema import objects
from services.prober.members import PODS, VMIS, Members, matches, member
from tests.core.prober_objects import NOW, machine, pod, ref


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ({}, {"a": "1"}, False),
        ({"a": ["1"]}, {"a": "1"}, True),
        ({"a": ["1", "2"]}, {"a": "2"}, True),
        ({"a": ["1"]}, {"a": "2"}, False),
        ({"a": ["1"]}, {}, False),
        ({"a": ["1"], "b": ["2"]}, {"a": "1"}, False),
        ({"a": ["1"], "b": ["2", "3"]}, {"a": "1", "b": "3", "c": "4"}, True),
        ({"a": [""]}, {"a": ""}, True),
    ],
)
def test_every_key_must_match_by_one_of_its_values(selector, labels, expected):
    """AND over keys, IN over values; a selector without keys matches nothing."""
    assert matches(selector, labels) is expected


@pytest.mark.parametrize(
    ("obj", "addresses"),
    [
        pytest.param(machine("vm", "10.0.0.4"), ["10.0.0.4"], id="ipv4"),
        pytest.param(machine("vm"), [""], id="no-address"),
        pytest.param(machine("vm", "10.0.0.400"), [""], id="malformed"),
        pytest.param(machine("vm", "2001:db8::1"), [""], id="ipv6-only"),
        pytest.param(machine("vm", "fe80::1", "10.0.0.5"), ["10.0.0.5"], id="second-interface"),
        pytest.param(machine("vm", "127.0.0.1", "10.0.0.5"), ["10.0.0.5"], id="loopback"),
        pytest.param(machine("vm", "10.0.0.4", deleting=NOW), [], id="deleting"),
        pytest.param(machine("vm", "10.0.0.4", phase="Failed"), [], id="failed"),
        pytest.param(machine("vm", "10.0.0.4", phase="Succeeded"), [], id="succeeded"),
        pytest.param(pod("p", "10.0.0.4", phase="Failed"), [], id="109414-failed-pod"),
        pytest.param(pod("p", "2001:db8::1", "10.0.0.4"), ["10.0.0.4"], id="dual-stack-pod"),
    ],
)
def test_the_address_is_the_first_usable_ipv4(obj, addresses):
    """An object without one still matches; one that is deleting or over does not."""
    found = member(obj)
    assert [found.address("IPv4", "")] == addresses if found else addresses == []


def test_a_named_network_chooses_the_interface():
    """By the interface's name, or by the network's name with or without namespace."""
    vm = machine("vm", "10.0.0.4", "10.1.0.4", "2001:db8::4")
    networks = [
        objects.VMNetwork(name="nic1", multus=objects.MultusNetwork(network_name="default/vlan10")),
        objects.VMNetwork(name="nic2", multus=objects.MultusNetwork(network_name="vlan6")),
    ]
    vm = objects.VirtualMachineInstance(
        metadata=vm.metadata, spec=objects.VMISpec(networks=networks), status=vm.status
    )
    found = member(vm)
    assert found is not None
    assert found.address("IPv4", "nic0") == "10.0.0.4"
    assert found.address("IPv4", "default/vlan10") == "10.1.0.4"
    assert found.address("IPv6", "default/vlan6") == "2001:db8::4"
    assert found.address("IPv4", "default/vlan99") == ""


def test_the_index_equals_a_scan_for_any_history():
    """Whoever selects an object by its old or its new labels is told; the members are all found."""
    rng = random.Random(7)
    members = Members()
    objects_now = {}
    selectors = {}
    for step in range(3_000):
        name, namespace = f"vm{rng.randrange(12)}", rng.choice(["a", "b"])
        plural = rng.choice([VMIS, PODS])
        labels = {k: rng.choice("xyz") for k in "pqr" if rng.random() < 0.6}
        make = machine if plural == VMIS else pod
        obj = make(name, "10.0.0.1", namespace=namespace, labels=labels)
        what = rng.random()
        if what < 0.4:
            old = objects_now.get(ref(obj))
            new = None if rng.random() < 0.3 else member(obj)
            told = members.put(ref(obj), new)
            expected = {
                owner
                for (owner, kind), (ns, selector) in selectors.items()
                for item in (old, new)
                if item and kind == plural and ns == namespace and matches(selector, item.labels)
            }
            assert told == expected, step
            objects_now.pop(ref(obj), None)
            if new is not None:
                objects_now[ref(obj)] = new
        elif what < 0.7:
            owner = f"lb{rng.randrange(8)}"
            selector = {k: rng.sample("xyz", rng.randint(1, 2)) for k in "pq" if rng.random() < 0.6}
            members.select(owner, plural, namespace, selector)
            selectors.pop((owner, plural), None)
            if selector:
                selectors[owner, plural] = namespace, selector
        for (owner, kind), (ns, selector) in selectors.items():
            expected_members = {
                key
                for key, item in objects_now.items()
                if key.plural == kind and key.namespace == ns and matches(selector, item.labels)
            }
            found = {(m.kind, m.name) for m in members.matching(owner, kind)}
            assert len(found) == len(expected_members)
            assert {name for _, name in found} == {key.name for key in expected_members}
