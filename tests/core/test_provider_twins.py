"""Two implementations of the provider's collections, fed with the same random batches.

The sandbox's gateway and the in-memory provider were written apart. Where they differ, one of them
is wrong about what a batch means; and after every batch, refused or not, the sandbox's counters
must be what a recount gives.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sandbox.nrp.arm import ArmError
from sandbox.nrp.gateway import DEFAULT, Gateway, Service
from services.nrp_sync import azure_wire as wire
from services.nrp_sync.azure_errors import classify
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.provider import (
    Action,
    Address,
    AddressLocation,
    LocationBatch,
    ProviderError,
    ProviderSettings,
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
)

IDS = wire.Ids(ProviderSettings(subscription_id="s", resource_group="g", region="r", vnet="v"))

names = st.sampled_from(["web", "WEB", "web-api", "egress", "egress-2", DEFAULT])
actions = st.sampled_from(Action)
partly = st.sampled_from([Action.PARTIAL] * 5 + [Action.FULL])
updates = st.builds(
    ServiceUpdate,
    service=st.builds(ServiceRegistration, name=names, kind=st.sampled_from([*ServiceKind])),
    delete=st.booleans(),
)
addresses = st.builds(
    Address,
    address=st.sampled_from(["10.1.0.1", "10.1.0.2", "10.1.0.3", "2001:db8::1", "2001:DB8::2"]),
    services=st.lists(names, max_size=3).map(tuple),
)
places = st.builds(
    AddressLocation,
    location=st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8:1::1", "2001:DB8:1:0::1"]),
    action=actions,
    addresses=st.lists(addresses, max_size=3).map(tuple),
)


class Twins(RuleBasedStateMachine):
    """Both take a batch or both refuse it for the same reason; then both hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.memory = MemoryProvider()
        self.gateway = Gateway(lambda _: True, max_services=1000, max_addresses=1000)
        self.gateway.services[DEFAULT] = Service(
            name=DEFAULT,
            kind="Outbound",
            nat_gateway=f"/x/natGateways/{DEFAULT}",
            default=True,
        )

    def teardown(self) -> None:
        self.loop.close()

    def send(self, op: str, batch: Any, body: bytes) -> None:
        told: ProviderError | None = None
        other: ProviderError | None = None
        try:
            getattr(self.gateway, op)(msgspec.json.decode(body))()
        except ArmError as error:
            told = classify(op, error.status, error.code, error.message)
        method = {
            "update_services": self.memory.update_services,
            "update_locations": self.memory.update_address_locations,
        }[op]
        try:
            self.loop.run_until_complete(method(batch))
        except ProviderError as error:
            other = error
        assert type(told) is type(other), (told, other)

    @rule(
        batch=st.builds(
            ServiceBatch, services=st.lists(updates, max_size=3).map(tuple), action=partly
        )
    )
    def services(self, batch: ServiceBatch) -> None:
        self.send("update_services", batch, wire.services_body(batch, IDS))

    @rule(name=st.sampled_from(["web", "web-api", "egress", "egress-2"]))
    def register(self, name: str) -> None:
        update = ServiceUpdate(service=ServiceRegistration(name=name, kind=ServiceKind.BOTH))
        batch = ServiceBatch(services=(update,))
        self.send("update_services", batch, wire.services_body(batch, IDS))

    @rule(
        batch=st.builds(
            LocationBatch, locations=st.lists(places, max_size=3).map(tuple), action=partly
        )
    )
    def locations(self, batch: LocationBatch) -> None:
        self.locations_of(batch)

    @rule(batch=st.builds(LocationBatch, locations=st.lists(places, max_size=3).map(tuple)))
    def map_known(self, batch: LocationBatch) -> None:
        """The same, kept to one family and to services that are registered: mostly accepted."""
        entries = []
        for place in batch.locations:
            items = [
                Address(
                    address=item.address,
                    services=tuple(n for n in item.services if n.lower() in self.gateway.services),
                )
                for item in place.addresses
                if (":" in item.address) == (":" in place.location)
            ]
            entries.append(msgspec.structs.replace(place, addresses=tuple(items)))
        self.locations_of(LocationBatch(locations=tuple(entries)))

    def locations_of(self, batch: LocationBatch) -> None:
        self.send("update_locations", batch, wire.locations_body(batch))

    @invariant()
    def same_services(self) -> None:
        seen = [
            wire.service_from(msgspec.Raw(msgspec.json.encode(doc)))
            for doc in self.gateway.service_page("", 1000)[0]
        ]
        expected = self.loop.run_until_complete(self.memory.list_services())
        assert [(s.name, s.kind) for s in seen] == [(s.name, s.kind) for s in expected]

    @invariant()
    def same_locations(self) -> None:
        seen = [
            wire.location_from(msgspec.Raw(msgspec.json.encode(doc)))
            for doc in self.gateway.location_page("", 1000)[0]
        ]
        assert seen == self.loop.run_until_complete(self.memory.list_address_locations())

    @invariant()
    def counters_are_a_recount(self) -> None:
        held = self.gateway.locations
        mapped = Counter(name for a in held.values() for names in a.values() for name in names)
        assert mapped == self.gateway._mapped
        assert sum(map(len, held.values())) == self.gateway._addresses
        assert all(a and all(a.values()) for a in held.values())
        assert mapped.keys() <= self.gateway.services.keys()


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
