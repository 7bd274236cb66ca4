"""Which backends a load balancer has, which are ready, and whether the dummy endpoint stands in.

Pure: facts and verdicts in, events out, times as inputs. The image of a load balancer is its last
BackendsResolved with every HealthChanged since folded in; it is a function of the current facts and
of the verdicts that counted.

Guarantees: an image always has a ready endpoint in each of its families, a backend or else the
dummy, and both change in one event. A new backend is not ready until it has passed; what was ready
when checks came on stays so until it fails; without checks everything is ready. A verdict on
another configuration, an older time or a backend that left changes nothing. Before a kind has been
listed completely nothing is decided from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Final

from schema import objects
from schema.events import Backend, BackendsResolved, HealthChanged, Owner
from schema.subjects import ObjectRef
from services.prober.images import (
    BALANCERS,
    Balancer,
    Dummies,
    Hold,
    Verdict,
    decide,
    fold,
    key_of,
    of_explicit,
    of_member,
    weigh,
)
from services.prober.members import PODS, VMIS, Members, member
from services.prober.plan import Defaults, read

KINDS: Final = (BALANCERS, VMIS, PODS)
MOST_CHANGES: Final = 1_000  # in one event, which the bus has to carry


@dataclass(slots=True)
class State:
    defaults: Defaults
    dummies: Dummies
    balancers: dict[str, Balancer] = field(default_factory=dict)  # by uid
    members: Members = field(default_factory=Members)
    # Owners whose image may have changed; the value says whether the spec did.
    dirty: dict[str, bool] = field(default_factory=dict)
    waiting: dict[str, bool] = field(default_factory=dict)  # as dirty, until a kind is complete
    changed: set[str] = field(default_factory=set)  # owners whose image or checks are others now

    # --- facts ---

    def see_balancer(self, uid: str, new: objects.LoadBalancer | None) -> list[str]:
        """A load balancer's newest form; None when it is gone. Returns who became dirty."""
        if new is None or not _wanted(new):
            self._forget(uid)
            return []
        meta = new.metadata
        known = self.balancers.get(uid)
        plan = read(new, self.defaults)
        if known is None:
            owner = Owner(plural=BALANCERS, namespace=meta.namespace, name=meta.name, uid=uid)
            known = Balancer(owner, meta.generation, new.spec, plan)
            self.balancers[uid] = known
            self.dirty[uid] = True
        elif known.spec != new.spec or known.plan != plan:
            known.generation, known.spec, known.plan = meta.generation, new.spec, plan
            self.dirty[uid] = True
        else:
            return []
        self.members.select(uid, VMIS, meta.namespace, plan.vms)
        self.members.select(uid, PODS, meta.namespace, plan.pods)
        return [uid]

    def see_member(
        self, ref: ObjectRef, new: objects.VirtualMachineInstance | objects.Pod | None
    ) -> list[str]:
        """A possible backend's newest form; None when it is gone. Returns who became dirty."""
        concerned = sorted(self.members.put(ref, member(new)))
        for uid in concerned:
            self.dirty.setdefault(uid, False)
        return concerned

    def see_complete(self) -> None:
        """Another kind is listed completely: who waited may try again."""
        for uid, spec_changed in self.waiting.items():
            self.dirty[uid] = self.dirty.get(uid, False) or spec_changed
        self.waiting.clear()

    def restore(self, image: BackendsResolved) -> None:
        """An image as it was stored; one that nobody owns any more is to be deleted."""
        known = self.balancers.get(image.owner.uid)
        if known is None:
            self.changed.add(image.owner.uid)
            return
        known.image = image

    def _forget(self, uid: str) -> None:
        if self.balancers.pop(uid, None) is not None:
            self.changed.add(uid)
            self.members.select(uid, VMIS, "", {})
            self.members.select(uid, PODS, "", {})
        self.dirty.pop(uid, None)
        self.waiting.pop(uid, None)

    # --- decisions ---

    def resolve(self, synced: Collection[str], at: datetime, limit: int) -> list[BackendsResolved]:
        """Images that the facts changed, of at most `limit` owners; the rest stay dirty."""
        decided = []
        for uid in list(islice(self.dirty, limit)):
            balancer, spec_changed = self.balancers[uid], self.dirty.pop(uid)
            if not all(kind in synced for kind in balancer.needs):
                self.waiting[uid] = self.waiting.get(uid, False) or spec_changed
                continue
            event = decide(
                balancer, self.backends(uid), self.dummies, at=at, spec_changed=spec_changed
            )
            if spec_changed:  # what is to be checked may be another thing now
                self.changed.add(uid)
            if event is not None:
                self.evolve(event)
                decided.append(event)
        return decided

    def judge(
        self, verdicts: Iterable[Verdict], holds: Iterable[Hold], at: datetime
    ) -> list[HealthChanged]:
        """What verdicts and holds change: one event for each owner concerned (of very many verdicts
        on one, several)."""
        by_owner: dict[str, list[Verdict]] = {}
        held: dict[str, str] = {}
        for verdict in verdicts:
            by_owner.setdefault(verdict.owner, []).append(verdict)
        for hold in holds:
            held[hold.owner] = hold.reason
            by_owner.setdefault(hold.owner, [])
        decided = []
        for uid, given in by_owner.items():
            balancer = self.balancers.get(uid)
            for start in range(0, max(len(given), 1), MOST_CHANGES):
                if balancer is None or balancer.image is None or balancer.plan.checking != "on":
                    break
                some = given[start : start + MOST_CHANGES]
                event = weigh(balancer, balancer.image, some, held.get(uid), self.dummies, at)
                if event is not None:
                    self.evolve(event)
                    decided.append(event)
        return decided

    def evolve(self, event: BackendsResolved | HealthChanged) -> None:
        """Take a decision into the state; also how the state is rebuilt from the log."""
        balancer = self.balancers.get(event.owner.uid)
        if balancer is None:
            return
        self.changed.add(event.owner.uid)
        if isinstance(event, BackendsResolved):
            balancer.image = event
        elif balancer.image is not None:
            balancer.image = fold(balancer.image, event)
        if balancer.image is not None:
            left = balancer.heard.keys() - {key_of(b) for b in balancer.image.backends}
            for key in left:
                del balancer.heard[key]

    def backends(self, uid: str) -> tuple[list[Backend], int]:
        """The backends with an address in the slice's order (not judged), and how many match."""
        balancer = self.balancers[uid]
        plan = balancer.plan
        found = self.members.matching(uid, VMIS) + self.members.matching(uid, PODS)
        listed = [backend for obj in found for backend in of_member(obj, plan)]
        listed += of_explicit(balancer)
        listed.sort(key=lambda b: (b.namespace, b.name, b.address, b.kind, b.uid))
        return listed, len(found) + len(plan.explicit)


def _wanted(balancer: objects.LoadBalancer) -> bool:
    """Whether we answer for its backends: a cluster's are its own, a deleting one needs none."""
    return balancer.metadata.deletion_timestamp is None and balancer.spec.workload_type in (
        "",
        "vm",
    )
