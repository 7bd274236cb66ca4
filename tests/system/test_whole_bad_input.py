"""Bad input to the whole running system: what is wrong is told, and everything else goes on."""

import asyncio
import json

import nats
import pytest

from tests.system.whole import DUMMY, GROUP, Refused, condition, gather
from tests.waiting import eventually

NO_BACKEND = "no running backend servers"
SERVICES = ("allocator", "prober", "nrp_sync", "applier")


async def dead_letters(whole):
    rows = await gather(
        *(whole.rows(f"select subject, reason from {name}.dead_letter") for name in SERVICES)
    )
    return {name: list(found) for name, found in zip(SERVICES, rows, strict=True)}


def payload(name):
    seen = {"type": "LoadBalancerSeen.v1", "at": "2026-11-30T12:00:00Z"}
    return {
        "empty": b"",
        "not-text": b"\xff\xfe\x00",
        "null": b"null",
        "a-list": b"[1,2,3]",
        "half": b'{"type":"LoadBalancerSeen.v1","at":',
        "no-type": json.dumps({"object": {}}).encode(),
        "wrong-field": json.dumps(
            {
                **seen,
                "object": {
                    "metadata": {"name": name, "namespace": "x"},
                    "spec": {"listeners": "not-a-list"},
                },
            }
        ).encode(),
        "large": b'"' + b"x" * 900_000 + b'"',
    }


async def test_malformed_events_cost_a_dead_letter_each(whole, space):
    """[report-43] [report-44] Whatever is put on the streams by hand, on the subject of a living LB
    too: each consumer records it with its reason, says so, stays ready, and goes on with what comes
    after it on the same subject."""
    await space.pool()
    vm = await space.vm("web")
    await space.balancer("web")
    await space.becomes("web", "True")
    held = await space.leases()
    before = await dead_letters(whole)
    subjects = (
        f"kube.loadbalancers.{space.name}.web",
        f"kube.services.{space.name}.forged",
        f"lb.lease.loadbalancers.{space.name}.web",
        f"lb.backends.loadbalancers.{space.name}.web",
    )
    client = await nats.connect(whole.nats.url)
    try:
        stream = client.jetstream()
        for subject in subjects:
            for data in payload("web").values():
                await stream.publish(subject, data)
        unknown = {"Lb-Type": "LoadBalancerSeen.v99"}
        newer = json.dumps({"type": "LoadBalancerSeen.v99", "at": "2026-11-30T12:00:00Z"})
        await stream.publish(subjects[0], newer.encode(), headers=unknown)
    finally:
        await client.close()

    await space.stop_vm("vm1")
    await space.becomes("web", "False", NO_BACKEND)
    await space.vm("web", name="vm1", address=vm)
    await space.becomes("web", "True")
    await space.edit("web", listeners=[space.listener(port=81)])

    async def followed():
        service = await space.api.get("Service", "web", space.name)
        assert [port["port"] for port in service["spec"]["ports"]] == [81]
        return True

    await eventually(followed, 20)
    assert await space.leases() == held
    for name in SERVICES:
        assert await space.api.readiness(name.replace("_", "-")) == (True, "")
    after = await dead_letters(whole)
    added = {name: len(after[name]) - len(before[name]) for name in SERVICES}
    assert added["allocator"] >= 8, added
    assert added["prober"] >= 8, added
    assert added["nrp_sync"] >= 8, added
    assert added["applier"] >= 16, added
    for rows in after.values():
        for row in rows:
            assert row["reason"], row
    client = await nats.connect(whole.nats.url)
    try:
        last = await client.jetstream().get_last_msg("LB", "lb.dead.allocator")
        told = json.loads(last.data)
        assert (told["service"], told["stream"]) == ("allocator", "KUBE")
    finally:
        await client.close()
    for name in SERVICES:
        await whole.rows(f"delete from {name}.dead_letter")


async def test_a_name_with_a_dot_is_a_name(space):
    """[report-44] `my.lb` is legal for a ticket and for a pool, and works."""
    await space.pool(name="p.with.dots")

    await space.balancer(
        "my.lb", workloadType="cluster", listeners=None, backendServerSelector=None
    )
    status = await space.becomes("my.lb", "True")

    assert status["allocatedAddress"] == {
        "ipPool": f"{space.name}-p.with.dots",
        "ip": space.pooled(10),
        "mask": "255.255.255.0",
        "gateway": space.pooled(1),
    }
    with pytest.raises(Refused, match="must be a Service name"):
        await space.balancer("a.vm")


REFUSED = {
    "port-0": ({"listeners": [{"port": 0}]}, "listeners[0].port"),
    "port-70000": ({"listeners": [{"port": 70000}]}, "listeners[0].port"),
    "protocol": ({"listeners": [{"protocol": "ICMP"}]}, "listeners[0].protocol"),
    "no-listener": ({"listeners": []}, "needs at least one listener"),
    "listeners-no-list": ({"listeners": "http"}, "spec.listeners"),
    "two-without-name": ({"listeners": [{"name": ""}, {"name": "", "port": 81}]}, "needs a name"),
    "name-twice": ({"listeners": [{}, {"port": 81, "backendPort": 81}]}, "must be unique"),
    "port-twice": (
        {"listeners": [{}, {"name": "b", "backendPort": 81}]},
        "the same protocol and port",
    ),
    "backend-port-twice": (
        {"listeners": [{}, {"name": "b", "port": 81}]},
        "the same protocol and backendPort",
    ),
    "selector-without-values": ({"backendServerSelector": {"app": []}}, "backendServerSelector"),
    "selector-no-map": ({"backendServerSelector": ["app"]}, "backendServerSelector"),
    "report-66-front-port": (
        {"listeners": [{"port": 8088}], "healthCheck": {"port": 8088}},
        "must be the backendPort (not the front port)",
    ),
    "report-66-udp-only": (
        {
            "listeners": [{"protocol": "UDP", "port": 53, "backendPort": 53}],
            "healthCheck": {"port": 53},
        },
        "of a TCP",
    ),
    "timeout-over-period": (
        {"healthCheck": {"port": 0, "periodSeconds": 1, "timeoutSeconds": 2}},
        "timeoutSeconds must not be longer than periodSeconds",
    ),
    "threshold": ({"healthCheck": {"failureThreshold": -1}}, "failureThreshold"),
    "workload-type": ({"workloadType": "pod"}, "workloadType"),
    "ipam": ({"ipam": "static"}, "ipam"),
    "address": ({"address": "198.18.0"}, "spec.address"),
    "address-by-dhcp": ({"ipam": "dhcp", "address": "198.18.0.1"}, "can't be asked for with ipam"),
}


async def test_nonsense_is_refused_by_the_api_server(space):
    """Each with the field and what would be right."""
    wrong = {}
    for case, (spec, words) in REFUSED.items():
        if isinstance(spec.get("listeners"), list):
            listeners = [{**space.listener(), **item} for item in spec["listeners"]]
            spec = {**spec, "listeners": listeners}
        try:
            await space.balancer("web", **spec)
        except Refused as error:
            if error.code not in (400, 422) or words not in error.message:
                wrong[case] = str(error)
        else:
            wrong[case] = "accepted"
            await space.delete("web")
    assert wrong == {}


TOLD = {
    "selector-value": (
        {"backendServerSelector": {"app": ["no value!"]}},
        {},
        "InvalidSelector",
        "no value!",
    ),
    "selector-key": ({"backendServerSelector": {"a b": ["x"]}}, {}, "InvalidSelector", "a b"),
    "annotation-not-json": (
        {},
        {"lbledger.io/backends": "{"},
        "InvalidAnnotation",
        "lbledger.io/backends",
    ),
    "annotation-address": ({}, {"lbledger.io/address": "here"}, "", "lbledger.io/address"),
    "annotation-family": ({}, {"lbledger.io/ip-families": "IPv5"}, "", "IPv5"),
    "report-12-outside": ({"address": "192.0.2.111"}, {}, "", "192.0.2.111"),
    "report-15-gateway": ({"address": "{pooled}.1"}, {}, "", "gateway"),
    "pool-missing": ({"ipPool": "nope"}, {}, "PoolNotFound", "nope"),
}


async def test_nonsense_that_the_api_server_takes_is_told(space):
    """A condition names field and value; the others are served; correcting it heals."""
    await space.pool()
    vm = await space.vm("web")
    net = space.pooled(0).removesuffix(".0")
    for case, (spec, annotations, _, _) in TOLD.items():
        given = {"backendServerSelector": {"app": ["web"]}, **spec}
        if "address" in given:
            given["address"] = given["address"].format(pooled=net)
        await space.balancer(f"bad-{case.lower()}", annotations=annotations, **given)
    await space.balancer("web")
    await space.becomes("web", "True")

    for case, (_, _, reason, words) in TOLD.items():
        status = await space.becomes(f"bad-{case.lower()}", "False", words)
        assert reason in ("", condition(status)["reason"]), (case, condition(status))

    name = "bad-selector-value"
    await space.edit(name, backendServerSelector={"app": ["web"]})
    await space.becomes(name, "True")
    await space.slice_is(name, {vm: True})
    patch = {"metadata": {"annotations": {"lbledger.io/address": space.pooled(20)}}}
    await space.api.merge("LoadBalancer", "bad-annotation-address", space.name, patch)
    await space.becomes("bad-annotation-address", "True", also=lambda s: s["address"])
    assert (await space.leases("bad-annotation-address")).popitem()[1] == space.pooled(20)


async def test_objects_that_fit_no_view(space):
    """A VM whose status is nonsense is no reason to lose the others, nor what it said before."""
    await space.pool()
    good = await space.vm("web", name="good")
    changing = await space.vm("web", name="changing")
    await space.balancer("web")
    await space.becomes("web", "True")
    await space.slice_is("web", {good: True, changing: True})

    for nonsense in ("10.0.0.1", [{"ipAddress": 5}], [["x"]], {"a": 1}):
        patch = {"status": {"interfaces": nonsense}}
        await space.api.merge("VirtualMachineInstance", "changing", space.name, patch)
    third = await space.vm("web", name="third")
    await space.slice_is("web", {good: True, changing: True, third: True})

    patch = {"status": {"interfaces": [{"name": "default", "ipAddress": space.address(77)}]}}
    await space.api.merge("VirtualMachineInstance", "changing", space.name, patch)
    await space.slice_is("web", {good: True, space.address(77): True, third: True})
    for address in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "fe80::1", "not-an-address", "10.0.0.0/8"):
        patch = {"status": {"interfaces": [{"name": "default", "ipAddress": address}]}}
        await space.api.merge("VirtualMachineInstance", "changing", space.name, patch)
        await space.slice_is("web", {good: True, third: True})


async def test_report_36_large_objects(space):
    """[report-36] A slice of a thousand long endpoints, a VM of a megabyte and an LB with a
    selector of a megabyte are taken or told; a small change behind them is seen."""
    await space.pool()
    vm = await space.vm("web")
    await space.balancer("web")
    await space.becomes("web", "True")
    endpoints = [
        {
            "addresses": [f"10.{space.number}.{n // 250 + 20}.{n % 250 + 1}"],
            "conditions": {"ready": True},
            "hostname": f"{'h' * 50}-{n}",
            "zone": "z" * 200,
        }
        for n in range(1000)
    ]
    await space.api.create(
        {
            "kind": "EndpointSlice",
            "metadata": {
                "name": "big",
                "namespace": space.name,
                "labels": {"kubernetes.io/service-name": "nobody"},
            },
            "addressType": "IPv4",
            "ports": [],
            "endpoints": endpoints,
        }
    )
    await space.api.create(
        {
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "big", "namespace": space.name, "labels": {"app": "web"}},
            "spec": {"cloudInit": "x" * 1_200_000},
            "status": {"interfaces": [{"name": "default", "ipAddress": space.address(99)}]},
        }
    )
    values = [f"{n:03d}{'v' * 57}" for n in range(240)]
    selector = {f"key{n}": values for n in range(64)}
    await space.balancer("wide", backendServerSelector=selector)

    await space.slice_is("web", {space.address(99): True, vm: True})
    await space.becomes("wide", "False")
    await space.stop_vm("big")
    await space.slice_is("web", {vm: True})


async def test_report_14_addresses_are_compared_not_spelled(space):
    """[report-14] Another spelling of an IPv6 address is the same address; an IPv4 address in IPv6
    clothes is no second holder of it."""
    net = f"2001:db8:{space.number:x}"
    ranges = [
        {"subnet": space.pooled(0) + "/29"},
        {"subnet": f"{net}::/125"},
    ]
    pool = await space.pool(ranges=ranges)
    ticket = {"workloadType": "cluster", "listeners": None, "backendServerSelector": None}

    await space.balancer("six", ipPool=pool, address=f"{net}:0:0:0:0:3", **ticket)
    six = await space.becomes("six", "True")
    await space.balancer("again", ipPool=pool, address=f"{net}::0003", **ticket)
    await space.balancer("mapped", ipPool=pool, address=f"::ffff:{space.pooled(4)}", **ticket)
    await space.becomes("again", "False", f"{net}::3")

    async def decided():
        return condition(await space.status("mapped"))

    await eventually(decided, 20)
    await space.balancer("four", ipPool=pool, address=space.pooled(4), **ticket)

    async def one_holder():
        held = await space.leases()
        assert len([n for n, a in held.items() if a == space.pooled(4)]) == 1, held
        assert not [a for a in held.values() if a.startswith("::ffff")], held
        return True

    await eventually(one_holder, 20)
    assert six["allocatedAddress"]["ip"] == f"{net}::3"


async def test_a_flood_of_one_client_does_not_stop_another(space):
    """A hundred unservable LBs are told, and one that is right is ready within the same time."""
    await space.pool()
    await space.vm("web")
    flood = [space.balancer(f"flood{n}", ipPool="nope") for n in range(100)]
    await asyncio.gather(*flood, space.balancer("web"))

    await space.becomes("web", "True", timeout=20)
    for n in (0, 50, 99):
        status = await space.becomes(f"flood{n}", "False", "nope")
        assert condition(status)["reason"] == "PoolNotFound"


async def test_slices_of_others_are_no_backends(space):
    """A slice that somebody labels for the LB's Service is left alone and never becomes ours."""
    await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)
    foreign = {
        "kind": "EndpointSlice",
        "metadata": {
            "name": "web-foreign",
            "namespace": space.name,
            "labels": {"kubernetes.io/service-name": "web", f"{GROUP}/servicelb": "true"},
        },
        "addressType": "IPv4",
        "ports": [],
        "endpoints": [{"addresses": [space.address(50)], "conditions": {"ready": True}}],
    }
    await space.api.create(foreign)

    await space.quiet()
    found = await space.api.get("EndpointSlice", "web-foreign", space.name)

    assert found["endpoints"] == foreign["endpoints"]
    assert await space.endpoints("web") == {DUMMY: True}
    assert condition(await space.status("web"))["status"] == "False"
