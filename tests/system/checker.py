"""Whether the whole is right: compares what the cluster asks for with what became of it.

It shares no rule with the services: what is expected is computed here from the objects as the API
server shows them, from which listeners are open, and from the tables. `settled` must hold in the
end, `history` held at every instant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from schema import events
from schema.names import NRP_CLASS, POOL_CLASS, SERVICE_NAME_LABEL, SERVICELB_LABEL
from schema.tables import SERVICES
from services.kit.bus import Bus
from tests.system.whole import DUMMY, Recorder, Space, Whole, condition, provided

Object = dict[str, Any]
# What each service can't do without having read, up to its last message.
READS: Final = {
    "allocator": {"KUBE": ("kube.loadbalancers.>", "kube.services.>", "kube.ippools.>")},
    "prober": {"KUBE": ("kube.loadbalancers.>", "kube.virtualmachineinstances.>")},
    "nrp_sync": {"KUBE": ("kube.services.>", "kube.endpointslices.>", "kube.nodes.>")},
    "applier": {
        "KUBE": ("kube.loadbalancers.>", "kube.services.>", "kube.endpointslices.>"),
        "LB": ("lb.lease.>", "lb.backends.>", "lb.health.>", "lb.provider.>"),
    },
}


class Checker:
    def __init__(self, whole: Whole, spaces: Iterable[Space]) -> None:
        self.whole, self.spaces = whole, list(spaces)
        self.api = self.spaces[0].api
        self._bus: Bus | None = None

    async def __aenter__(self) -> Checker:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._bus is not None:
            await self._bus.close()

    async def bus(self) -> Bus:
        if self._bus is None:
            self._bus = await Bus.connect(self.whole.nats.url, name="checker")
        return self._bus

    # --- in the end ---

    async def settled(self) -> bool:
        """For `eventually`: raises AssertionError with everything that is not as it must be."""
        problems: list[str] = []
        for space in self.spaces:
            problems += await self._space(space)
        problems += await self._pools()
        problems += await self._provider()
        problems += await self._positions()
        assert not problems, "\n".join(problems)
        return True

    async def _space(self, space: Space) -> list[str]:
        balancers = await self.api.list("LoadBalancer", space.name)
        services = await self.api.list("Service", space.name)
        owners = {b["metadata"]["uid"]: b for b in balancers}
        owners |= {s["metadata"]["uid"]: s for s in services if of_class(s, POOL_CLASS)}
        rows = await self.whole.rows(
            "select uid, name, host(address) as address, pool from allocator.lease"
            " where namespace = $1 and upper_inf(during)",
            space.name,
        )
        held: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            held[row["uid"]].append(row)
        problems = [
            f"{space.name}/{row['name']}: {row['address']} is leased and nobody owns it"
            for row in rows
            if row["uid"] not in owners
        ]
        by_name = {service["metadata"]["name"]: service for service in services}
        slices = {
            s["metadata"]["name"]: s for s in await self.api.list("EndpointSlice", space.name)
        }
        machines = await self.api.list("VirtualMachineInstance", space.name)
        for uid, owner in owners.items():
            name = f"{space.name}/{owner['metadata']['name']}"
            told = await self._owner(owner, held[uid])
            if "listeners" in owner["spec"]:
                told += self._balancer(space, owner, held[uid], by_name, slices, machines)
            problems += [f"{name}: {one}" for one in told]
        return problems

    async def _owner(self, owner: Object, leases: list[Any]) -> list[str]:
        """The address that is shown is the leased one; without a lease there is a reason."""
        status = owner.get("status") or {}
        balancer = "listeners" in owner["spec"]
        shown = (
            (status.get("allocatedAddress") or {}).get("ip", "") if balancer else ingress_of(owner)
        )
        if balancer and owner["spec"].get("ipam") == "dhcp":
            return [] if (shown, leases) == ("0.0.0.0", []) else [f"dhcp shows {shown!r}, {leases}"]
        if len(leases) > 1:
            return [f"holds {leases}"]
        if leases:
            found = leases[0]["address"]
            return [] if shown == found else [f"shows {shown!r}, the ledger says {found}"]
        ready = condition(status, "Ready" if balancer else "lbledger.io/Ready")
        problems = [f"shows {shown!r} without a lease"] if shown else []
        if ready.get("status") != "False":
            return [*problems, f"has no lease and Ready is {ready}"]
        if ready["reason"] == "PoolExhausted":
            free = await self._free_of(owner["spec"].get("ipPool", ""), ready["message"])
            problems += [f"told {ready['message']!r}, and {free} are free"] if free else []
        return problems

    def _balancer(
        self,
        space: Space,
        owner: Object,
        leases: list[Any],
        services: dict[str, Object],
        slices: dict[str, Object],
        machines: list[Object],
    ) -> list[str]:
        """Service, slice and Ready of one load balancer."""
        name, spec = owner["metadata"]["name"], owner["spec"]
        wanted = expected_endpoints(space, spec, machines)
        ready = condition(owner.get("status") or {})
        problems = []
        found = slices.get(name)
        if found is not None:
            shown = [
                (e["addresses"][0], e["conditions"]["ready"]) for e in found.get("endpoints") or []
            ]
            if shown != wanted:
                problems.append(f"its slice is {shown}, it must be {wanted}")
        if not leases:
            return problems
        service = services.get(name)
        if service is None or found is None:
            return [*problems, f"Service: {service is not None}, slice: {found is not None}"]
        if ingress_of(service) != leases[0]["address"]:
            problems.append(f"its Service is published at {ingress_of(service)!r}")
        if [ref["uid"] for ref in service["metadata"]["ownerReferences"]] != [
            owner["metadata"]["uid"]
        ]:
            problems.append("its Service belongs to another")
        serving = any(is_ready for address, is_ready in wanted if address != DUMMY)
        if (ready.get("status") == "True") != serving:
            problems.append(f"Ready is {ready}, with the backends {wanted}")
        return problems

    async def _free_of(self, named: str, message: str) -> int:
        """How many addresses the pool of a refusal has free, by the tables."""
        free = 0
        for space in self.spaces:
            for pool in space.pools:
                if pool == named or f"pool {pool}," in message:
                    size = await self._size(pool)
                    used = await self.whole.rows(
                        "select count(*) from allocator.lease where pool = $1"
                        " and upper_inf(during)",
                        pool,
                    )
                    free += size - used[0][0]
        return free

    async def _size(self, pool: str) -> int:
        found = await self.api.get("IPPool", pool)
        if found is None:
            return 0
        (item,) = found["spec"]["ranges"]
        first, last = (int(item[end].rpartition(".")[2]) for end in ("rangeStart", "rangeEnd"))
        return last - first + 1

    async def _pools(self) -> list[str]:
        """The status of a pool counts and lists what the ledger holds."""
        problems = []
        for space in self.spaces:
            for pool in space.pools:
                found = await self.api.get("IPPool", pool)
                if found is None:
                    continue
                status = found.get("status") or {}
                rows = await self.whole.rows(
                    "select host(address) as address, namespace, name from allocator.lease"
                    " where pool = $1 and upper_inf(during)",
                    pool,
                )
                held = {row["address"]: f"{row['namespace']}/{row['name']}" for row in rows}
                size = await self._size(pool)
                if status.get("available") != size - len(held) or status.get("total") != size:
                    problems.append(f"pool {pool}: {status} with {len(held)} leases")
                if (status.get("allocated") or {}) != held:
                    problems.append(f"pool {pool} lists {status.get('allocated')}, not {held}")
        return problems

    async def _provider(self) -> list[str]:
        """It holds the pods of every Service of its class, and nothing of anybody else."""
        state = await self.api.provider("GET", "state")
        problems, wanted_uids = [], set()
        for space in self.spaces:
            slices = await self.api.list("EndpointSlice", space.name)
            for service in await self.api.list("Service", space.name):
                if not of_class(service, NRP_CLASS):
                    continue
                name, uid = service["metadata"]["name"], service["metadata"]["uid"]
                wanted_uids.add(uid)
                wanted = {
                    endpoint["addresses"][0]
                    for found in slices
                    if found["metadata"]["labels"].get(SERVICE_NAME_LABEL) == name
                    for endpoint in found.get("endpoints") or []
                }
                held = provided(state, uid)
                if held != wanted:
                    problems.append(f"provider: {name} has {held}, it must have {wanted}")
                if not ingress_of(service):
                    problems.append(f"{name} has no ingress")
        for gateway in state["gateways"].values():
            named = {
                uid
                for location in gateway["addressLocations"]
                for address in location["addresses"]
                for uid in address["services"]
            }
            if named - wanted_uids:
                problems.append(f"provider: addresses of {named - wanted_uids}, who are gone")
        return problems

    async def _positions(self) -> list[str]:
        """Every decision is published, and everybody has read to the end."""
        problems = []
        for service in SERVICES:
            (left,) = (await self.whole.rows(f"select count(*) from {service}.outbox"))[0]
            if left:
                problems.append(f"{left} decisions of {service} are not published")
        bus = await self.bus()
        for service, streams in READS.items():
            rows = await self.whole.rows(f"select stream, seq from {service}.stream_offset")
            positions = {row["stream"]: row["seq"] for row in rows}
            for stream, patterns in streams.items():
                for pattern in patterns:
                    last = [m.seq async for m in bus.last_per_subject(stream, pattern)]
                    if last and max(last) > positions.get(stream, 0):
                        problems.append(
                            f"{service} is at {positions.get(stream)} of {stream}, "
                            f"{pattern} at {max(last)}"
                        )
        return problems

    # --- at every instant ---

    async def history(self, seen: Recorder) -> list[str]:
        """What must have held all the time; to be called when everything has settled."""
        problems = await self._overlaps()
        problems += check_slices(seen)
        if shown := check_statuses(seen):
            problems += [*shown, *await self._ledger()]
        page = await self.api.provider("GET", "requests?limit=0")
        problems += [f"two requests at once for {one}" for one in page["overlaps"]]
        return problems

    async def _ledger(self) -> list[str]:
        """All of it, to understand a failure by."""
        rows = await self.whole.rows(
            "select host(address) as address, name, left(uid, 8) as uid, during, release_reason"
            " from allocator.lease where namespace = any($1) order by address, lower(during)",
            [space.name for space in self.spaces],
        )
        return [
            f"ledger: {r['address']} {r['name']} ({r['uid']}) {r['during'].lower:%H:%M:%S.%f} to "
            f"{r['during'].upper} {r['release_reason']}"
            for r in rows
        ]

    async def _overlaps(self) -> list[str]:
        rows = await self.whole.rows(
            "select host(a.address) as address, a.name, b.name as other"
            " from allocator.lease a join allocator.lease b"
            " on a.id < b.id and a.address = b.address"
            " and a.during && b.during and a.slots && b.slots"
        )
        return [f"{r['address']} was held by {r['name']} and {r['other']} at once" for r in rows]

    async def told_once(self) -> list[str]:
        """Every lease of the ledger was granted in one event, and every end told in one. Holds as
        long as the log was not lost."""
        granted: dict[str, int] = defaultdict(int)
        released: dict[str, int] = defaultdict(int)
        bus = await self.bus()
        state = await bus.stream_state("LB")
        owned = tuple(f"lb.lease.*.{space.name}.>" for space in self.spaces)
        puller = bus.puller("LB", start_seq=1, filters=owned)
        while messages := await puller.fetch(1000, 0.5):
            for message in messages:
                match events.decode(message.data):
                    case events.LeaseGranted(lease=lease) | events.LeaseAdopted(lease=lease):
                        granted[lease] += 1
                    case events.LeaseReleased(lease=lease):
                        released[lease] += 1
                    case _:
                        pass
            if puller.lag == 0 or messages[-1].seq >= state.last_seq:
                break
        await puller.close()
        problems = []
        for row in await self.whole.rows(
            "select id, name, upper_inf(during) as live from allocator.lease"
            " where namespace = any($1)",
            [space.name for space in self.spaces],
        ):
            counts = (granted[row["id"]], released[row["id"]])
            if counts != (1, 0 if row["live"] else 1):
                problems.append(f"lease {row['id']} of {row['name']}: {counts} events, {row}")
        return problems


def of_class(service: Object, class_: str) -> bool:
    spec = service["spec"]
    return spec.get("type") == "LoadBalancer" and spec.get("loadBalancerClass") == class_


def ingress_of(service: Object) -> str:
    entries = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
    return ",".join(entry["ip"] for entry in entries)


def expected_endpoints(
    space: Space, spec: Object, machines: list[Object]
) -> list[tuple[str, bool]]:
    """The endpoints of a load balancer in order, with the dummy where nothing is ready."""
    selector = spec.get("backendServerSelector") or {}
    checked = bool((spec.get("healthCheck") or {}).get("port"))
    found = []
    for machine in sorted(machines, key=lambda m: m["metadata"]["name"]):
        labels = machine["metadata"].get("labels") or {}
        matches = selector and all(labels.get(key) in values for key, values in selector.items())
        if not matches or machine["metadata"].get("deletionTimestamp"):
            continue
        for interface in machine["status"].get("interfaces") or []:
            if address := interface.get("ipAddress"):
                open_ = space.backends.answers(space.dialled(address), space.port)
                found.append((address, open_ or not checked))
                break
    return found if any(ready for _, ready in found) else [*found, (DUMMY, True)]


def check_slices(seen: Recorder) -> list[str]:
    """A slice of ours always had a ready endpoint, and the dummy exactly when nothing else was."""
    problems = []
    for found in seen.of("EndpointSlice"):
        meta = found["metadata"]
        if (meta.get("labels") or {}).get(SERVICELB_LABEL) != "true" or foreign(meta):
            continue
        endpoints = found.get("endpoints") or []
        ready = [e["addresses"][0] for e in endpoints if e["conditions"].get("ready")]
        if not ready or (DUMMY in ready and len(ready) > 1):
            problems.append(f"slice {meta['namespace']}/{meta['name']} had {endpoints}")
    return problems


def foreign(meta: Object) -> bool:
    """Whether the last writer was somebody else: a hand that edited it."""
    managed = sorted(meta.get("managedFields") or [], key=lambda entry: entry.get("time", ""))
    return bool(managed) and managed[-1]["manager"] != "lbledger"


def check_statuses(seen: Recorder) -> list[str]:
    """No address was shown by two owners at any instant, in the order of the API server."""
    problems = []
    holders: dict[str, dict[str, str]] = defaultdict(dict)  # address -> uid -> name
    shown: dict[str, set[str]] = {}
    changes = [c for c in seen.changes if c.kind in ("LoadBalancer", "Service")]
    kind_of: dict[str, str] = {}
    for change in sorted(changes, key=lambda c: c.at):
        kind, type_, found = change.kind, change.type, change.object
        if type_ == "GAP":  # what was known of the kind grows old: a list follows
            for uid in [uid for uid, of in kind_of.items() if of == kind]:
                for address in shown.pop(uid, set()):
                    holders[address].pop(uid, None)
            continue
        meta, status = found["metadata"], found.get("status") or {}
        uid = meta["uid"]
        kind_of[uid] = kind
        fields: Object = {}
        if type_ != "DELETED" and kind == "LoadBalancer":
            allocated = (status.get("allocatedAddress") or {}).get("ip", "")
            fields = {"allocated": allocated, "address": status.get("address", "")}
        elif type_ != "DELETED" and of_class(found, POOL_CLASS):
            fields = {"ingress": ingress_of(found)}
        addresses = set(fields.values()) - {"", "0.0.0.0"}
        for address in shown.get(uid, set()) - addresses:
            holders[address].pop(uid, None)
        shown[uid] = addresses
        for address in addresses:
            name = f"{kind} {meta['namespace']}/{meta['name']}"
            who = f"{name} ({uid[:8]}, version {change.at}, {fields})"
            holders[address].setdefault(uid, who)
            if len(holders[address]) > 1:
                problems.append(f"{address} was shown by {sorted(holders[address].values())}")
    return problems
