"""Checks on the wire: non-blocking sockets driven straight from epoll, one engine for all targets.

I/O only; what a result means is decided elsewhere. Guarantees: checks of one target never overlap;
starts are spread over the period; no more than `max_in_flight` sockets are open; a backend that
stalls, resets or talks nonsense costs its timeout and no more; every TCP connection is closed by
reset, so that no TIME_WAIT and no ephemeral port is left behind.

Time stands still for deadlines while our own process is: a check is not failed because we were
late to look. What fails on our side (no descriptor, no route, no port) says nothing about the
backend and is reported as `local`.
"""

from __future__ import annotations

import errno
import heapq
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from services.prober.dialogues import Answer, Dialogue, Dialogues
from services.prober.targets import CONNECTED, LOCAL, Outcome, Target, describe

SLOT_S: Final = 0.01
STARTS_PER_STEP: Final = 512
READ_BYTES: Final = 16_384
LATE_S: Final = 0.05
GLANCE_S: Final = 0.001
_RESET: Final = struct.pack("ii", 1, 0)
_STREAM: Final = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_DATAGRAM: Final = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_BROKEN: Final = select.EPOLLERR | select.EPOLLHUP


class _Probe:
    """A check under way."""

    __slots__ = ("begun", "deadline", "dialogue", "events", "out", "sock", "started", "target")

    def __init__(self, target: Target, sock: socket.socket, started: float) -> None:
        self.target = target
        self.sock: socket.socket | None = sock
        self.started = started
        self.deadline = 0.0
        self.dialogue: Dialogue | None = None
        self.events = _OUT
        self.begun = False
        self.out: bytes | memoryview = b""


class Engine:
    """Runs targets. Not thread-safe; `step` is called when the epoll descriptor is readable or at
    the time that the last call returned, whichever is first."""

    def __init__(
        self,
        report: Callable[[list[Outcome]], None],
        *,
        max_in_flight: int = 8_192,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        dialogues: Dialogues | None = None,
    ) -> None:
        self._report = report
        self._limit = max_in_flight
        self._clock = clock
        self._rng = rng or random.Random()  # spreads starts, guards nothing
        self._dialogues = dialogues or Dialogues()
        self._epoll = select.epoll()
        self._running: dict[int, _Probe] = {}
        self._slots: dict[int, list[Target]] = {}
        self._slot_heap: list[int] = []
        self._queue: deque[Target] = deque()
        self._begun: list[_Probe] = []  # connections that nobody has looked at yet
        self._deadlines: dict[float, deque[_Probe]] = {}
        self._done: list[Outcome] = []
        self._stood = 0.0  # how long deadlines have stood still so far
        self._wake = float("inf")
        self._last = 0.0  # when the last step ended
        self.late = 0.0  # the worst start of the last step, after its due time
        self.started = 0
        self.repeated = 0  # targets that are checked again and again

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def now(self) -> float:
        """The time that outcomes are told in."""
        return self._clock()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, target: Target, *, at_once: bool, wait: float | None = None) -> None:
        """Begin to check a target: now, after so many seconds, or somewhere within its period."""
        self.repeated += not target.alive
        target.alive = True
        target.fresh = at_once
        if wait is None:
            wait = 0.0 if at_once else self._rng.random() * target.check.period
        self._schedule(target, self._clock() + wait)

    def remove(self, target: Target) -> None:
        """Stop checking a target; a check under way is not reported any more."""
        self.repeated -= target.alive
        target.alive = False

    def close(self) -> None:
        for probe in list(self._running.values()):
            self._drop(probe)
        self._epoll.close()

    def step(self, timeout: float = 0.0) -> float:
        """Do what is due; returns when to be called again at the latest (the clock's time)."""
        now = self._clock()
        if now > self._wake + LATE_S:  # nobody knows since when: count next to nothing of it
            self._stood += max(0.0, now - self._last - SLOT_S)
        if self._begun:
            self._look_again()
        for fd, mask in self._epoll.poll(timeout, 4_096):
            probe = self._running.get(fd)
            if probe is not None:
                self._advance(probe, mask)
        now = self._clock()
        self._expire(now - self._stood)
        self._start_due(now)
        if self._done:
            done, self._done = self._done, []
            self._report(done)
        self._last = self._clock()
        self._wake = self._next_wake()
        return self._wake

    # --- starting ---

    def _schedule(self, target: Target, due: float) -> None:
        target.due = due
        slot = int(due / SLOT_S) + 1
        waiting = self._slots.get(slot)
        if waiting is None:
            self._slots[slot] = [target]
            heapq.heappush(self._slot_heap, slot)
        else:
            waiting.append(target)
        self._wake = min(self._wake, slot * SLOT_S)

    def _start_due(self, now: float) -> None:
        slot_now = int(now / SLOT_S)
        while self._slot_heap and self._slot_heap[0] <= slot_now:
            self._queue.extend(self._slots.pop(heapq.heappop(self._slot_heap)))
        queue = self._queue
        worst = 0.0
        for _ in range(min(STARTS_PER_STEP, len(queue))):
            if len(self._running) >= self._limit:
                break
            target = queue.popleft()
            if target.alive:
                worst = max(worst, now - target.due)
                self._start(target, now)
        self.late = worst

    def _start(self, target: Target, now: float) -> None:
        self.started += 1
        udp = target.check.protocol == "UDP"
        try:
            sock = _open(target.family, _DATAGRAM if udp else _STREAM)
        except OSError as error:
            self._finish(target, now, error.errno or 0)
            return
        code = sock.connect_ex(target.dialled)
        if code and code != errno.EINPROGRESS:
            sock.close()
            self._finish(target, now, code)
            return
        probe = _Probe(target, sock, now)
        fd = sock.fileno()
        try:
            if target.check.protocol == "TCP":
                self._begun.append(probe)
            else:
                probe.dialogue = self._dialogues.open(target.check, target.address)
                if udp:
                    probe.events = _IN
                    sock.send(b"")
                self._epoll.register(fd, probe.events)
        except OSError as error:
            sock.close()
            self._finish(target, now, error.errno or 0)
            return
        self._running[fd] = probe
        timeout = target.check.timeout
        probe.deadline = now - self._stood + timeout
        queue = self._deadlines.get(timeout)
        if queue is None:
            queue = self._deadlines[timeout] = deque()
        queue.append(probe)

    # --- under way ---

    def _look_again(self) -> None:
        """Most backends have answered by the next step; only for the others epoll is needed."""
        begun, self._begun = self._begun, []
        for probe in begun:
            sock = probe.sock
            if sock is None:
                continue
            code = sock.connect_ex(probe.target.dialled)
            if code == errno.EALREADY:
                try:
                    self._epoll.register(sock.fileno(), _OUT)
                except OSError as error:
                    self._end(probe, error.errno or 0)
            else:
                self._end(probe, 0 if code in CONNECTED else code)

    def _advance(self, probe: _Probe, mask: int) -> None:
        sock = probe.sock
        if sock is None:
            return
        if mask & _BROKEN and not mask & _IN:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.EPIPE
            plain = probe.dialogue is None
            self._end(probe, 0 if plain and code in CONNECTED else code)
        elif probe.dialogue is None:
            self._end(probe, 0)
        else:
            try:
                self._talk(probe, probe.dialogue, sock, mask)
            except OSError as error:
                self._end(probe, error.errno or errno.EPIPE)

    def _talk(self, probe: _Probe, dialogue: Dialogue, sock: socket.socket, mask: int) -> None:
        answer: Answer | None = None
        if mask & _IN:
            data = sock.recv(READ_BYTES)
            answer = dialogue.feed(data) if data else dialogue.eof()
        elif not probe.begun:
            probe.begun = True
            dialogue.begin()
        if answer is not None:
            self._answered(probe, answer)
            return
        out = probe.out or dialogue.take()
        while out:
            try:
                sent = sock.send(out)
            except BlockingIOError:
                break
            out = memoryview(out)[sent:] if sent < len(out) else dialogue.take()
        probe.out = out
        events = (_OUT | _IN) if out else _IN
        if events != probe.events:
            probe.events = events
            self._epoll.modify(sock.fileno(), events)

    def _answered(self, probe: _Probe, answer: Answer) -> None:
        """The backend has said what we wanted to know, or where else to ask it."""
        if answer.next is None:
            self._end(probe, 0, answer)
            return
        target = probe.target
        self._drop(probe)
        if not target.alive:
            return
        follow = _open(target.family, _STREAM)
        code = follow.connect_ex((target.dialled[0], answer.next.port))
        if code and code != errno.EINPROGRESS:
            follow.close()
            self._finish(target, probe.started, code)
            return
        # The same probe goes on, at its place in the queue of deadlines.
        probe.sock, probe.dialogue = follow, answer.next.dialogue
        probe.events, probe.out, probe.begun = _OUT, b"", False
        self._running[follow.fileno()] = probe
        self._epoll.register(follow.fileno(), _OUT)

    def _expire(self, now: float) -> None:
        for queue in self._deadlines.values():
            while queue and (queue[0].sock is None or queue[0].deadline <= now):
                probe = queue.popleft()
                if probe.sock is None:
                    continue
                if probe.dialogue is not None and probe.dialogue.silence is not None:
                    self._end(probe, 0, probe.dialogue.silence)
                else:
                    self._end(probe, errno.ETIMEDOUT)

    # --- ending ---

    def _end(self, probe: _Probe, code: int, answer: Answer | None = None) -> None:
        target, started = probe.target, probe.started
        self._drop(probe, reset=code in (0, errno.ETIMEDOUT) or probe.dialogue is not None)
        self._finish(target, started, code, answer)

    def _drop(self, probe: _Probe, *, reset: bool = True) -> None:
        sock = probe.sock
        if sock is None:
            return
        probe.sock = None
        del self._running[sock.fileno()]
        if reset and probe.target.check.protocol != "UDP":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()  # epoll forgets it by itself

    def _finish(
        self, target: Target, started: float, code: int, answer: Answer | None = None
    ) -> None:
        if target.alive:
            if answer is not None:
                outcome = Outcome(target, answer.ok, answer.reason, started)
            elif code:
                outcome = Outcome(target, False, describe(code, target), started, code in LOCAL)
            else:
                outcome = Outcome(target, True, "", started)
            self._done.append(outcome)
        self._done_with(target)

    def _done_with(self, target: Target) -> None:
        """Plan the next check: one period after this one was due, never in the past."""
        if not target.alive:
            return
        period = target.check.period
        now = self._clock()
        if target.fresh:  # what came together must not be checked together for ever
            target.fresh = False
            due = target.due + period * self._rng.uniform(0.5, 1.5)
        else:
            due = target.due + period
        if due <= now:  # missed turns are dropped, and the phase is kept
            due += ((now - due) // period + 1) * period
        self._schedule(target, due)

    def _next_wake(self) -> float:
        if self._queue and len(self._running) < self._limit:
            return self._clock()
        wake = self._slot_heap[0] * SLOT_S if self._slot_heap else float("inf")
        if self._begun:
            wake = min(wake, self._clock() + GLANCE_S)
        for timeout, queue in list(self._deadlines.items()):
            while queue and queue[0].sock is None:
                queue.popleft()
            if queue:
                wake = min(wake, queue[0].deadline + self._stood)
            else:
                del self._deadlines[timeout]
        return wake


def _open(family: int, kind: int) -> socket.socket:
    """The class under socket.socket: the same methods for half the price."""
    return cast(socket.socket, socket.SocketType(family, kind))
