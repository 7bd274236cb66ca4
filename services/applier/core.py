"""What the applier knows: decisions by owner, objects as the watcher shows them, writes of its own.

`State` is evolved by facts, decisions and outcomes of writes, and is asked by services.applier.
planning what to write next. It holds two views of an object: `shown`, which the watcher published,
and `known`, which is that or the answer to our own last write where that is newer. What a person is
told rests on what is shown; whether a write is needed is judged by what is known, so the echo of a
write is never waited for and never mistaken for somebody else's change.

Pure: no clock, no I/O. Decisions for an owner that is gone are forgotten with it; decisions for a
uid that the watcher has not shown yet wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

from schema import addresses, events, objects
from schema.subjects import ObjectRef
from services.applier.documents import Bookings, ImportDoc, OwnerDoc, PoolDoc
from services.applier.folding import fold, fold_answer, fold_booking, fold_pool, import_of
from services.applier.shapes import LB_KIND, made_key
from services.applier.statuses import Form
from services.applier.targets import (
    Absent,
    Key,
    Options,
    Outcome,
    Target,
    View,
    newer,
    same_content,
)

KINDS: Final = ("loadbalancers", "ippools", "services", "endpointslices")
FOLLOWED: Final = (*KINDS, "pods")
OWNERS: Final = ("loadbalancers", "services", "pods")
FORGET_GONE: Final = 50_000
DOUBT_CAP: Final = timedelta(minutes=5)


class State:
    """Everything the applier knows. Entities are owners by uid, pools as `pool:<name>`, and imports
    of pools as `import:<uid of the ConfigMap>`."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.forms: dict[str, Form] = {"loadbalancers": Form(), "ippools": Form()}
        self.owners: dict[str, OwnerDoc] = {}
        self.pools: dict[str, PoolDoc] = {}
        self.imports: dict[str, ImportDoc] = {}  # by uid of the ConfigMap
        self.books: dict[str, Bookings] = {}
        self.targets: dict[Key, Target] = {}
        self.shown: dict[ObjectRef, View] = {}
        self.synced: set[str] = set()
        self.holds: dict[str, datetime] = {}  # entity -> since when a status is held back
        self.dirty: dict[str, None] = {}  # entities to plan for, in order
        self.cause = ""  # of what is being taken now
        self.causes: dict[str, str] = {}  # entity -> cause of the last thing that was taken
        self.unsaved = Unsaved()
        self._written: dict[ObjectRef, View | Absent] = {}
        self._slices: dict[str, set[ObjectRef]] = {}
        self._gone: dict[str, None] = {}
        self._doubted: dict[ObjectRef, tuple[datetime, timedelta]] = {}  # since, for how long

    # --- questions ---

    def known(self, ref: ObjectRef) -> Any:
        """The newest form of an object that we have seen, None when there is none."""
        written = self._written.get(ref)
        if written is None:
            return self.shown.get(ref)
        return None if isinstance(written, Absent) else written

    def awaited(self, ref: ObjectRef) -> bool:
        """Whether the watcher has yet to show what we wrote."""
        written = self._written.get(ref)
        return written is not None and not isinstance(written, Absent)

    def confirm(self, ref: ObjectRef, now: datetime) -> datetime | None:
        """Until when to wait for the watcher to show an object that only we know of.

        An object may come and go between two looks of the watcher, with neither seen: no fact will
        ever end what the answer to our write said. So after a while that answer is given up (None),
        and the next write finds out: it creates, or is refused with what is there. For an object
        that is there all the while, and a watcher that is not, this is asked ever more rarely.
        """
        if ref in self.shown or not self.awaited(ref):
            return None
        since, limit = self._doubted.get(ref) or (now, timedelta(seconds=self.options.undecided_s))
        if now < since + limit:
            self._doubted[ref] = (since, limit)
            return since + limit
        self._doubted[ref] = (now, min(2 * limit, DOUBT_CAP))
        del self._written[ref]
        return None

    def slices_of(self, uid: str) -> list[ObjectRef]:
        return sorted(self._slices.get(uid, ()))

    def target(self, key: Key) -> Target:
        return self.targets.setdefault(key, Target())

    def holder(self, uid: str) -> str:
        """An owner as pools list it."""
        doc = self.owners.get(uid)
        return doc.holder if doc is not None else ""

    def ready(self, plural: str = "") -> bool:
        """Whether everything we compare with has been listed completely."""
        if plural == "pods":
            return plural in self.synced
        return all(kind in self.synced for kind in KINDS)

    # --- facts ---

    def observe(self, ref: ObjectRef, old: View | None, new: View | None, uid: str) -> None:
        """One object appeared, changed, or went away (new None)."""
        self._index(ref, old, new)
        self._doubted.pop(ref, None)
        if new is None:
            self.shown.pop(ref, None)
            written = self._written.get(ref)
            if isinstance(written, Absent) or (written and written.metadata.uid == uid):
                self._written.pop(ref)
            self._ended(ref, uid)
        else:
            before = self.shown.get(ref)
            self.shown[ref] = new
            self._caught_up(ref, new, before)
        for entity in self._entities(ref, old, new):
            self.touch(entity)
            if entity in self.owners:
                self.owners[entity].generation += 1
                self.unsaved.bumped.add(entity)

    def touch(self, entity: str) -> None:
        self.dirty[entity] = None
        if self.cause:
            self.causes[entity] = self.cause

    def resume(self) -> None:
        """Plan for what the cluster may not show yet: at a start, and when lists are complete."""
        for uid, doc in self.owners.items():
            if doc.applied != doc.generation:
                self.touch(uid)
        for name in self.pools:
            self.touch(pool_entity(name))
        for uid in self.imports:
            self.touch(import_entity(uid))

    def settled(self, entity: str) -> None:
        """The cluster shows all that is wanted for this entity."""
        doc = self.owners.get(entity)
        if doc is not None and doc.applied != doc.generation and self.ready(doc.plural):
            doc.applied = doc.generation
            self.unsaved.bumped.add(entity)

    def _index(self, ref: ObjectRef, old: View | None, new: View | None) -> None:
        if ref.plural != "endpointslices":
            return
        for view, add in ((old, False), (new, True)):
            for uid in _owner_uids(view):
                if add:
                    self._slices.setdefault(uid, set()).add(ref)
                elif uid in self._slices:
                    self._slices[uid].discard(ref)
                    if not self._slices[uid]:
                        del self._slices[uid]

    def _caught_up(self, ref: ObjectRef, new: View, before: View | None) -> None:
        """A fact ends what an answer said, unless it is from before that answer. Of an object that
        is not ours (any more) only the identity is kept, without a version: that ends it too."""
        written = self._written.get(ref, before)
        if (
            isinstance(written, View)
            and new.metadata.resource_version
            and written.metadata.uid == new.metadata.uid
            and newer(written, new)
        ):
            self._written[ref] = written
        else:
            self._written.pop(ref, None)

    def _entities(self, ref: ObjectRef, old: View | None, new: View | None) -> Iterable[str]:
        if ref.plural == "ippools":
            importing = [import_entity(uid) for uid in self.imports]
            return [*importing, *([pool_entity(ref.name)] if ref.name in self.pools else [])]
        found = [view.metadata.uid for view in (old, new) if view is not None]
        if ref.plural in ("services", "endpointslices"):
            found += [uid for view in (old, new) for uid in _owner_uids(view)]
            stem = ref.name.partition(".")[0]
            balancer = self.shown.get(ObjectRef("loadbalancers", ref.namespace, stem))
            if balancer is not None:
                found.append(balancer.metadata.uid)
        return [uid for uid in dict.fromkeys(found) if uid in self.owners]

    def _ended(self, ref: ObjectRef, uid: str) -> None:
        """An object is gone: what was decided about it goes, bookings once they are released."""
        self._gone[uid] = None
        while len(self._gone) > FORGET_GONE:
            del self._gone[next(iter(self._gone))]
        doc = self.owners.get(uid)
        if doc is not None and doc.idle:
            self.forget(uid)
        if ref.plural == "ippools" and ref.name in self.pools and self.pools[ref.name].uid == uid:
            del self.pools[ref.name]
            self.unsaved.pools.add(ref.name)
            self._drop_targets([ref])

    def _drop_targets(self, refs: Iterable[ObjectRef]) -> None:
        for ref in refs:
            self._doubted.pop(ref, None)
            for part in ("", "status", "finalizers"):
                key = Key(*ref, part)
                if self.targets.pop(key, None) is not None:
                    self.unsaved.targets.add(key)

    def forget(self, uid: str) -> None:
        doc = self.owners.pop(uid)
        refs = [doc.owner.ref]
        for made in ("services/" + doc.name, *doc.made):
            plural, _, name = made.partition("/")
            refs.append(ObjectRef(plural, doc.namespace, name))
        self._drop_targets(refs)
        self.holds.pop(uid, None)
        self.causes.pop(uid, None)
        self.dirty.pop(uid, None)
        self.unsaved.owners.add(uid)

    # --- decisions ---

    def decide(self, event: events.AnyEvent) -> None:
        """Take one decision of another service."""
        if isinstance(event, events.PoolAccounted | events.ReleaseAnswered):
            self._pool_said(event)
            return
        if isinstance(event, events.LeasesRestated):
            self._drop_unlisted(event)
            return
        if isinstance(event, events.PoolsImported):
            self.imports[event.uid] = import_of(event)
            self.unsaved.imports.add(event.uid)
            self.touch(import_entity(event.uid))
            return
        owner: events.Owner | None = getattr(event, "owner", None)
        if owner is None or owner.plural not in OWNERS:
            return
        self._book(event)
        doc = self.owners.get(owner.uid)
        if doc is None:
            over = owner.uid in self._gone
            if isinstance(event, events.LeaseReleased) or (over and not _granted(event)):
                return
            doc = OwnerDoc(owner.plural, owner.namespace, owner.name, owner.uid)
            self.owners[owner.uid] = doc
        if fold(doc, event):  # type: ignore[arg-type]
            doc.generation += 1
            self.touch(owner.uid)
        self.unsaved.owners.add(owner.uid)
        if owner.uid in self._gone and doc.idle:
            self.forget(owner.uid)

    def _drop_unlisted(self, event: events.LeasesRestated) -> None:
        """Give up the leases on these addresses that do not stand: the log lost their releases."""
        first = addresses.parse(event.first) if event.first else 0
        before = addresses.parse(event.before) if event.before else None
        standing = set(event.leases)
        for doc in list(self.owners.values()):
            for lease in doc.leases:
                number = addresses.parse(lease.address)
                inside = first <= number and (before is None or number < before)
                if inside and lease.lease not in standing:
                    self.decide(
                        events.LeaseReleased(
                            at=event.at,
                            owner=doc.owner,
                            lease=lease.lease,
                            address=lease.address,
                            pool=lease.pool,
                            reason="not-restated",
                        )
                    )

    def _pool_said(self, event: events.PoolAccounted | events.ReleaseAnswered) -> None:
        pool = self.pools.setdefault(event.pool, PoolDoc(name=event.pool, uid=event.uid))
        if isinstance(event, events.PoolAccounted):
            changed = fold_pool(pool, event)
        else:
            changed = pool.uid == event.uid and fold_answer(pool, event)
        if changed:
            self.unsaved.pools.add(event.pool)
            self.touch(pool_entity(event.pool))

    def told(self, entity: str) -> None:
        """What was to be told about an entity has been."""
        kind, _, name = entity.partition(":")
        if kind == "pool" and name in self.pools:
            self.pools[name].tell = []
            self.unsaved.pools.add(name)
        elif kind == "import" and name in self.imports:
            self.imports[name].tell = []
            self.unsaved.imports.add(name)
        elif entity in self.owners:
            self.owners[entity].tell = []
            self.unsaved.owners.add(entity)

    def answered(self, name: str) -> None:
        """The annotation that a pool's answer speaks of is gone, or says something else."""
        self.pools[name].answer = None
        self.unsaved.pools.add(name)

    def imported(self, uid: str) -> None:
        """Every pool of an import exists, and its ConfigMap says so."""
        if self.imports.pop(uid, None) is not None:
            self.unsaved.imports.add(uid)

    def _book(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.LeaseGranted | events.LeaseAdopted | events.LeaseReleased):
            dropped = fold_booking(self.books, event, self.options.pool_map_entries)
            self.unsaved.history.add((event.pool, event.address))
            if dropped:
                self.unsaved.history.add((event.pool, dropped))
            if event.pool in self.pools:  # its account may be what it was before
                self.touch(pool_entity(event.pool))

    # --- outcomes ---

    def settle(self, outcome: Outcome) -> None:
        """Take what became of a write."""
        target = self.target(outcome.key)
        if outcome.outcome in ("written", "deleted"):
            if outcome.repair:
                calm = outcome.at >= target.calm_at(outcome.at)
                target.repairs = 1 if calm else target.repairs + 1
                target.repaired_at = outcome.at
            target.applied, target.written_at = outcome.digest, outcome.at
            target.attempts, target.next_at = 0, None
            target.reason = target.message = ""
            self._learn(outcome)
        else:
            same = outcome.digest == target.digest
            target.attempts = target.attempts + 1 if same else 1
            target.next_at = outcome.at + timedelta(seconds=outcome.retry_in)
            target.reason, target.message = outcome.reason, outcome.message
        target.digest = outcome.digest
        self.unsaved.targets.add(outcome.key)
        if outcome.key.plural == "configmaps" and outcome.outcome != "failed":
            # Marked; or another one by now, which the allocator will speak of if it must.
            self.imported(outcome.entity.removeprefix("import:"))
            return
        if outcome.seen is not None:
            self._answered(outcome)
        self.dirty[outcome.entity] = None

    def _learn(self, outcome: Outcome) -> None:
        doc = self.owners.get(outcome.entity)
        seen = outcome.seen
        if (
            doc is not None
            and isinstance(seen, objects.Service | objects.EndpointSlice)
            and outcome.key.part == ""
            and seen.metadata.uid != doc.uid
        ):
            doc.made[made_key(seen)] = seen.metadata.uid
            self.unsaved.owners.add(doc.uid)
        if doc is not None and outcome.outcome == "deleted":
            doc.made.pop(f"{outcome.key.plural}/{outcome.key.name}", None)
            self.unsaved.owners.add(doc.uid)
        told = doc or self.pools.get(outcome.entity.removeprefix("pool:"))
        if told is not None and outcome.marks is not None:
            told.marks, told.noticed = outcome.marks, outcome.noticed
            if doc is not None:
                self.unsaved.owners.add(doc.uid)
            else:
                self.unsaved.pools.add(told.name)
        form = self.forms.get(outcome.key.plural)
        if form is not None and not set(outcome.pruned) <= form.pruned:
            self.forms[outcome.key.plural] = form._replace(pruned=form.pruned | set(outcome.pruned))
            self.unsaved.forms.add(outcome.key.plural)

    def _answered(self, outcome: Outcome) -> None:
        """Keep an answer until the watcher has shown as much."""
        ref, seen = outcome.key.ref, outcome.seen
        shown = self.shown.get(ref)
        if isinstance(seen, Absent):
            if shown is not None:
                self._written[ref] = seen
            else:
                self._written.pop(ref, None)
            return
        assert seen is not None
        before = self._written.get(ref)
        if isinstance(before, View) and newer(before, seen):
            return
        if shown is not None and (not newer(seen, shown) or same_content(seen, shown)):
            self._written.pop(ref, None)
            if newer(seen, shown):
                # Nothing to be shown: only the version moved, and later patches rest on it.
                self.shown[ref] = seen
            return
        self._written[ref] = seen


class Unsaved:
    """What the next transaction has to store."""

    def __init__(self) -> None:
        self.owners: set[str] = set()
        self.bumped: set[str] = set()  # owners of which only the generations changed
        self.pools: set[str] = set()
        self.imports: set[str] = set()
        self.history: set[tuple[str, str]] = set()
        self.targets: set[Key] = set()
        self.forms: set[str] = set()


def pool_entity(name: str) -> str:
    return f"pool:{name}"


def import_entity(uid: str) -> str:
    return f"import:{uid}"


def _granted(event: events.AnyEvent) -> bool:
    return isinstance(event, events.LeaseGranted | events.LeaseAdopted)


def _owner_uids(view: View | None) -> list[str]:
    references = (view.metadata.owner_references if view is not None else None) or []
    return [reference.uid for reference in references if reference.kind == LB_KIND]
