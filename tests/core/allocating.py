"""A cluster in a few words, for tests of the allocator's core: facts in, decisions out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from schema import events, names, objects
from services.allocator.core import Rules, State, account, decide, restore, tick
from services.allocator.core.model import Lease, Owner, Pool
from services.allocator.core.space import Memo

START = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
KINDS = ("ippools", "namespaces", "loadbalancers", "services")
EVERYWHERE = objects.PoolScope(project="*", namespace="*", guest_cluster="*")


class World:
    """One allocator and the facts that it is told, with growing sequences and times."""

    def __init__(self, rules: Rules | None = None, *, synced: bool = True) -> None:
        self.rules = rules or Rules()
        self.state = State(self.rules)
        self.seq = 0
        self.epoch = "e1"
        self.log: list[tuple[events.AnyEvent, int, str]] = []
        self.decisions: list[events.Event] = []
        self._uids = itertools.count(1)
        self.objects: dict[tuple[str, str, str], objects.AnyObject] = {}
        if synced:
            self.sync()

    # --- feeding ---

    def feed(self, fact: events.AnyEvent) -> list[events.Event]:
        self.seq += 1
        self.log.append((fact, self.seq, self.epoch))
        out = decide(self.state, fact, epoch=self.epoch, seq=self.seq)
        self.decisions += out
        return out

    def at(self) -> datetime:
        return START + timedelta(milliseconds=self.seq + 1)

    def sync(self, *kinds: str, absent: bool = False) -> list[events.Event]:
        out = []
        for kind in kinds or KINDS:
            out += self.feed(
                events.SyncFinished(at=self.at(), plural=kind, epoch=self.epoch, absent=absent)
            )
        return out

    def new_epoch(self, epoch: str) -> None:
        self.epoch = epoch
        self.feed(events.EpochStarted(at=self.at(), epoch=epoch, reason="test"))

    def tick(self, seconds: float) -> list[events.Event]:
        out = tick(self.state, self.state.now + timedelta(seconds=seconds))
        self.decisions += out
        return out

    def account(self) -> dict[str, events.PoolAccounted]:
        return {event.pool: event for event in account(self.state)}

    def see(self, obj: objects.AnyObject) -> list[events.Event]:
        plural = objects.PLURALS[type(obj)]
        self.objects[plural, obj.metadata.namespace, obj.metadata.name] = obj
        return self.feed(events.SEEN[plural](at=self.at(), object=obj))

    def meta(self, name: str, namespace: str = "", **fields: object) -> objects.ObjectMeta:
        values = {"uid": f"u{next(self._uids)}", "generation": 1, **fields}
        return objects.ObjectMeta(name=name, namespace=namespace, **values)  # type: ignore[arg-type]

    # --- objects ---

    def pool(
        self,
        name: str,
        *ranges: str,
        scope: Sequence[objects.PoolScope] | None = (EVERYWHERE,),
        network: str = "",
        priority: int = 0,
        status: objects.IPPoolStatus | None = None,
        **fields: object,
    ) -> list[events.Event]:
        """Ranges as `cidr`, `cidr start-end` or `cidr start-end gateway`; `-` leaves one out."""
        known = self.objects.get(("ippools", "", name))
        uid = {"uid": known.metadata.uid} if known else {}
        meta = {k: fields.pop(k) for k in ("annotations", "deletion_timestamp") if k in fields}
        spec = objects.IPPoolSpec(
            ranges=[pool_range(text) for text in ranges],
            selector=objects.PoolSelector(
                priority=priority, network=network, scope=list(scope) if scope else None
            ),
            **fields,  # type: ignore[arg-type]
        )
        return self.see(
            objects.IPPool(metadata=self.meta(name, **uid, **meta), spec=spec, status=status)
        )

    def lb(
        self,
        name: str,
        namespace: str = "default",
        *,
        uid: str = "",
        annotations: dict[str, str] | None = None,
        labels: dict[str, str] | None = None,
        status: objects.LoadBalancerStatus | None = None,
        created: datetime | None = None,
        **spec: object,
    ) -> list[events.Event]:
        known = self.objects.get(("loadbalancers", namespace, name))
        meta: dict[str, object] = {"annotations": annotations, "labels": labels}
        if uid or known:
            meta["uid"] = uid or known.metadata.uid  # type: ignore[union-attr]
        return self.see(
            objects.LoadBalancer(
                metadata=self.meta(name, namespace, creation_timestamp=created, **meta),
                spec=objects.LoadBalancerSpec(**spec),  # type: ignore[arg-type]
                status=status,
            )
        )

    def svc(
        self,
        name: str,
        namespace: str = "default",
        *,
        uid: str = "",
        annotations: dict[str, str] | None = None,
        ingress: Iterable[str] = (),
        kind: str = "LoadBalancer",
        lb_class: str = names.POOL_CLASS,
        created: datetime | None = None,
        ports: Iterable[str] = ("TCP/80",),
        **spec: object,
    ) -> list[events.Event]:
        known = self.objects.get(("services", namespace, name))
        meta: dict[str, object] = {"annotations": annotations}
        if uid or known:
            meta["uid"] = uid or known.metadata.uid  # type: ignore[union-attr]
        shown = [objects.Ingress(ip=ip) for ip in ingress]
        parsed = [text.split("/") for text in ports]
        return self.see(
            objects.Service(
                metadata=self.meta(name, namespace, creation_timestamp=created, **meta),
                spec=objects.ServiceSpec(
                    type=kind,
                    load_balancer_class=lb_class if kind == "LoadBalancer" else "",
                    ports=[objects.ServicePort(protocol=p, port=int(n)) for p, n in parsed],
                    **spec,  # type: ignore[arg-type]
                ),
                status=objects.ServiceStatus(
                    load_balancer=objects.LoadBalancerIngress(ingress=shown or None)
                ),
            )
        )

    def namespace(self, name: str, project: str = "") -> list[events.Event]:
        annotations = {"field.cattle.io/projectId": project} if project else None
        return self.see(objects.Namespace(metadata=self.meta(name, annotations=annotations)))

    def gone(
        self, plural: str, name: str, namespace: str = "default", reason: str = "deleted"
    ) -> list[events.Event]:
        if plural in ("ippools", "namespaces"):
            namespace = ""
        obj = self.objects.pop((plural, namespace, name))
        return self.feed(
            events.ObjectGone(
                at=self.at(),
                plural=plural,
                namespace=namespace,
                name=name,
                uid=obj.metadata.uid,
                reason=reason,
            )
        )

    # --- looking ---

    def addresses(self, plural: str, name: str, namespace: str = "default") -> list[str]:
        from schema import addresses

        owner = self.state.owners[plural].get(f"{namespace}/{name}")
        return [addresses.text(lease.address) for lease in owner.leases] if owner else []

    def lb_address(self, name: str, namespace: str = "default") -> str:
        found = self.addresses("loadbalancers", name, namespace)
        return found[0] if found else ""

    def svc_address(self, name: str, namespace: str = "default") -> str:
        found = self.addresses("services", name, namespace)
        return found[0] if found else ""

    def refusal(self, plural: str, name: str, namespace: str = "default") -> str:
        owner = self.state.owners[plural].get(f"{namespace}/{name}")
        return owner.refusal.reason if owner and owner.refusal else ""

    def message(self, plural: str, name: str, namespace: str = "default") -> str:
        owner = self.state.owners[plural].get(f"{namespace}/{name}")
        return owner.refusal.message if owner and owner.refusal else ""


def pool_range(text: str) -> objects.PoolRange:
    subnet, _, rest = text.partition(" ")
    span, _, gateway = rest.partition(" ")
    start, _, end = span.partition("-") if span != "-" else ("", "", "")
    return objects.PoolRange(subnet=subnet, range_start=start, range_end=end, gateway=gateway)


def shown(address: str, pool: str = "") -> objects.LoadBalancerStatus:
    return objects.LoadBalancerStatus(
        allocated_address=objects.AllocatedAddress(ip=address, ip_pool=pool)
    )


def granted(decisions: Iterable[events.Event]) -> dict[str, str]:
    """Owner name -> address, of the grants and adoptions among some decisions."""
    return {
        event.owner.name: event.address
        for event in decisions
        if isinstance(event, events.LeaseGranted | events.LeaseAdopted)
    }


def kinds(decisions: Iterable[events.Event]) -> list[str]:
    return [type(event).__name__ for event in decisions]


def reborn(state: State, rng: random.Random) -> State:
    """The state of an allocator that starts now, from rows that come in no order."""
    new = State(state.rules)
    new.epoch, new.now, new.serial = state.epoch, state.now, state.serial
    new.legacy, new.imported = state.legacy, state.imported
    new.synced, new.projects = dict(state.synced), dict(state.projects)
    for name in sorted(state.pools):
        old = state.pools[name]
        pool = Pool(name, old.uid, old.view, old.epoch, old.generation, good=old.good)
        pool.last_allocated = old.last_allocated
        pool.claims, pool.history = dict(old.claims), dict(old.history)
        restore.pool(new, pool)
    owners = list(
        {id(one): one for one in [*state.all_owners(), *state.departed.values()]}.values()
    )
    rng.shuffle(owners)
    for one in owners:
        owner = Owner(one.plural, one.key, one.uid, new.intern(one.request), one.epoch)
        owner.generation, owner.phase, owner.ticket = one.generation, one.phase, one.ticket
        rare = ("refusal", "claims", "created", "gone_at", "gone_how", "condemned")
        owner.note(**{field: getattr(one, field) for field in rare})
        restore.owner(new, owner)
    leases = [lease for one in owners for lease in one.leases]
    rng.shuffle(leases)
    for lease in sorted(leases, key=lambda lease: bool(lease.share)):
        one = lease.owner
        holder = restore.holder(new, one.plural, one.key, one.uid)
        held = Lease.of(lease.id, holder, lease.address, lease.pool)
        restore.lease(new, held, lease.share, lease.slots, lease.retiring)
    memos = [
        memo for pool in state.pools.values() for s in pool.spaces.values() for memo in s.in_order()
    ]
    for memo in sorted(memos, key=lambda memo: memo.order):
        restore.memo(
            new, Memo(memo.address, memo.pool, memo.plural, memo.key, memo.released, memo.order)
        )
    restore.finish(new, state.cause.seq)
    return new
