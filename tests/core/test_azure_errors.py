"""Which class an answer of Azure's has, how long it asks to wait, and what is cut from its text."""

import datetime
import email.utils
from typing import Any

import pytest

from services.nrp_sync.azure_errors import body_error, classify, retry_after_of, scrub, scrub_ids
from services.nrp_sync.gate import GateClosed, Gates
from services.nrp_sync.provider import (
    AuthFailed,
    Conflict,
    InUse,
    Invalid,
    NotFound,
    OverlayMappings,
    PreconditionFailed,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Unknown,
)

OVERLAY = "ServiceWithOverlayMappingsCannotBeDeleted"
SUBSCRIPTION = "3f2b6c1e-1111-2222-3333-444455556666"


class TestClasses:
    """Status, code and text to a class."""

    @pytest.mark.parametrize(
        ("status", "code", "text", "expected", "metric"),
        [
            (400, OVERLAY, "", OverlayMappings, "conflict"),
            (409, OVERLAY.lower(), "", OverlayMappings, "conflict"),
            (200, OVERLAY, "", OverlayMappings, "conflict"),
            (500, "Whatever", f"because {OVERLAY}: x", OverlayMappings, "conflict"),
            (400, "QuotaExceeded", "", QuotaExceeded, "quota_exceeded"),
            (409, "PUBLICIPCOUNTLIMITREACHED", "", QuotaExceeded, "quota_exceeded"),
            (400, "MaxPublicIpCountLimitReached", "", QuotaExceeded, "quota_exceeded"),
            (400, "PublicIPAddressCannotBeDeleted", "", InUse, "conflict"),
            (400, "InUseNatGatewayCannotBeDeleted", "", InUse, "conflict"),
            (400, "BadThing", "", Invalid, "invalid"),
            (422, "", "", Invalid, "invalid"),
            (413, "", "", Invalid, "invalid"),
            (401, "", "", AuthFailed, "auth_failed"),
            (403, "AuthorizationFailed", "", AuthFailed, "auth_failed"),
            (404, "ResourceNotFound", "", NotFound, "not_found"),
            (408, "", "", Unknown, "timeout"),
            (409, "AnotherOperationInProgress", "", Conflict, "conflict"),
            (412, "PreconditionFailed", "", PreconditionFailed, "conflict"),
            (429, "RetryableError", "an etag did not match", Throttled, "throttled"),
            (500, "", "", Unknown, "internal_error"),
            (503, "", "", Unknown, "internal_error"),
            (302, "", "", Unknown, "unknown"),
            (200, "DuplicateLocationsInRequest", "", Invalid, "invalid"),
            (200, "IPv4LocationCannotContainIPv6Addresses", "", Invalid, "invalid"),
            (200, "MultipleDefaultServicesNotAllowedInServiceGateway", "", Invalid, "invalid"),
            (200, "RulesUseSameBackendPortProtocolAndPool", "", Invalid, "invalid"),
            (200, "Canceled", "", Unknown, "unknown"),
            (200, "InternalServerError", "", Unknown, "unknown"),
        ],
    )
    def test_class(
        self, status: int, code: str, text: str, expected: type[ProviderError], metric: str
    ) -> None:
        """A code that carries behaviour wins over the status; the metric's label follows."""
        error = classify("op", status, code, text, request_id="r", retry_after=3.0)
        assert type(error) is expected
        assert error.metric_class == metric
        assert (error.op, error.code, error.status, error.request_id) == ("op", code, status, "r")
        assert "op: " in str(error)

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b'{"error": {"code": "A", "message": "b"}}', ("A", "b")),
            (b'{"code": "A", "message": "b"}', ("A", "b")),
            (b'{"status": "Failed", "error": {"code": "A", "message": "b"}}', ("A", "b")),
            (b'{"status": "Failed"}', ("Failed", "")),
            (b'{"status": "Canceled"}', ("Canceled", "")),
            (b'{"error": {}}', ("Unspecified", "")),
            (b'{"error": {"code": "A", "message": null, "details": 5}}', ("A", "")),
            (b'{"error": {"code": 17}}', ("17", "")),
            (b'{"error": "no"}', ("Unspecified", "no")),
            (b'{"status": "Succeeded"}', None),
            (b'{"status": "Succeeded", "error": null}', None),
            (b'{"properties": {"provisioningState": "Succeeded"}}', None),
            (b"{}", None),
            (b"", None),
            (b"<html>", None),
            (b"[1]", None),
        ],
    )
    def test_errors_in_bodies(self, body: bytes, expected: Any) -> None:
        """Each shape in which ARM tells an error, and what tells none."""
        assert body_error(body) == expected


class TestTexts:
    """What nobody may read in a log."""

    @pytest.mark.parametrize(
        "text",
        [
            f"/subscriptions/{SUBSCRIPTION}/resourceGroups/x",
            f"'/SUBSCRIPTIONS/{SUBSCRIPTION.upper()}'",
            "Authorization: Bearer abc.def.ghi was refused",
            "token eyJ0eXAiOiJKV1Qi.eyJhdWQiOiJodHRw.c2lnbmF0dXJl",
        ],
    )
    def test_secrets_are_cut(self, text: str) -> None:
        """Subscription ids and tokens, in any case."""
        cut = scrub(text).lower()
        for secret in (SUBSCRIPTION, "abc.def.ghi", "eyj0exai", "c2lnbmf0dxjl"):
            assert secret not in cut

    def test_other_text_stays(self) -> None:
        """What helps a person is kept; long or broken lines are bounded."""
        text = "public IP web-pip is used by\n  load balancer web"
        assert scrub(text) == "public IP web-pip is used by load balancer web"
        assert len(scrub("x" * 5000)) == 600
        assert scrub_ids(f"tenant {SUBSCRIPTION} unknown") == "tenant *** unknown"


class TestWaiting:
    """Retry-After, and the gates that honour it."""

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ({"retry-after": "5"}, 5.0),
            ({"retry-after": "0"}, 0.0),
            ({"retry-after-ms": "250"}, 0.25),
            ({"x-ms-retry-after-ms": "250", "retry-after": "1"}, 0.25),
            ({"retry-after": "-3"}, 0.0),
            ({"retry-after": "soon"}, None),
            ({"retry-after": "inf"}, None),
            ({"retry-after": "nan"}, None),
            ({"retry-after": "1e300"}, 3600.0),
            ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -0000"}, 3600.0),
            ({}, None),
        ],
    )
    def test_retry_after(self, headers: dict[str, str], expected: float | None) -> None:
        """Seconds or milliseconds; nonsense is as good as nothing."""
        assert retry_after_of(headers) == expected

    def test_retry_after_as_a_date(self) -> None:
        """HTTP also allows a date."""
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
        seconds = retry_after_of({"retry-after": email.utils.format_datetime(until, usegmt=True)})
        assert seconds is not None
        assert 80 < seconds <= 90

    def test_a_gate_stays_closed_for_its_time(self) -> None:
        """Its own direction only; an earlier, longer closing is not shortened."""
        now = [100.0]
        gates = Gates(clock=lambda: now[0])
        gates.close("lb:write", 30)
        gates.close("lb:write", 5)
        gates.enter("lb:read")
        for moment, left in ((100.0, 30.0), (129.0, 1.0)):
            now[0] = moment
            with pytest.raises(GateClosed) as caught:
                gates.enter("lb:write")
            assert caught.value.retry_after == pytest.approx(left)
        now[0] = 130.0
        gates.enter("lb:write")

    def test_a_rate_lets_bursts_through_and_then_its_average(self) -> None:
        """Beyond it a request is refused with the time after which it passes."""
        now = [0.0]
        gates = Gates(rate=2.0, clock=lambda: now[0])
        passed = 0
        for step in range(100):
            now[0] = step / 10
            try:
                gates.enter("x")
            except GateClosed:
                continue
            passed += 1
        assert 20 <= passed <= 22  # 10 s at 2 a second, and the burst at the beginning
        now[0] = 1000.0
        gates.enter("x")
        gates.enter("x")
        with pytest.raises(GateClosed) as caught:
            gates.enter("x")
        assert caught.value.retry_after == pytest.approx(0.5)
