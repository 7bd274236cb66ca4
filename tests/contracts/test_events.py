"""The event contract: samples decode for ever, generated documents are fresh, subjects reverse."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import events, generate, subjects
from schema.subjects import ObjectRef

SAMPLES = sorted(generate.SAMPLES.glob("*.json"))


def test_every_event_has_a_sample():
    """No event version without a stored document, none without a version."""
    assert set(events.EVENT_TYPES) == {path.stem for path in SAMPLES}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_decodes_and_round_trips(path):
    """A stored document of any version decodes, with and without header, and loses nothing."""
    data = path.read_bytes()

    event = events.decode(data, path.stem)

    assert event == events.decode(data)
    assert path.stem == events.tag_of(event)
    assert msgspec.json.decode(data) == msgspec.json.decode(events.encode(event))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_subject_belongs_to_one_stream(path):
    """Each event has a subject within the stream of its side."""
    subject = events.subject_of(events.decode(path.read_bytes()))

    assert subject.startswith(("kube.", "lb."))


def test_generated_documents_are_fresh():
    """The published schemas are those of the structs (`make generate`)."""
    there = {path.name: path.read_text() for path in generate.GENERATED.glob("*.json")}

    assert generate.documents() == there


def test_an_unknown_tag_and_an_unknown_field_are_told_apart():
    """A newer producer's event is UnknownEvent; its new field in a known event is ignored."""
    with pytest.raises(events.UnknownEvent, match=r"Invention\.v9"):
        events.decode(b'{"type":"Invention.v9","at":"2026-11-30T12:00:00Z"}')

    event = events.decode(
        b'{"type":"EpochStarted.v1","at":"2026-11-30T12:00:00Z","epoch":"e","reason":"r","new":1}'
    )

    assert event.epoch == "e"


NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,20}[a-z0-9])?", fullmatch=True)


@given(NAMES, st.one_of(st.just(""), NAMES), NAMES)
def test_a_subject_names_its_object_and_no_other(plural, namespace, name):
    """[report-44] Dots, dashes and absent namespaces survive the way to a subject and back."""
    ref = ObjectRef(plural.replace(".", "-"), namespace, name)

    subject = subjects.fact_subject(ref)

    assert ref == subjects.subject_ref(subject)
    assert len(subject.split(".")) == 4


@pytest.mark.parametrize("name", ["", "a_b", "a b", "a*", "a>", "a\n"])
def test_what_no_kubernetes_name_can_hold_is_refused(name):
    """An illegal name is an error that shows it, never a wildcard."""
    with pytest.raises(ValueError, match="not a Kubernetes name"):
        subjects.token(name)
