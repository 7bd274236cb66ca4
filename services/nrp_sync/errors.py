"""How a provider fails, and what each failure says about what was applied.

Certainly nothing, unless the class is `Unknown`. An error names the operation, the code and the
provider's request id, never a token or a subscription.
"""

from typing import Any, Final

LONGEST_WAIT: Final = 3600.0
"""Seconds; a provider that asks us to wait for longer is asked again after an hour."""


class ProviderError(Exception):
    """A request that did not succeed. Certainly not applied, unless the class is `Unknown`."""

    metric_class = "unknown"
    """The value of the label `error_code` in metrics."""

    def __init__(
        self,
        op: str,
        message: str,
        *,
        code: str = "",
        status: int = 0,
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        self.op = op
        """The operation, e.g. `update_services` or `put_load_balancer`."""
        self.code = code
        self.message = message
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after
        """Seconds that the provider asked to wait, None when it asked nothing."""
        facts = [code, f"HTTP {status}" if status else "", request_id and f"request {request_id}"]
        told = ", ".join(fact for fact in facts if fact)
        super().__init__(f"{op}: {message}" + (f" ({told})" if told else ""))


class Throttled(ProviderError):
    """429, or our own gate still closed from an earlier one (then nothing was sent)."""

    metric_class = "throttled"


class Conflict(ProviderError):
    """409: another change is under way, or the state does not allow this one now."""

    metric_class = "conflict"


class PreconditionFailed(Conflict):
    """412: the resource changed since it was read. Read again, then try once more."""


class InUse(Conflict):
    """A resource that something else still uses cannot be deleted."""


class NotFound(ProviderError):
    """404 of something that the operation needs: the gateway, the group, a referenced object."""

    metric_class = "not_found"


class Invalid(ProviderError):
    """400 or 422: this content will never be accepted. Bisect, quarantine, go on."""

    metric_class = "invalid"


class QuotaExceeded(ProviderError):
    """The subscription may have no more of this; waiting helps only if someone makes room."""

    metric_class = "quota_exceeded"


class OverlayMappings(ProviderError):
    """A service cannot be unregistered while addresses map to it: drain again, do not retry."""

    metric_class = "conflict"


class AuthFailed(ProviderError):
    """401 or 403, or no token to be had."""

    metric_class = "auth_failed"


class Unreachable(ProviderError):
    """The connection could not be opened: nothing was sent."""

    metric_class = "unreachable"


class Unreadable(ProviderError):
    """The answer to a read is not what we understand; acting on it could delete live things."""

    metric_class = "unreadable"


class Unknown(ProviderError):
    """Timeout, 5xx, connection lost after sending: it may have been applied. Read back or resend.

    `metric_class` is `timeout`, `internal_error` (5xx) or `unknown` (the rest).
    """

    def __init__(self, op: str, message: str, *, timeout: bool = False, **facts: Any) -> None:
        super().__init__(op, message, **facts)
        if timeout:
            self.metric_class = "timeout"
        elif self.status >= 500:
            self.metric_class = "internal_error"
