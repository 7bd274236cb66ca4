"""What a writing request says about how to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sandbox.kube.errors import ApiError
from sandbox.kube.ownership import Manager
from sandbox.kube.resources import Resource


@dataclass(slots=True)
class Options:
    """What a request says about how to write."""

    manager: str = ""
    user_agent: str = ""
    force: bool | None = None
    dry_run: bool = False
    validation: str = "Warn"
    subresource: str = ""
    content_type: str | None = None
    warnings: list[str] = field(default_factory=list)

    def writer(self, resource: Resource, operation: str = "Update") -> Manager:
        name = self.manager or self.user_agent.partition("/")[0]
        return Manager(name, operation, resource.api_version, self.subresource)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read(query: Mapping[str, str], headers: Mapping[str, str], subresource: str) -> Options:
    """The options of a writing request."""
    validation = query.get("fieldValidation") or "Warn"
    if validation not in ("Ignore", "Warn", "Strict"):
        raise ApiError(422, f'fieldValidation: Unsupported value: "{validation}": supported '
                            'values: "Ignore", "Strict", "Warn"')  # fmt: skip
    dry_run = query.get("dryRun", "")
    if dry_run not in ("", "All"):
        raise ApiError(422, f'dryRun: Unsupported value: "{dry_run}": supported values: "All"')
    force = query.get("force")
    return Options(
        manager=query.get("fieldManager", ""),
        user_agent=headers.get("User-Agent", ""),
        force=None if force is None else force in ("1", "true", "True"),
        dry_run=bool(dry_run),
        validation=validation,
        subresource=subresource,
        content_type=headers.get("Content-Type"),
    )
