"""Field ownership and server-side apply of the development Kubernetes API, without a server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sandbox.kube import fields, ownership, shapes
from sandbox.kube.errors import ApiError
from sandbox.kube.ownership import Manager
from sandbox.kube.schema import Schema, copy

NOW = "2026-11-30T12:00:00Z"
SHAPE = Schema(
    shapes.kind(
        spec=shapes.struct(
            text=shapes.STRING,
            labels=shapes.STRINGS,
            whole=shapes.whole(shapes.STRINGS),
            plain=shapes.atomic(shapes.STRING),
            names=shapes.unique(shapes.STRING),
            ports=shapes.keyed(
                shapes.struct(port=shapes.INT, protocol=shapes.PROTOCOL, name=shapes.STRING),
                "port",
                "protocol",
            ),
        )
    )
)
SERVICE = Schema(shapes.SERVICE)


def _manager(name: str, operation: str = "Apply") -> Manager:
    return Manager(name, operation, "example.org/v1")


def _object(spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "thing"}}
    return head | ({"spec": spec} if spec else {})


def _apply(
    live: dict[str, Any], manager: str, spec: dict[str, Any], *, force: bool = False
) -> dict[str, Any]:
    config = _object(spec)
    return ownership.apply(live, config, SHAPE, _manager(manager), NOW, force=force)


def _owners(obj: dict[str, Any]) -> dict[str, Any]:
    return {e["manager"]: e["fieldsV1"] for e in obj["metadata"].get("managedFields", [])}


def test_lists_with_keys_have_an_owner_for_each_item() -> None:
    """Two managers apply different ports of one list; each keeps its own."""
    live = _apply(_object({}), "a", {"ports": [{"port": 80, "name": "http"}]})
    live = _apply(live, "b", {"ports": [{"port": 443, "name": "https"}]})
    assert [80, 443] == [port["port"] for port in live["spec"]["ports"]]
    live = _apply(live, "a", {})
    assert [443] == [port["port"] for port in live["spec"]["ports"]]
    key = 'k:{"port":443,"protocol":"TCP"}'
    owned = {"f:spec": {"f:ports": {key: {".": {}, "f:name": {}, "f:port": {}}}}}
    assert {"b": owned} == _owners(live)


def test_a_key_that_has_a_default_may_be_left_out() -> None:
    """A port without protocol is the port with the default one, not another."""
    live = _object({"ports": [{"port": 80, "protocol": "TCP"}]})
    live = _apply(live, "a", {"ports": [{"port": 80, "name": "http"}]})
    assert [{"port": 80, "protocol": "TCP", "name": "http"}] == live["spec"]["ports"]


def test_sets_are_merged_and_atomic_values_replaced() -> None:
    """Items of a set belong to whoever added them; an atomic list or map has one owner."""
    live = _apply(_object({}), "a", {"names": ["x"], "plain": ["1"], "whole": {"k": "v"}})
    live = _apply(live, "b", {"names": ["y"]})
    assert ["x", "y"] == sorted(live["spec"]["names"])
    with pytest.raises(ApiError) as refused:
        _apply(live, "b", {"plain": ["2"], "whole": {"other": "v"}})
    assert {".spec.plain", ".spec.whole"} == {c["field"] for c in refused.value.details["causes"]}
    live = _apply(live, "b", {"plain": ["2"], "whole": {"other": "v"}}, force=True)
    assert (["2"], {"other": "v"}) == (live["spec"]["plain"], live["spec"]["whole"])
    assert ["x"] == live["spec"]["names"], "b gave its name up by not applying it again"


def test_a_shared_field_stays_until_the_last_owner_lets_go() -> None:
    """The same value applied by two managers belongs to both."""
    live = _apply(_object({}), "a", {"text": "same"})
    live = _apply(live, "b", {"text": "same"})
    live = _apply(live, "a", {})
    assert "same" == live["spec"]["text"]
    live = _apply(live, "b", {})
    assert "text" not in live.get("spec", {})


def test_an_update_takes_fields_from_appliers() -> None:
    """What an ordinary write changes is its writer's; the applier then meets a conflict."""
    live = _apply(_object({}), "a", {"text": "mine", "labels": {"k": "v"}})
    new = copy(live)
    new["spec"]["text"] = "changed"
    entries = ownership.track(live, new, SHAPE, _manager("b", "Update"), NOW)
    new["metadata"]["managedFields"] = entries
    assert {"f:spec": {"f:text": {}}} == _owners(new)["b"]
    assert {"f:spec": {"f:labels": {"f:k": {}}}} == _owners(new)["a"]
    with pytest.raises(ApiError, match=re.escape('"b" using example.org/v1: .spec.text')):
        _apply(new, "a", {"text": "mine", "labels": {"k": "v"}})


def test_several_conflicts_are_listed_by_manager() -> None:
    """The message of a refusal names every field, under the manager that owns it."""
    live = _apply(_object({}), "a", {"text": "1", "ports": [{"port": 80, "name": "http"}]})
    with pytest.raises(ApiError) as refused:
        _apply(live, "b", {"text": "2", "ports": [{"port": 80, "name": "web"}]})
    assert refused.value.message == (
        'Apply failed with 2 conflicts: conflicts with "a":\n'
        '- .spec.ports[port=80,protocol="TCP"].name\n- .spec.text'
    )


def test_an_applied_empty_map_stays() -> None:
    """A map that is applied as empty is there, although its last field was given up."""
    live = _apply(_object({}), "a", {"labels": {"x": "1"}})
    live = _apply(live, "a", {"labels": {}})
    assert {"labels": {}} == live["spec"]
    assert {"a": {"f:spec": {"f:labels": {}}}} == _owners(live)


def test_the_empty_entry_forgets_ownership() -> None:
    """managedFields of `[{}]` is how a client asks to drop the record."""
    live = _apply(_object({}), "a", {"text": "1"})
    new = copy(live)
    new["metadata"]["managedFields"] = [{}]
    assert [] == ownership.track(live, new, SHAPE, _manager("b", "Update"), NOW)


def test_a_merged_list_keeps_what_only_the_object_has_in_its_place() -> None:
    """Applied items come in the applied order, and foreign ones stay where they were."""
    live = {"ports": [{"port": p} for p in (1, 2, 3)]}
    config = {"ports": [{"port": p} for p in (3, 4)]}
    merged = fields.merge(live, config, SHAPE.child("spec"))
    assert [1, 2, 3, 4] == [item["port"] for item in merged["ports"]]


_TEXT = st.sampled_from(["1", "2"])
_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "text": _TEXT,
        "labels": st.dictionaries(st.sampled_from("xyz"), _TEXT, min_size=1, max_size=2),
        "plain": st.lists(_TEXT, max_size=2),
        "names": st.lists(_TEXT, unique=True, min_size=1, max_size=2),
        "ports": st.lists(
            st.fixed_dictionaries({"port": st.integers(1, 3)}, optional={"name": _TEXT}),
            unique_by=lambda port: port["port"],
            min_size=1,
            max_size=3,
        ),
    },
)


@given(_SPECS)
def test_paths_survive_their_encoding(spec: dict[str, Any]) -> None:
    """A set of paths written as FieldsV1 reads back as the same set."""
    paths = fields.owned_by_config(_object(spec), SHAPE)
    assert paths == fields.decode(fields.encode(paths))


class Appliers(RuleBasedStateMachine):
    """Managers apply whatever they like; what they claim and what stands must agree."""

    @initialize()
    def begin(self) -> None:
        self.live = _object({})
        self.applied: dict[str, dict[str, Any]] = {}

    @rule(manager=st.sampled_from("abc"), spec=_SPECS, force=st.booleans())
    def apply(self, manager: str, spec: dict[str, Any], force: bool) -> None:
        before = copy(self.live)
        try:
            self.live = copy(_apply(self.live, manager, spec, force=force))
        except ApiError:
            assert not force, "a forced apply is never refused"
            assert before == self.live
            return
        self.applied[manager] = spec
        again = copy(_apply(self.live, manager, spec))
        assert self.live == again, "applying the same once more changes nothing"
        wanted = fields.owned_by_config(_object(spec), SHAPE)
        assert wanted <= fields.owned_by_config(self.live, SHAPE), "what was applied stands"

    @invariant()
    def owners_and_fields_agree(self) -> None:
        if not hasattr(self, "live"):
            return
        claims = ownership.Claims.read(self.live["metadata"].get("managedFields"))
        claimed: fields.Paths = set().union(*claims.paths.values())
        bare = {k: v for k, v in self.live.items() if k == "spec"}
        there = fields.owned_by_config(bare, SHAPE)
        leaves = {p for p in there if not any(o[: len(p)] == p and o != p for o in there)}
        unowned = {path for path in leaves if path not in claimed}
        # The key of a list item that nobody spelled out is the server's own default.
        assert not {path for path in unowned if path[-1] != "f:protocol"}
        assert claimed <= there | {("f:spec",)}, "nobody owns what is not there"


TestAppliers = Appliers.TestCase
TestAppliers.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
