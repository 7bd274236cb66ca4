"""Facts put straight onto the KUBE stream, as the watcher would, for tests of its consumers."""

from __future__ import annotations

from datetime import UTC, datetime

from schema import events, objects, subjects
from services.kit.bus import Bus, Published

EPOCH = "e1"
T0 = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


class Feeder:
    """A stand-in for the watcher: the same headers, the same chain of sequences per subject."""

    def __init__(self, bus: Bus, epoch: str = EPOCH) -> None:
        self.bus = bus
        self.epoch = epoch
        self._publisher = bus.publisher("KUBE")
        self._last: dict[str, int] = {}
        self._count = 0

    @classmethod
    async def start(cls, url: str, epoch: str = EPOCH) -> Feeder:
        bus = await Bus.connect(url, name="feeder")
        for spec in (subjects.KUBE, subjects.LB):
            await bus.ensure_stream(spec)
        feeder = cls(bus, epoch)
        await feeder.send(events.EpochStarted(at=T0, epoch=epoch, reason="test"))
        return feeder

    async def close(self) -> None:
        await self._publisher.close()
        await self.bus.close()

    async def send(self, event: events.Event) -> int:
        """Publish one fact; returns its sequence."""
        return (await self._submit(event)).seq

    async def send_all(self, facts: list[events.Event]) -> None:
        """Publish many, pipelined; facts of one object stay in order."""
        futures = []
        for fact in facts:
            await self._publisher.room()
            futures.append(self._future(fact))
        for future in futures:
            await future

    async def seen(self, obj: objects.AnyObject) -> int:
        kind = events.SEEN[objects.PLURALS[type(obj)]]
        return await self.send(kind(at=datetime.now(UTC), object=obj))

    async def gone(self, obj: objects.AnyObject, reason: str = "deleted") -> int:
        ref = objects.object_ref(obj)
        return await self.send(
            events.ObjectGone(
                at=datetime.now(UTC), **ref._asdict(), uid=obj.metadata.uid, reason=reason
            )
        )

    async def synced(self, *plurals: str, absent: bool = False) -> None:
        for plural in plurals:
            await self.send(
                events.SyncFinished(at=T0, plural=plural, epoch=self.epoch, absent=absent)
            )

    async def raw(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> Published:
        self._count += 1
        return await self._publisher.publish(
            subject, data, headers or {}, msg_id=f"raw:{self.epoch}:{self._count}"
        )

    async def _submit(self, event: events.Event) -> Published:
        return await self._future(event)

    def _future(self, event: events.Event):
        self._count += 1
        headers = {
            subjects.HEADER_EPOCH: self.epoch,
            subjects.HEADER_TYPE: events.tag_of(event),
        }
        return self._publisher.submit(
            events.subject_of(event),
            events.encode(event),
            headers,
            msg_id=f"{self.epoch}:{self._count}",
        )
