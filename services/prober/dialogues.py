"""What a check says to a backend once it is connected, and what it makes of the answer.

No I/O: bytes in, bytes out, so that each dialogue can be tested byte by byte. A dialogue ends as
soon as it knows: nobody waits for a body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.prober.plan import Check


@dataclass(frozen=True, slots=True)
class Answer:
    ok: bool
    reason: str = ""
    next: Redirect | None = None  # ask here, before judging


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another connection to the same backend."""

    port: int
    dialogue: Dialogue


class Dialogue(Protocol):
    silence: Answer | None  # what it means that nothing came in time; None: a failure

    def begin(self) -> None:
        """Connected."""

    def take(self) -> bytes:
        """What is to be sent now."""

    def feed(self, data: bytes) -> Answer | None: ...

    def eof(self) -> Answer: ...


class Dialogues:
    """Opens the dialogue that a check asks for."""

    def open(self, check: Check, address: str) -> Dialogue:
        raise NotImplementedError(check.protocol)
