"""One request to the provider, made as its row says, and how it ended.

Every failure becomes a value that says whether it may have been applied; what is no failure of the
provider's (a bug, a cancelled call) counts as "may have been".
"""

from __future__ import annotations

import time
from typing import Final

import structlog

from services.nrp_sync import provider as port
from services.nrp_sync.batches import LocationCall
from services.nrp_sync.errors import LONGEST_WAIT
from services.nrp_sync.provider import Provider, ProviderError, ServiceBatch
from services.nrp_sync.state import Done, Failed, Outcome, Request, Snapshot
from services.nrp_sync.steps import Failure, Verb

log = structlog.get_logger()

KINDS: Final[tuple[tuple[type[ProviderError], str], ...]] = (
    (port.Throttled, "throttled"),
    (port.PreconditionFailed, "precondition_failed"),
    (port.InUse, "in_use"),
    (port.Conflict, "conflict"),
    (port.NotFound, "not_found"),
    (port.Invalid, "invalid"),
    (port.QuotaExceeded, "quota_exceeded"),
    (port.OverlayMappings, "overlay_mappings"),
    (port.AuthFailed, "auth_failed"),
    (port.Unreachable, "unreachable"),
    (port.Unreadable, "unreadable"),
)
LONGEST_TEXT: Final = 1000


async def perform(provider: Provider, request: Request) -> Outcome:
    """Make the call; never raises, except when cancelled."""
    began = time.monotonic()
    try:
        done = await _call(provider, request)
    except ProviderError as error:
        return Failed(failure=failure_of(error), duration=time.monotonic() - began)
    except Exception as error:
        log.exception("nrp.call_failed", verb=request.verb, request=request.id)
        failure = Failure(kind="unknown", code=type(error).__name__, message=_text(str(error)))
        return Failed(failure=failure, duration=time.monotonic() - began)
    return Done(
        provider_request=_text(done.provider_request),
        address=done.address,
        snapshot=done.snapshot,
        duration=time.monotonic() - began,
    )


def failure_of(error: ProviderError) -> Failure:
    kind = next((kind for cls, kind in KINDS if isinstance(error, cls)), "unknown")
    return Failure(
        kind=kind,
        code=_text(error.code),
        message=_text(error.message),
        retry_after=_wait(error.retry_after),
        provider_request=_text(error.request_id),
        metric=error.metric_class,
    )


def _text(said: str) -> str:
    """What the provider said, as text that a row and an event can hold."""
    clean = said[:LONGEST_TEXT].replace("\0", " ")
    return clean.encode("utf-8", "replace").decode()


def _wait(seconds: float | None) -> float | None:
    """The wait that was asked for, None when it is no number of seconds."""
    if seconds is None or not seconds >= 0.0:  # not a number compares with nothing
        return None
    return min(seconds, LONGEST_WAIT)


async def _call(provider: Provider, request: Request) -> Done:
    payload, number = request.payload, request.id
    if request.lane == "read":
        return Done(snapshot=await read(provider))
    if isinstance(payload, LocationCall):
        ack = await provider.update_address_locations(payload.batch, request_id=number)
        return Done(provider_request=ack.request_id)
    if isinstance(payload, ServiceBatch):
        ack = await provider.update_services(payload, request_id=number)
        return Done(provider_request=ack.request_id)
    if isinstance(payload, port.PublicAddress):
        made = await provider.put_public_ip(payload, request_id=number)
        return Done(address=made.address or "")
    if isinstance(payload, port.LoadBalancer):
        await provider.put_load_balancer(payload, request_id=number)
    elif isinstance(payload, port.NatGateway):
        await provider.put_nat_gateway(payload, request_id=number)
    else:
        await _remove(provider, request)
    return Done()


async def _remove(provider: Provider, request: Request) -> None:
    outbound = request.parts[0].kind == "outbound"
    match Verb(request.verb):
        case Verb.DELETE_PUBLIC_IP:
            await provider.delete_public_ip(request.target, request_id=request.id)
        case Verb.DELETE_BALANCER if outbound:
            await provider.delete_nat_gateway(request.target, request_id=request.id)
        case Verb.DELETE_BALANCER:
            await provider.delete_load_balancer(request.target, request_id=request.id)
        case Verb.DETACH:
            await provider.detach(request.target, request_id=request.id)
        case verb:
            raise ValueError(f"no call is known for {verb}")


async def read(provider: Provider) -> Snapshot:
    """All that the provider holds. One list that fails fails the whole."""
    return Snapshot(
        services=await provider.list_services(),
        locations=await provider.list_address_locations(),
        public_ips=await provider.list_public_ips(),
        load_balancers=await provider.list_load_balancers(),
        nat_gateways=await provider.list_nat_gateways(),
    )
