"""The applier against a Kubernetes API, NATS and Postgres: load balancers of virtual machines."""

import pytest

from schema import names
from tests.system.applier_rig import (
    DUMMY,
    FORMS,
    GROUP,
    SERVICE,
    SLICE,
    backend,
    stage,
)


@pytest.mark.parametrize("form", FORMS)
async def test_a_vm_load_balancer_is_brought_to_ready_in_four_writes(
    nats_url, database_url, tmp_path, form
):
    """Service, slice, ingress and one status, whatever form the CRD has; and then silence."""
    async with stage(nats_url, database_url, tmp_path, form=form) as s:
        owner = await s.balancer("web")
        s.forget()

        await s.granted(owner, "192.0.2.10")
        await s.resolved(owner, backend("vm1", "10.52.1.7"))
        ready = await s.settles(owner, "Ready")
        await s.still()

        assert ready["status"] == "True"
        assert sum(s.writes().values()) == 4, s.writes()
        status = await s.status(owner)
        assert status["address"] == "192.0.2.10"
        assert status["allocatedAddress"] == {
            "ipPool": "p1",
            "ip": "192.0.2.10",
            "mask": "255.255.255.0",
            "gateway": "192.0.2.1",
        }
        assert status["backendServers"] == ["10.52.1.7"]


async def test_service_and_slice_have_harvesters_shape(nats_url, database_url, tmp_path):
    """Names, labels, owner, ports, target reference: as kube-vip and the UI expect them."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")

        service = await s.get(SERVICE, "web")
        found = await s.get(SLICE, "web")

        reference = {
            "apiVersion": f"{GROUP}/v1beta1",
            "kind": "LoadBalancer",
            "name": "web",
            "uid": owner.uid,
        }
        assert service["metadata"]["ownerReferences"] == [reference]
        assert service["metadata"]["labels"] == {names.SERVICELB_LABEL: "true"}
        assert service["spec"]["loadBalancerIP"] == "192.0.2.10"
        assert "selector" not in service["spec"]
        (port,) = service["spec"]["ports"]
        del port["nodePort"]
        assert port == {"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}
        assert service["status"]["loadBalancer"]["ingress"][0]["ip"] == "192.0.2.10"
        assert found["metadata"]["ownerReferences"] == [reference]
        assert found["metadata"]["labels"] == {
            names.SERVICELB_LABEL: "true",
            names.SERVICE_NAME_LABEL: "web",
        }
        assert found["addressType"] == "IPv4"
        assert found["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]
        assert found["endpoints"] == [
            {
                "addresses": ["10.52.1.7"],
                "conditions": {"ready": True},
                "targetRef": {"namespace": "default", "name": "vm1", "uid": "uid-vm1"},
            }
        ]


async def test_dummy_is_swapped_in_one_write(nats_url, database_url, tmp_path):
    """[report-17] A slice always has a ready endpoint; the real one replaces the dummy, and back,
    in one write of the slice and one of the status."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.balancer("web")
        vm = backend("vm1", "10.52.1.7", ready=False, state="unknown")
        await s.granted(owner, "192.0.2.10")
        await s.resolved(owner, vm, checked=True)
        waiting = await s.settles(owner, "NotHealthy")
        await s.still()
        assert waiting["message"] == (
            "running backend servers are not probed as healthy total:1, healthy:0"
        )
        for ready, reason, addresses in (
            (True, "Ready", {"10.52.1.7"}),
            (False, "NotHealthy", {DUMMY}),
        ):
            s.forget()
            await s.verdict(owner, vm, ready, dummy="" if ready else DUMMY)
            await s.settles(owner, reason)
            await s.still()

            assert s.writes() == {
                "patch endpointslices": 1,
                "patch loadbalancers/status": 1,
            }
            endpoints = (await s.get(SLICE, "web"))["endpoints"]
            assert {e["addresses"][0] for e in endpoints if e["conditions"]["ready"]} == addresses
