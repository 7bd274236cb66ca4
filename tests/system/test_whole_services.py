"""The Service of a load balancer follows the fields that are passed on to it, there and back."""

import pytest

from tests.waiting import eventually

DEFAULT = {
    "externalTrafficPolicy": "Cluster",
    "sessionAffinity": "None",
    "allocateLoadBalancerNodePorts": True,
    "ipFamilyPolicy": "SingleStack",
}


async def shows(space, **wanted):
    async def equal():
        spec = (await space.api.get("Service", "web", space.name))["spec"]
        found = {field: spec.get(field) for field in wanted}
        assert found == wanted, found
        return True

    await eventually(equal, 20)


async def writes(space):
    await space.quiet()
    return (await space.api.sandbox("GET", "counts"))["writes"]


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("externalTrafficPolicy", "Local", {"externalTrafficPolicy": "Local"}),
        ("sessionAffinity", "ClientIP", {"sessionAffinity": "ClientIP"}),
        ("allocateLoadBalancerNodePorts", False, {"allocateLoadBalancerNodePorts": False}),
        ("ipFamilies", ["IPv4", "IPv6"], {"ipFamilyPolicy": "PreferDualStack"}),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0].islower() else "",
)
async def test_what_is_passed_on_is_taken_back_as_well(space, field, value, shown):
    """Set, and left out again: the Service has the default then, and its address all the time."""
    await space.pool()
    await space.vm("web")
    await space.balancer("web")
    await space.becomes("web", "True")
    address = await space.ingress("web")
    await shows(space, **DEFAULT)
    await space.edit("web", **{field: value})
    await shows(space, **DEFAULT | shown)
    await space.edit("web", **{field: ["IPv4"] if field == "ipFamilies" else None})
    await shows(space, **DEFAULT)
    before = await writes(space)
    await space.edit("web", description="nothing of this is a Service's")
    assert await writes(space) <= before + 2  # the edit, and the generation in the status
    assert await space.ingress("web") == address
