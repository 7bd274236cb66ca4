"""Make schema/generated/: JSON Schemas and the AsyncAPI document, from the structs.

`python -m schema.generate` writes them, `--check` exits 1 when they are not up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from schema import events, subjects

HERE: Final = Path(__file__).parent
GENERATED: Final = HERE / "generated"
SAMPLES: Final = HERE / "samples"

_PRODUCERS: Final = {
    "kube": "watcher",
    "lb.lease": "allocator",
    "lb.backends": "prober",
    "lb.health": "prober",
    "lb.provider": "nrp_sync",
    "lb.applied": "applier",
    "lb.dead": "every consumer",
}


def documents() -> dict[str, str]:
    """File name -> text of everything generated."""
    types = [events.EVENT_TYPES[tag] for tag in sorted(events.EVENT_TYPES)]
    (schemas, components) = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    made = {"asyncapi.json": _text(_asyncapi(types, components))}
    for cls in types:
        single = msgspec.json.schema(cls)
        single["$id"] = f"{events_tag(cls)}.json"
        single["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        made[f"{events_tag(cls)}.json"] = _text(single)
    assert len(schemas) == len(types)
    return made


def events_tag(cls: type[events.Event]) -> str:
    return str(cls.__struct_config__.tag)


def _asyncapi(types: list[type[events.Event]], components: dict[str, Any]) -> dict[str, Any]:
    channels: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for cls in types:
        tag = events_tag(cls)
        address = _address(tag)
        messages[tag] = {
            "name": tag,
            "summary": (cls.__doc__ or "").strip().split("\n")[0],
            "contentType": "application/json",
            "headers": {"$ref": "#/components/schemas/Headers"},
            "payload": {"$ref": f"#/components/schemas/{cls.__name__}"},
        }
        channel = channels.setdefault(
            address,
            {"address": address, "description": _produced_by(address), "messages": {}},
        )
        channel["messages"][tag] = {"$ref": f"#/components/messages/{tag}"}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "lbledger event log",
            "version": "1",
            "description": "Facts on stream KUBE, decisions and outcomes on stream LB. In a "
            "subject a dot of a Kubernetes name is an underscore, and so is no namespace.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {address: channels[address] for address in sorted(channels)},
        "components": {
            "messages": messages,
            "schemas": dict(sorted({**components, "Headers": _headers()}.items())),
        },
    }


def _address(tag: str) -> str:
    sample = events.decode((SAMPLES / f"{tag}.json").read_bytes())
    words = events.subject_of(sample).split(".")
    if words[0] == "kube" and words[1] in ("sync", "epoch"):
        return ".".join([*words[:2], "{plural}"][: len(words)])
    if words[:2] == ["lb", "dead"]:
        return "lb.dead.{service}"
    if len(words) == 3:
        return ".".join(words)
    if words[0] == "kube" and tag.split(".")[0] not in ("ObjectGone", "ObjectUnfit"):
        return f"kube.{words[1]}.{{namespace}}.{{name}}"
    head = words[: len(words) - 3]
    return ".".join([*head, "{plural}", "{namespace}", "{name}"])


def _produced_by(address: str) -> str:
    for branch, producer in _PRODUCERS.items():
        if address == branch or address.startswith(branch + "."):
            return f"published by {producer}"
    raise ValueError(address)


def _headers() -> dict[str, Any]:
    told = {
        subjects.HEADER_MSG_ID: "identity of the publication, for deduplication",
        subjects.HEADER_EPOCH: "epoch of the KUBE stream",
        subjects.HEADER_TYPE: "name and version of the event, equal to its `type`",
        subjects.HEADER_CAUSE: "<epoch>:<sequence> in KUBE of the fact behind a decision",
        subjects.HEADER_DIGEST: "digest of a fact's trimmed view",
        subjects.HEADER_UID: "uid of a fact's object",
        subjects.HEADER_OUTBOX: "<database instance>:<row> that a decision was committed as",
        subjects.HEADER_TRACE: "W3C trace context",
    }
    return {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": text} for name, text in told.items()
        },
    }


def _text(document: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(document, order="sorted")).decode() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m schema.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args().check
    made = documents()
    GENERATED.mkdir(exist_ok=True)
    there = {path.name: path.read_text() for path in GENERATED.glob("*.json")}
    stale = sorted(n for n in made.keys() | there.keys() if made.get(n) != there.get(n))
    if check:
        for name in stale:
            print(f"schema/generated/{name} is out of date: run `make generate`", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        if name in made:
            (GENERATED / name).write_text(made[name])
        else:
            (GENERATED / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
