"""Which names a real API server takes, and what it says of the others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from sandbox.kube.errors import FieldError, forbidden_field, required, wrong

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_DNS1035 = "[a-z]([-a-z0-9]*[a-z0-9])?"
_QUALIFIED = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_LABEL_VALUE = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"

NameCheck = Callable[[str], str | None]


def subdomain(name: str) -> str | None:
    """What is wrong with a name of most kinds, or None."""
    if len(name) > 253:
        return "must be no more than 253 bytes"
    if re.fullmatch(_SUBDOMAIN, name):
        return None
    return (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' "
        "or '.', and must start and end with an alphanumeric character (e.g. 'example.com', "
        f"regex used for validation is '{_SUBDOMAIN}')"
    )


def label(name: str) -> str | None:
    """What is wrong with the name of a Namespace, or None."""
    if len(name) > 63:
        return "must be no more than 63 bytes"
    if re.fullmatch(_LABEL, name):
        return None
    return (
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', "
        "and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', "
        f"regex used for validation is '{_LABEL}')"
    )


def dns1035(name: str) -> str | None:
    """What is wrong with the name of a Service, or None."""
    if len(name) > 63:
        return "must be no more than 63 bytes"
    if re.fullmatch(_DNS1035, name):
        return None
    return (
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with "
        "an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or "
        f"'abc-123', regex used for validation is '{_DNS1035}')"
    )


def qualified(name: str) -> str | None:
    """What is wrong with a label key, an annotation key or a finalizer, or None."""
    prefix, slash, rest = name.rpartition("/")
    if slash and (not prefix or subdomain(prefix)):
        return "prefix part " + (subdomain(prefix) or "must be non-empty")
    if len(rest) <= 63 and re.fullmatch(_QUALIFIED, rest):
        return None
    return (
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and "
        "end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex "
        f"used for validation is '{_QUALIFIED}')"
    )


def label_value(value: str) -> str | None:
    if len(value) > 63:
        return "must be no more than 63 bytes"
    if re.fullmatch(_LABEL_VALUE, value):
        return None
    return (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' "
        "or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or "
        f"'my_value',  or '12345', regex used for validation is '{_LABEL_VALUE}')"
    )


def generated(prefix: str) -> str:
    """A name from `generateName`: the prefix and five characters that spell nothing."""
    return prefix[:58] + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def check_metadata(metadata: dict[str, Any], check: NameCheck) -> list[FieldError]:
    """What is wrong with the metadata of an object that is about to be written."""
    errors = []
    prefix = metadata.get("generateName", "")
    if prefix:
        masked = prefix[:-1] + "a" if len(prefix) > 1 and prefix.endswith("-") else prefix
        if fault := check(masked):
            errors.append(wrong("metadata.generateName", prefix, fault))
    name = metadata.get("name", "")
    if not name:
        errors.append(required("metadata.name", "name or generateName is required"))
    elif fault := check(name):
        errors.append(wrong("metadata.name", name, fault))
    for key, value in (metadata.get("labels") or {}).items():
        if fault := qualified(key):
            errors.append(wrong("metadata.labels", key, fault))
        if fault := label_value(value):
            errors.append(wrong("metadata.labels", value, fault))
    for key in metadata.get("annotations") or {}:
        if fault := qualified(key.lower()):
            errors.append(wrong("metadata.annotations", key, fault))
    for index, finalizer in enumerate(metadata.get("finalizers") or ()):
        if fault := qualified(finalizer):
            errors.append(wrong(f"metadata.finalizers[{index}]", finalizer, fault))
    errors += _owners(metadata.get("ownerReferences") or ())
    return errors


def _owners(owners: Any) -> list[FieldError]:
    errors = []
    controllers = [owner for owner in owners if owner.get("controller")]
    for index, owner in enumerate(owners):
        where = f"metadata.ownerReferences[{index}]"
        errors += [
            required(f"{where}.{name}", f"{name} must not be empty")
            for name in ("apiVersion", "kind", "name", "uid")
            if not owner.get(name)
        ]
    if len(controllers) > 1:
        text = "Only one reference can have Controller set to true."
        errors.append(forbidden_field("metadata.ownerReferences", text))
    return errors
