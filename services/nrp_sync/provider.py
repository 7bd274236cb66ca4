"""The port to a network resource provider: what we say to it, what it answers, how it fails.

Why: the engine of nrp_sync speaks in services, locations, addresses, public IPs, load balancers
and NAT gateways. Which cloud stands behind is one file (`client.py` for Azure, `memory.py` for
a provider in this process) and one setting (`open_provider`).

Guarantees, held by one contract suite for every implementation:
- a call that returns was acknowledged; a call that raises says whether it may have been applied
  (`Unknown`) or was certainly not (every other class);
- lists are complete or they raise: a partial read never looks like a small one;
- putting is idempotent, deleting what is gone is success;
- an error names the operation, the code and the request id, never a token or a subscription.

Refuses: increments. An address always carries its complete list of services, so that sending a
batch twice is harmless.

Imports msgspec and the standard library only: the core may use these types.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Protocol

import msgspec

from services.nrp_sync.errors import (
    AuthFailed,
    Conflict,
    InUse,
    Invalid,
    NotFound,
    OverlayMappings,
    PreconditionFailed,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Unknown,
    Unreachable,
    Unreadable,
)
from services.nrp_sync.shapes import (
    DEFAULT_SERVICE,
    Ack,
    Action,
    Address,
    AddressLocation,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    PublicAddress,
    Rule,
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
    asked,
    canonical_ip,
    canonical_names,
)

__all__ = [
    "DEFAULT_SERVICE",
    "Ack",
    "Action",
    "Address",
    "AddressLocation",
    "AuthFailed",
    "Conflict",
    "InUse",
    "Invalid",
    "LoadBalancer",
    "LocationBatch",
    "NatGateway",
    "NotFound",
    "OverlayMappings",
    "PreconditionFailed",
    "Provider",
    "ProviderError",
    "ProviderSettings",
    "PublicAddress",
    "QuotaExceeded",
    "Rule",
    "ServiceBatch",
    "ServiceKind",
    "ServiceRegistration",
    "ServiceUpdate",
    "Throttled",
    "Unknown",
    "Unreachable",
    "Unreadable",
    "asked",
    "canonical_ip",
    "canonical_names",
    "open_provider",
]


class Provider(Protocol):
    """What the engine may ask of a cloud.

    `request_id` of a change is ours: it travels with the request, so that a row written before
    sending can be found again in the provider's logs. Every method may raise a `ProviderError`.
    """

    async def update_services(self, batch: ServiceBatch, *, request_id: str = "") -> Ack:
        """Register and unregister services. An empty PARTIAL batch sends nothing."""
        ...

    async def update_address_locations(self, batch: LocationBatch, *, request_id: str = "") -> Ack:
        """Map addresses to services. An empty PARTIAL batch sends nothing."""
        ...

    async def list_services(self) -> list[ServiceRegistration]:
        """All registrations, the reserved default among them, ordered by name."""
        ...

    async def list_address_locations(self) -> list[AddressLocation]:
        """All locations in canonical form, ordered by location and address."""
        ...

    async def put_public_ip(
        self, wanted: PublicAddress, *, if_match: str = "", request_id: str = ""
    ) -> PublicAddress:
        """Create it or confirm it; returns it as read, with its address when it has one."""
        ...

    async def get_public_ip(self, name: str) -> PublicAddress | None:
        """None: there is none of that name."""
        ...

    async def list_public_ips(self) -> list[PublicAddress]:
        """All of the resource group, foreign ones too."""
        ...

    async def delete_public_ip(self, name: str, *, request_id: str = "") -> None:
        """Gone already is success. `InUse` while something is attached."""
        ...

    async def put_load_balancer(
        self, wanted: LoadBalancer, *, if_match: str = "", request_id: str = ""
    ) -> LoadBalancer:
        """Create or replace it: a rule that is not listed is removed."""
        ...

    async def get_load_balancer(self, name: str) -> LoadBalancer | None:
        """None: there is none of that name."""
        ...

    async def list_load_balancers(self) -> list[LoadBalancer]:
        """All of the resource group, foreign ones too (as far as they fit our shape)."""
        ...

    async def delete_load_balancer(self, name: str, *, request_id: str = "") -> None:
        """Gone already is success."""
        ...

    async def put_nat_gateway(
        self, wanted: NatGateway, *, if_match: str = "", request_id: str = ""
    ) -> NatGateway:
        """Create or replace it; `attached=False` clears the reference to our gateway."""
        ...

    async def get_nat_gateway(self, name: str) -> NatGateway | None:
        """None: there is none of that name."""
        ...

    async def list_nat_gateways(self) -> list[NatGateway]:
        """All of the resource group, foreign ones too."""
        ...

    async def delete_nat_gateway(self, name: str, *, request_id: str = "") -> None:
        """Gone already is success."""
        ...

    async def detach(self, name: str, *, request_id: str = "") -> None:
        """Part service and NAT gateway `name`: clear the reference on either side.

        The second half runs also when the first had nothing to do or failed; a failure of
        either is raised in the end.
        """
        ...

    async def close(self) -> None:
        """Give back connections and credentials. Calls in flight fail."""
        ...


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach a provider. All of Azure's names; another provider takes what it needs."""

    provider: str = "azure"
    """`azure`, `memory`, or `module:function` of a coroutine that takes these settings."""
    base_url: str = ""
    """Empty: the public cloud's. The sandbox puts its own here."""
    subscription_id: str = ""
    resource_group: str = ""
    region: str = ""
    service_gateway: str = "servicegateway"
    vnet: str = ""
    vnet_resource_group: str = ""
    """Empty: the same as `resource_group`."""
    network_subscription_id: str = ""
    """Subscription of the network resources. Empty: the same as `subscription_id`."""
    api_version: str = "2025-09-01"
    token: str = ""
    """A fixed bearer token (sandbox). Empty: azure-identity finds a credential."""
    request_timeout: float = 60.0
    """Seconds for one HTTP exchange."""
    operation_timeout: float = 300.0
    """Seconds for a whole operation, polling included."""
    poll_interval: float = 5.0
    """Seconds between two looks at a long-running operation, unless it says otherwise."""
    max_connections: int = 16
    rate_limit: float = 0.0
    """Requests a second that we allow ourselves per gate (reads, writes); 0: no limit."""

    def __repr__(self) -> str:
        """Without what must not be logged."""
        return f"ProviderSettings(provider={self.provider!r}, gateway={self.service_gateway!r})"

    def problems(self) -> list[str]:
        """What keeps these settings from working, one sentence each."""
        needed = ("subscription_id", "resource_group", "region", "service_gateway", "vnet")
        missing = [f"{name} is empty, it must be set" for name in needed if not getattr(self, name)]
        limits = ("request_timeout", "operation_timeout", "poll_interval", "max_connections")
        return missing + [
            f"{name} is {getattr(self, name)}, it must be above 0"
            for name in limits
            if getattr(self, name) <= 0
        ]


_KNOWN = {
    "azure": "services.nrp_sync.client:connect",
    "memory": "services.nrp_sync.memory:connect",
}


async def open_provider(settings: ProviderSettings) -> Provider:
    """The provider that the settings name; its libraries are imported only here."""
    target = _KNOWN.get(settings.provider, settings.provider)
    module, colon, function = target.partition(":")
    if not colon:
        raise ValueError(
            f"provider is {settings.provider!r}, it must be one of {sorted(_KNOWN)} "
            "or 'module:function'"
        )
    # Azure's SDK takes seconds to import: not on the loop, the health page must answer meanwhile.
    try:
        loaded = await asyncio.to_thread(importlib.import_module, module)
        connect = getattr(loaded, function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"provider is {settings.provider!r}: {error}") from error
    provider: Provider = await connect(settings)
    return provider
