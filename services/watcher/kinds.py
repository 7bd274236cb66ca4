"""What is to be followed: a kind, where it lives in the API, and which of its objects count."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from schema import subjects
from services.kit.config import WatcherSettings
from services.kit.kube import Resource


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind to follow. `optional`: it may be absent, as a CustomResourceDefinition may."""

    resource: Resource
    selector: str = ""
    namespace: str = ""  # with `name`: one object only
    name: str = ""
    optional: bool = False

    @property
    def plural(self) -> str:
        return self.resource.plural

    def params(self, settings: WatcherSettings) -> dict[str, str]:
        """The selection, as parameters of a list or watch."""
        own = "" if settings.all_pods and self.plural == "pods" else self.selector
        selectors = (own, settings.selectors.get(self.plural, ""))
        params = {"labelSelector": ",".join(s for s in selectors if s)}
        if self.name:
            params["fieldSelector"] = f"metadata.name={self.name}"
        return {key: value for key, value in params.items() if value}

    def scopes(self, settings: WatcherSettings) -> tuple[str, ...]:
        """The namespaces to list and watch one by one; ("",) is all, or a kind without any."""
        if self.namespace:
            return (self.namespace,)
        if self.resource.namespaced and settings.namespaces:
            return settings.namespaces
        return ("",)

    def inside(self, scope: str) -> Callable[[str], bool]:
        """Whether a subject is of an object in a scope."""
        if not scope:
            return lambda _: True
        prefix = f"{subjects.KUBE_BRANCH}.{subjects.token(self.plural)}.{subjects.token(scope)}."
        return lambda subject: subject.startswith(prefix)
