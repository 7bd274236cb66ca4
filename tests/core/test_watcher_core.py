"""The watcher's decisions: tables for each rule, and a machine that interleaves everything.

The machine drives two watchers over one small API and one small stream that checks the expected
sequence as JetStream does. No I/O. Left out: marks and epochs on a real stream (tests/system).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schema import events, objects
from services.watcher import core, reading
from services.watcher.core import Absence, Deletion, Known, Listing, Sight

AT = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
PLURAL = "services"


def raw(
    name: str = "web", uid: str = "u1", version: str = "5", color: str = "red", **extra: Any
) -> bytes:
    """A Service as the API sends it; `color` is what somebody decides by."""
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "resourceVersion": version,
        "labels": {"color": color},
        **extra.pop("metadata", {}),
    }
    spec = {"type": "ClusterIP", "ports": [{"port": 80}]}
    return msgspec.json.encode({"metadata": metadata, "spec": spec, **extra})


def sight(listing: Listing | None = None, **what: Any) -> Sight:
    return reading.sight(PLURAL, raw(**what), AT, listing)


def gone_event(**what: Any) -> Deletion:
    return reading.deletion(PLURAL, raw(**what), AT)


def known(seq: int = 7, *, gone: bool = False, **what: Any) -> Known:
    """What a message about that object leaves behind."""
    seen = sight(**what)
    return Known(seen.uid, seen.version, b"" if gone else seen.digest, seq, gone)


def absence(version: str = "20", *, rewound: bool = False) -> Absence:
    seen = sight()
    return Absence(seen.subject, seen.ref, AT, Listing(version, rewound))


def kinds(facts: tuple[core.Fact, ...]) -> list[str]:
    """Each fact in short: its type, the uid, and for a tombstone why."""
    return [
        f"{type(f.event).__name__} {f.after.uid} {getattr(f.event, 'reason', '')}".strip()
        for f in facts
    ]


@pytest.mark.parametrize(
    ("before", "seen", "expected"),
    [
        pytest.param(None, sight(), ["ServiceSeen u1"], id="first"),
        pytest.param(known(), sight(), [], id="replay"),
        pytest.param(known(), sight(version="6"), [], id="no-op"),
        pytest.param(known(), sight(version="6", color="blue"), ["ServiceSeen u1"], id="changed"),
        pytest.param(known(), sight(version="4", color="blue"), [], id="older"),
        pytest.param(known(version="99"), sight(version="100", color="b"), ["ServiceSeen u1"],
                     id="versions-are-numbers"),
        pytest.param(known(version="x"), sight(version="y", color="b"), ["ServiceSeen u1"],
                     id="versions-that-are-no-numbers"),
        pytest.param(known(), sight(uid="u2", version="9"),
                     ["ObjectGone u1 replaced", "ServiceSeen u2"], id="report-38-new-uid"),
        pytest.param(known(), sight(uid="u0", version="3"), [], id="older-uid-replayed"),
        pytest.param(known(gone=True), sight(), [], id="replay-after-deletion"),
        pytest.param(known(gone=True), sight(version="8"), ["ServiceSeen u1"],
                     id="back-in-the-selection"),
        pytest.param(known(gone=True), sight(uid="u2", version="8"), ["ServiceSeen u2"],
                     id="created-again"),
        pytest.param(None, gone_event(), [], id="deletion-of-the-unknown"),
        pytest.param(known(), gone_event(version="6"), ["ObjectGone u1 deleted"], id="deleted"),
        pytest.param(known(version="8"), gone_event(version="6"), [], id="old-deletion"),
        pytest.param(known(uid="u2"), gone_event(version="6"), [], id="deletion-of-another-uid"),
        pytest.param(known(gone=True), gone_event(version="6"), [], id="deleted-twice"),
        pytest.param(known(), absence(), ["ObjectGone u1 vanished"], id="report-38-vanished"),
        pytest.param(None, absence(), [], id="missing-and-unknown"),
        pytest.param(known(gone=True), absence(), [], id="missing-and-gone"),
        pytest.param(known(version="30"), absence("20"), [], id="published-after-the-list"),
        pytest.param(known(version="30"), absence("20", rewound=True),
                     ["ObjectGone u1 vanished"], id="missing-in-a-restored-store"),
        pytest.param(known(), sight(Listing("20"), color="blue"), ["ServiceSeen u1"],
                     id="listed-with-another-view-of-the-same-version"),
        pytest.param(known(version="30"), sight(Listing("20"), color="blue"), [],
                     id="listed-before-the-fact"),
        pytest.param(known(version="30"), sight(Listing("20", rewound=True), color="blue"),
                     ["ServiceSeen u1"], id="listed-in-a-restored-store"),
        pytest.param(known(version="30"), sight(Listing("20", rewound=True)), ["ServiceSeen u1"],
                     id="the-same-in-a-restored-store-with-its-version"),
        pytest.param(known(version="30", gone=True), absence("20", rewound=True),
                     ["ObjectGone u1 vanished"], id="gone-from-a-restored-store-with-its-version"),
        pytest.param(known(version="12", gone=True), sight(Listing("20")), ["ServiceSeen u1"],
                     id="listed-after-a-selector-was-widened"),
        pytest.param(Known("", "", b"", 3), sight(), ["ServiceSeen u1"],
                     id="report-44-somebody-elses-message"),
        pytest.param(Known("", "", b"", 3), absence(), [], id="nothing-of-ours-vanished"),
    ],
)  # fmt: skip
def test_decision(before: Known | None, seen: core.Observation, expected: list[str]) -> None:
    """Each observation gives exactly the facts that the subject lacks, in order."""
    assert kinds(core.decide(before, seen)) == expected


def test_a_misfit_is_one_fact_per_reason() -> None:
    """An unfit object is an ObjectUnfit naming the field; staying unfit says nothing new."""
    first = reading.sight(PLURAL, raw(spec={"ports": "none"}), AT, None)
    (fact,) = core.decide(None, first)
    assert isinstance(fact.event, events.ObjectUnfit)
    assert "ports" in fact.event.problem

    after = fact.after
    again = reading.sight(PLURAL, raw(version="6", spec={"ports": "none"}), AT, None)
    assert core.decide(after, again) == ()

    healed = sight(version="7")
    assert kinds(core.decide(after, healed)) == ["ServiceSeen u1"]


def test_a_misfit_under_a_new_uid_ends_the_old_object() -> None:
    """A tombstone for the old uid goes before the ObjectUnfit of the new one."""
    unfit = reading.sight(PLURAL, raw(uid="u2", version="9", spec={"ports": 1}), AT, None)

    found = kinds(core.decide(known(), unfit))

    assert found == ["ObjectGone u1 replaced", "ObjectUnfit u2"]


def test_foreign_noise_does_not_change_the_digest() -> None:
    """managedFields, foreign annotations, unknown fields and the version are no part of a view."""
    noisy = sight(
        version="99",
        unknown={"heartbeat": 1},
        metadata={
            "managedFields": [{"manager": "x"}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        },
    )
    assert noisy.digest == sight().digest
    ours = sight(metadata={"annotations": {"lbledger.io/address": "192.0.2.7"}})
    assert ours.digest != noisy.digest


def test_a_null_stands_for_an_absent_field() -> None:
    """A null where the view has a default does not make an object unfit."""
    seen = reading.sight(PLURAL, raw(spec=None, status={"loadBalancer": None}), AT, None)

    assert isinstance(seen.view, objects.Service)
    assert seen.view.spec == objects.ServiceSpec()


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"null", b"[]", b'{"metadata": {}}', b'{"metadata": {"name": "a_b"}}',
     raw(name="a_b"), raw(uid=""), raw(version="")],
    ids=["empty", "bytes", "null", "list", "no-name", "no-uid", "underscore", "blank-uid",
         "blank-version"],
)  # fmt: skip
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """An object without a usable identity is an error of the reader, never a fact (report-44)."""
    with pytest.raises(reading.Unreadable, match=PLURAL):
        reading.sight(PLURAL, body, AT, None)


def test_dots_in_a_name_are_escaped() -> None:
    """`my.lb` is a legal name and one token of the subject (report-44)."""
    seen = reading.sight("loadbalancers", raw(name="my.lb", spec={}), AT, None)

    assert seen.subject == "kube.loadbalancers.default.my_lb"


def test_a_change_that_is_no_fact_makes_older_events_stale() -> None:
    """What lies between the last fact and a no-op that was seen after it is not published."""
    before = known(version="5")
    core.quiet(before, sight(version="9"))
    assert core.decide(before, sight(version="7", color="blue")) == ()
    assert core.decide(before, gone_event(version="7")) == ()


def test_only_a_fact_that_is_behind_the_truth_asks_for_a_list() -> None:
    """Another watcher's fact is taken over unless we saw something newer that differs."""
    ours = known(version="9", color="blue")
    assert not core.overtaken(None, known())
    assert not core.overtaken(ours, known(version="8", color="blue"))
    assert not core.overtaken(ours, known(version="12", color="red"))
    assert core.overtaken(ours, known(version="7", color="red"))
    assert core.overtaken(ours, known(version="8", gone=True))
    of_another_epoch = Known("u1", "12", b"", 9)
    assert core.overtaken(ours, of_another_epoch)
    assert core.overtaken(None, of_another_epoch)
    assert not core.overtaken(ours, Known("u1", "12", b"", 9, gone=True))


def test_headers_are_enough_to_go_on() -> None:
    """What a fact's headers say is what was known after it; another epoch says it all again."""
    for before, seen in ((None, sight()), (known(), gone_event(version="6"))):
        (fact,) = core.decide(before, seen)
        headers = core.headers_of(fact, "e1") | {"Nats-Msg-Id": fact.msg_id}
        assert core.known_of(headers, 0, "e1") == fact.after
        assert core.known_of(headers, 0, "e2").digest == b""


def test_the_repetition_of_a_fact_says_the_same() -> None:
    """A repeated message has another id and leaves the same knowledge behind."""
    (fact,) = core.decide(None, sight())
    headers = core.headers_of(fact, "e1")
    once = core.repeated_id(fact.msg_id, 7)
    twice = core.repeated_id(once, 9)
    assert len({fact.msg_id, once, twice}) == 3
    for msg_id in (once, twice):
        assert core.known_of({**headers, "Nats-Msg-Id": msg_id}, 0, "e1") == fact.after


def test_a_message_id_names_the_version_once() -> None:
    """`<uid>:<resourceVersion>:<type>`; said again about one version, the place is added."""
    (first,) = core.decide(None, sight())
    assert first.msg_id == "u1:5:ServiceSeen.v1"

    (again,) = core.decide(known(seq=7), sight(Listing("20"), color="blue"))
    assert again.msg_id == "u1:5:ServiceSeen.v1:7"


def test_a_fact_that_never_fits_is_named() -> None:
    """The last resort names size and limit, and is said once."""
    unfit = core.too_large(sight(), 2_000_000, 1_048_576, "{...")
    (fact,) = core.decide_unfit(None, unfit)
    assert isinstance(fact.event, events.ObjectUnfit)
    assert "1954 KiB" in fact.event.problem
    assert "1048576" in fact.event.problem
    assert core.decide_unfit(fact.after, unfit) == ()


def test_smaller_forms_give_up_only_what_is_elsewhere() -> None:
    """A pool loses history, conditions, then the map, each named; its spec stays."""
    pool = objects.IPPool(
        metadata=objects.ObjectMeta(name="p"),
        spec=objects.IPPoolSpec(ranges=[objects.PoolRange(subnet="192.0.2.0/24")]),
        status=objects.IPPoolStatus(
            total=9,
            allocated={"192.0.2.1": "a/b"},
            allocated_history={"192.0.2.2": "a/c"},
            conditions=[objects.Condition(type="Ready")],
        ),
    )
    forms: list[Any] = list(reading.smaller(events.IPPoolSeen(at=AT, object=pool)))
    assert [form.omitted[-1] for form in forms] == [
        "status.allocatedHistory",
        "status.conditions",
        "status.allocated",
    ]
    assert len(forms[-1].omitted) == 3
    assert all(form.object.spec == pool.spec for form in forms)
    assert forms[-1].object.status == objects.IPPoolStatus(total=9)


def test_a_slice_keeps_the_address_that_is_used() -> None:
    """Of an endpoint's addresses only the first is to be used, so only that one must fit."""
    endpoints = [objects.Endpoint(addresses=["10.0.0.1", "10.0.0.2"], node_name="n")]
    piece = objects.EndpointSlice(metadata=objects.ObjectMeta(name="s"), endpoints=endpoints)
    (form,) = reading.smaller(events.EndpointSliceSeen(at=AT, object=piece))
    assert form.object.endpoints == [  # type: ignore[attr-defined]
        objects.Endpoint(addresses=["10.0.0.1"], node_name="n")
    ]


@pytest.mark.parametrize(
    ("memory", "stream", "last", "reason", "expected"),
    [
        ((), ("t1", 0), None, "", "no epoch"),
        ((), ("t1", 9), "e1", "", ""),
        (("t1", 9, "e1"), ("t1", 9), "e1", "", ""),
        (("t1", 9, "e1"), ("t1", 12), "e1", "", ""),
        (("t1", 9, "e1"), ("t1", 8), "e1", "", "lost"),
        (("t1", 9, "e1"), ("t2", 20), "e1", "", "anew"),
        (("t1", 9, "e1"), ("t1", 20), "e1", "seq went back", "went back"),
        (("t1", 9, "e1"), ("t1", 8), "e2", "", ""),
        (("t1", 9, "e2"), ("t1", 8), "e1", "", "lost"),
        (("t1", 9, "e1"), ("t2", 1), None, "", "anew"),
    ],
    ids=["empty", "restart", "same", "grown", "tail-lost", "report-39b-recreated", "noticed",
         "another-watcher-was-quicker", "the-epoch-mark-was-lost-too", "recreated-and-empty"],
)  # fmt: skip
def test_epoch_verdict(
    memory: tuple[Any, ...], stream: tuple[str, int], last: str | None, reason: str, expected: str
) -> None:
    """An epoch goes on only on the stream that it was kept on, whole."""
    past = frozenset({"e1"}) if memory[2:] == ("e2",) else frozenset[str]()
    mark = None
    if last is not None:
        mark = events.EpochStarted(at=AT, epoch=last, reason="", created=stream[0])
    why = core.judge(core.Memory(*memory, past=past), core.Stream(*stream), mark, reason)
    assert bool(why) == bool(expected)
    assert expected in why


def test_an_epoch_of_another_stream_ends() -> None:
    """A stream restored from a copy of another one does not continue its epoch."""
    mark = events.EpochStarted(at=AT, epoch="e1", reason="", created="t1")
    assert "restored" in core.judge(core.Memory(), core.Stream("t2", 99), mark)


# --- the machine --------------------------------------------------------------------------------


class Api:
    """Objects, versions, and the history that watches read."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[str, int, str]] = {}  # name: uid, version, color
        self.version = 10
        self.history: list[tuple[int, str, bytes]] = []
        self.uids = itertools.count(1)

    def _event(self, kind: str, name: str, uid: str, color: str) -> None:
        unfit = {"spec": {"ports": color}} if color == "unfit" else {}
        body = raw(name, uid, str(self.version), color, **unfit)
        self.history.append((self.version, kind, body))

    def put(self, name: str, color: str) -> None:
        self.version += 1
        uid, _, _ = self.objects.get(name, ("", 0, ""))
        kind = "MODIFIED" if uid else "ADDED"
        uid = uid or f"u{next(self.uids)}"
        self.objects[name] = (uid, self.version, color)
        self._event(kind, name, uid, color)

    def delete(self, name: str) -> None:
        uid, _, color = self.objects.pop(name)
        self.version += 1
        self._event("DELETED", name, uid, color)

    def listed(self) -> list[bytes]:
        return [
            raw(name, uid, str(v), color,
                **({"spec": {"ports": color}} if color == "unfit" else {}))
            for name, (uid, v, color) in sorted(self.objects.items())
        ]  # fmt: skip


class Stored(msgspec.Struct):
    subject: str
    fact: core.Fact
    expected: int
    headers: dict[str, str]


class Stream:
    """Refuses a wrong expected sequence; drops a repeated id, as the server does."""

    def __init__(self) -> None:
        self.messages: list[Stored] = []
        self.last: dict[str, int] = {}
        self.ids: dict[str, int] = {}

    def store(self, fact: core.Fact, expected: int, msg_id: str) -> int:
        """The sequence of the message, or minus that of the last one when it is refused."""
        if self.last.get(fact.subject, 0) != expected:
            return -self.last.get(fact.subject, 0)
        if msg_id in self.ids:
            return self.ids[msg_id]
        headers = core.headers_of(fact, "e1") | {"Nats-Msg-Id": msg_id}
        self.messages.append(Stored(fact.subject, fact, expected, headers))
        seq = self.last[fact.subject] = self.ids[msg_id] = len(self.messages)
        return seq

    def known(self, subject: str) -> Known | None:
        seq = self.last.get(subject)
        return None if seq is None else core.known_of(self.messages[seq - 1].headers, seq, "e1")


class Watcher:
    def __init__(self, api: Api, stream: Stream) -> None:
        self.api, self.stream = api, stream
        self.known: dict[str, Known] = {}
        self.restart()

    def restart(self) -> None:
        self.known = {}
        for subject in self.stream.last:
            found = self.stream.known(subject)
            assert found is not None
            self.known[subject] = found
        self.position = -1  # a list is needed before a watch
        self.taken: list[tuple[int, str, bytes]] = []

    def observe(self, seen: core.Observation) -> None:
        facts = list(core.decide(self.known.get(seen.subject), seen))
        if not facts:
            core.quiet(self.known.get(seen.subject), seen)
        while facts:
            before = self.known.get(seen.subject)
            expected = before.seq if before is not None else 0
            fact = facts[0]
            seq = self.stream.store(fact, expected, fact.msg_id)
            if 0 < seq <= expected:  # dropped for its id
                seq = self.stream.store(fact, expected, f"{fact.msg_id}:{expected}")
            if seq > 0:
                fact.after.seq = seq
                self.known[seen.subject] = fact.after
                facts.pop(0)
                continue
            theirs = self.stream.known(seen.subject)
            assert theirs is not None
            self.known[seen.subject] = theirs
            facts = list(core.decide(theirs, seen))

    def relist(self, complete: bool = True) -> None:
        before = core.newest(k.version for k in self.known.values())
        listing = core.list_of(str(self.api.version), before)
        bodies = self.api.listed()
        if not complete:
            bodies = bodies[: len(bodies) // 2]
        seen = [reading.sight(PLURAL, body, AT, listing) for body in bodies]
        for item in seen:
            self.observe(item)
        if complete:
            here = {item.subject for item in seen}
            for subject in set(self.known) - here:
                name = subject.rpartition(".")[2]
                ref = objects.object_ref(sight(name=name).view)  # type: ignore[arg-type]
                self.observe(Absence(subject, ref, AT, listing))
            self.position = self.api.version

    def take(self, event: tuple[int, str, bytes]) -> None:
        _, kind, body = event
        if kind == "DELETED":
            self.observe(reading.deletion(PLURAL, body, AT))
        else:
            self.observe(reading.sight(PLURAL, body, AT, None))

    def step(self) -> bool:
        for event in self.api.history:
            if self.position >= 0 and event[0] > self.position:
                self.position = event[0]
                self.take(event)
                self.taken.append(event)
                return True
        return False


NAMES = st.sampled_from(["a", "b", "c"])
COLORS = st.sampled_from(["red", "blue", "unfit"])
WHO = st.integers(0, 1)


class Interleaving(RuleBasedStateMachine):
    """Whatever order things come in, the log is a true history and ends with the truth."""

    @initialize(restarts=st.booleans(), restores=st.booleans())
    def begin(self, restarts: bool, restores: bool) -> None:
        self.api, self.stream = Api(), Stream()
        self.watchers = [Watcher(self.api, self.stream) for _ in range(2)]
        for watcher in self.watchers:
            watcher.relist()
        self.restarts, self.restores = restarts, restores
        self.saved: tuple[dict[str, Any], int] | None = None
        self.restored = False

    @rule(name=NAMES, color=COLORS)
    def put(self, name: str, color: str) -> None:
        self.api.put(name, color)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.api.objects:
            self.api.delete(name)

    @rule(name=NAMES, color=COLORS)
    def recreate(self, name: str, color: str) -> None:
        self.delete(name)
        self.api.put(name, color)

    @rule(who=WHO, name=NAMES, color=COLORS, gone=st.booleans())
    def change_and_see(self, who: int, name: str, color: str, gone: bool) -> None:
        """One watcher is up to date, the other lags behind."""
        self.put(name, color)
        if gone:
            self.delete(name)
        while self.watchers[who].step():
            pass

    @rule(who=WHO, complete=st.booleans())
    def relist(self, who: int, complete: bool) -> None:
        self.watchers[who].relist(complete)

    @rule(who=WHO, steps=st.integers(1, 5))
    def watch(self, who: int, steps: int) -> None:
        for _ in range(steps):
            self.watchers[who].step()

    @precondition(lambda self: not self.restored)
    @rule(who=WHO, data=st.data())
    def replay(self, who: int, data: st.DataObject) -> None:
        """An event that the watcher took before comes once more."""
        watcher = self.watchers[who]
        if watcher.taken:
            watcher.take(data.draw(st.sampled_from(watcher.taken)))

    @precondition(lambda self: self.restarts)
    @rule(who=WHO)
    def restart(self, who: int) -> None:
        self.watchers[who].restart()

    @precondition(lambda self: self.restores)
    @rule()
    def back_up(self) -> None:
        self.saved = (dict(self.api.objects), self.api.version)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        """The API's store is put back; watches of before can't go on."""
        assert self.saved is not None
        self.api.objects, self.api.version = dict(self.saved[0]), self.saved[1]
        self.api.history = [e for e in self.api.history if e[0] <= self.api.version]
        self.restored = True
        for watcher in self.watchers:
            watcher.relist()

    @invariant()
    def each_chain_is_whole(self) -> None:
        last: dict[str, int] = {}
        for seq, message in enumerate(self.stream.messages, 1):
            assert message.expected == last.get(message.subject, 0)
            last[message.subject] = seq

    @invariant()
    def one_uid_ends_before_another_begins(self) -> None:
        alive: dict[str, str] = {}
        for message in self.stream.messages:
            uid = message.fact.after.uid
            if message.fact.after.gone:
                assert alive.pop(message.subject, uid) == uid
            else:
                assert alive.setdefault(message.subject, uid) == uid

    @invariant()
    def facts_do_not_go_back(self) -> None:
        if self.restored:
            return
        newest: dict[str, int] = {}
        for message in self.stream.messages:
            version = int(message.headers["Nats-Msg-Id"].split(":")[1])
            assert version >= newest.get(message.subject, 0)
            newest[message.subject] = version

    @invariant()
    def each_change_is_said_once(self) -> None:
        """No two facts in a row on a subject say the same."""
        if self.restored:
            return
        last: dict[str, Known] = {}
        for message in self.stream.messages:
            before, after = last.get(message.subject), message.fact.after
            same = before is not None and (before.uid, before.gone, before.digest) == (
                after.uid, after.gone, after.digest)  # fmt: skip
            assert not same
            last[message.subject] = after

    def teardown(self) -> None:
        """Both watchers go on to the end: the last fact of each subject is the API's content."""
        if not hasattr(self, "watchers"):
            return
        for watcher in self.watchers:
            if watcher.position < 0:
                watcher.relist()
            while watcher.step():
                pass
        truth = {
            (item.subject, item.uid, item.digest)
            for item in (reading.sight(PLURAL, body, AT, None) for body in self.api.listed())
        }
        said = set()
        for subject in self.stream.last:
            last = self.stream.known(subject)
            assert last is not None
            if not last.gone:
                said.add((subject, last.uid, last.digest))
        assert said == truth


TestInterleaving: Callable[..., Any] = Interleaving.TestCase
Interleaving.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
