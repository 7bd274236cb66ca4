"""Long-running operations: a change that is taken now, done later, and asked after meanwhile.

While one is under way on a resource, another change of it is refused with 409, as the provider
does. What an operation does is decided when it ends: it may fail then, and the poll that says so
still has status 200.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandbox.nrp.arm import ArmError, Doc

_KEPT = 10_000


@dataclass(slots=True)
class Operation:
    """One change under way, or ended: then with a result or an error."""

    name: str
    target: str
    retry_after: float
    status: str = "InProgress"
    result: Doc = field(default_factory=dict)
    error: ArmError | None = None

    def status_doc(self) -> Doc:
        """What the page behind `Azure-AsyncOperation` says."""
        doc: Doc = {"name": self.name, "status": self.status}
        if self.error is not None:
            doc |= self.error.body()
        elif self.status == "Succeeded":
            doc["properties"] = {"output": self.result or None}
        return doc


class Operations:
    """All operations since the start, the oldest forgotten beyond a bound."""

    def __init__(self) -> None:
        self._known: dict[str, Operation] = {}
        self._busy: dict[str, Operation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check_free(self, target: str) -> None:
        """409 while an operation on the resource is under way."""
        running = self._busy.get(target.lower())
        if running is not None:
            raise ArmError(
                409,
                "AnotherOperationInProgress",
                f"another operation on {target} is in progress",
                retry_after=running.retry_after,
            )

    def begin(
        self, target: str, seconds: float, finish: Callable[[], Doc], *, fail: ArmError | None
    ) -> Operation:
        """Take a change; after some seconds apply it, or let it fail with the given error."""
        operation = Operation(str(uuid.uuid4()), target, retry_after=max(seconds / 4, 0.05))
        self._known[operation.name] = operation
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        self._busy[target.lower()] = operation
        task = asyncio.get_running_loop().create_task(
            self._run(operation, seconds, finish, fail), name=f"operation {operation.name}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    async def _run(
        self,
        operation: Operation,
        seconds: float,
        finish: Callable[[], Doc],
        fail: ArmError | None,
    ) -> None:
        await asyncio.sleep(seconds)
        try:
            if fail is not None:
                raise fail
            operation.result = finish()
            operation.status = "Succeeded"
        except ArmError as error:
            operation.error, operation.status = error, "Failed"
        finally:
            self._busy.pop(operation.target.lower(), None)

    def get(self, name: str) -> Operation:
        """The operation of that name; 404 when it is unknown."""
        try:
            return self._known[name]
        except KeyError:
            raise ArmError(404, "OperationNotFound", f"operation {name} is unknown") from None

    async def stop(self) -> None:
        """Give up what is under way; it stays unapplied."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def shown(self) -> dict[str, Any]:
        """How many are in which state, for the admin page."""
        states: dict[str, int] = {}
        for operation in self._known.values():
            states[operation.status] = states.get(operation.status, 0) + 1
        return states
