"""What a spec asks of the prober: defaults, extensions, and what is said about mistakes."""

import pytest

from schema.objects import ExplicitBackend, HealthCheck, Listener
from services.prober.plan import Defaults, Plan, read
from tests.core.prober_objects import DEFAULTS, balancer

LISTENERS = [
    Listener(name="http", port=8088, backend_port=80),
    Listener(name="tls", port=443, backend_port=8443),
    Listener(name="dns", port=53, backend_port=53, protocol="UDP"),
]


def plan(defaults=DEFAULTS, **spec) -> Plan:
    spec.setdefault("listeners", LISTENERS)
    return read(balancer(**spec), defaults)


@pytest.mark.parametrize("check", [None, HealthCheck(), HealthCheck(success_threshold=2)])
def test_a_check_without_a_port_is_off(check):
    """Null, {} and port 0 mean the same."""
    read_as = plan(health_check=check)
    assert (read_as.checking, read_as.checks, read_as.reason) == ("off", (), "")


def test_a_check_takes_the_documented_defaults():
    """One success, three failures, every 5 s, within 3 s."""
    (check,) = plan(health_check=HealthCheck(port=80)).checks
    assert (check.success, check.failure, check.period, check.timeout) == (1, 3, 5.0, 3.0)
    assert check.protocol == "TCP"


def test_a_short_period_shortens_the_default_timeout():
    """Where only the period is given, the check still fits into it."""
    (check,) = plan(health_check=HealthCheck(port=80, period_seconds=1)).checks
    assert (check.period, check.timeout) == (1.0, 1.0)


def test_a_second_can_be_made_shorter():
    """Demonstrations and tests run the same specs in less time."""
    (check,) = plan(Defaults(second=0.01), health_check=HealthCheck(port=80)).checks
    assert (check.period, check.timeout) == (0.05, 0.03)


@pytest.mark.parametrize(
    ("check", "told"),
    [
        pytest.param(
            HealthCheck(port=8088),
            "spec.healthCheck.port is 8088: not a backend port (it is the port of listener 'http');"
            " choose one of 80, 8443",
            id="report-66-front-port",
        ),
        pytest.param(
            HealthCheck(port=53),
            "spec.healthCheck.port is 53: a TCP check on a UDP-only backend port;"
            " choose one of 80, 8443",
            id="report-66-udp-port",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="UDP"),
            "spec.healthCheck.port is 80: a UDP check on a TCP-only backend port; choose one of 53",
            id="udp-check-on-tcp",
        ),
        pytest.param(
            HealthCheck(port=80, failure_threshold=-1),
            "spec.healthCheck.failureThreshold is -1: must be 0 (the default) to 1000",
            id="negative-threshold",
        ),
        pytest.param(
            HealthCheck(port=80, period_seconds=86_401),
            "spec.healthCheck.periodSeconds is 86401: must be 0 (the default) to 86400",
            id="long-period",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="ICMP"),
            "spec.healthCheck.protocol is 'ICMP': must be one of TCP, HTTP, HTTPS, GRPC, UDP",
            id="unknown-protocol",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="HTTP", codes="200,abc"),
            "spec.healthCheck.codes is '200,abc': must be codes and ranges, like '200-299,404'",
            id="codes",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="HTTP", codes="299-200"),
            "spec.healthCheck.codes is '299-200': must be codes and ranges, like '200-299,404'",
            id="codes-reversed",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="HTTP", path="hz"),
            "spec.healthCheck.path is 'hz': must start with '/' and hold no space, control"
            " character or anything beyond ASCII (percent-encode it)",
            id="path",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="HTTP", path="/" + "x" * 2_048),
            "spec.healthCheck.path has 2049 characters: must be at most 2048",
            id="long-path",
        ),
        pytest.param(
            HealthCheck(port=80, protocol="HTTP", host="a\r\nX-Evil: 1"),
            "spec.healthCheck.host is 'a\\r\\nX-Evil: 1': must be a host name or an address",
            id="host-injection",
        ),
    ],
)
def test_a_check_that_cannot_be_followed_is_broken_and_says_why(check, told):
    """The field, its value and what would be right; and there is nothing to probe."""
    read_as = plan(health_check=check)
    assert (read_as.checking, read_as.checks) == ("broken", ())
    assert (read_as.reason, read_as.message) == ("InvalidHealthCheck", told)


def test_a_timeout_longer_than_the_period_is_followed_with_a_remark():
    """Harvester takes such checks; they run without overlap, and the remark is no fault."""
    read_as = plan(health_check=HealthCheck(port=80, period_seconds=1, timeout_seconds=3))
    assert read_as.checking == "on"
    assert read_as.reason == ""
    assert "timeoutSeconds is 3, longer than periodSeconds (1)" in read_as.message


def test_no_tcp_listener_to_choose_from():
    """A UDP-only load balancer with a TCP check is told that there is no choice."""
    read_as = plan(listeners=LISTENERS[2:], health_check=HealthCheck(port=53))
    assert read_as.message.endswith("there is no TCP listener to choose from")


def test_a_listener_may_have_its_own_check():
    """It replaces the load balancer's check of that port, and stands beside one of another port."""
    own = Listener(
        name="tls", port=443, backend_port=8443, health_check=HealthCheck(protocol="HTTPS")
    )
    listeners = [LISTENERS[0], own]
    both = plan(listeners=listeners, health_check=HealthCheck(port=80)).checks
    assert [(c.protocol, c.port) for c in both] == [("TCP", 80), ("HTTPS", 8443)]
    replaced = plan(listeners=listeners, health_check=HealthCheck(port=8443)).checks
    assert [(c.protocol, c.port) for c in replaced] == [("HTTPS", 8443)]
    alone = plan(listeners=listeners).checks
    assert [(c.protocol, c.port) for c in alone] == [("HTTPS", 8443)]


@pytest.mark.parametrize(
    ("selector", "told"),
    [
        ({"app": []}, "spec.backendServerSelector['app'] is empty: must list at least one value"),
        ({"a b": ["c"]}, "spec.backendServerSelector has the key 'a b': must be a label key"),
        (
            {"app": ["-x"]},
            "spec.backendServerSelector['app'] has the value '-x': must be a label value",
        ),
    ],
)
def test_a_selector_that_cannot_be_followed_matches_nothing_and_says_why(selector, told):
    """One broken selector costs its own load balancer its backends, and nobody else anything."""
    read_as = plan(backend_server_selector=selector)
    assert (read_as.vms, read_as.reason, read_as.message) == ({}, "InvalidSelector", told)


def test_bad_listeners_are_left_out_and_named():
    """The good ones still serve."""
    listeners = [
        Listener(name="a", port=0, backend_port=80),
        Listener(name="b", port=80, backend_port=80, protocol="SCTP"),
        Listener(name="c", port=81, backend_port=70_000),
        Listener(name="d", port=82, backend_port=82),
        Listener(name="d", port=83, backend_port=83),
    ]
    read_as = plan(listeners=listeners)
    assert [port.port for port in read_as.ports] == [82]
    assert read_as.reason == "InvalidListener"
    assert read_as.message.split("; ") == [
        "spec.listeners[0].port is 0: must be 1 to 65535",
        "spec.listeners[1].protocol is 'SCTP': must be TCP or UDP",
        "spec.listeners[2].backendPort is 70000: must be 1 to 65535",
        "spec.listeners[4].name is 'd': another listener has it",
    ]


@pytest.mark.parametrize("listeners", [None, []])
def test_a_load_balancer_without_listeners_is_told(listeners):
    """Its Service could have no ports."""
    read_as = plan(listeners=listeners)
    assert (read_as.ports, read_as.reason) == ((), "InvalidListener")
    assert read_as.message == "spec.listeners is empty: must hold at least one"


@pytest.mark.parametrize(
    "address",
    ["", "host.example", "127.0.0.1", "169.254.1.1", "fe80::1%e0", "::ffff:10.0.0.4", "10.0.0.0/8"],
)
def test_an_explicit_backend_needs_an_address_that_a_slice_may_hold(address):
    """One that Kubernetes would refuse must not spoil the slice of the others."""
    backends = [
        ExplicitBackend(name="bad", address=address),
        ExplicitBackend(name="good", address="10.0.0.1", port=81),
    ]
    read_as = plan(listeners=LISTENERS[:1], backends=backends)
    assert [b.name for b in read_as.explicit] == ["good"]
    assert read_as.reason == "InvalidBackend"
    assert repr(address) in read_as.message


def test_an_explicit_backend_of_another_family_is_named():
    """It would be in no slice, and a person would look for why."""
    backends = [
        ExplicitBackend(name="six", address="2001:db8::1"),
        ExplicitBackend(name="four", address="10.0.0.1"),
    ]
    read_as = plan(backends=backends)
    assert [b.name for b in read_as.explicit] == ["four"]
    assert read_as.message == (
        "spec.backends[0].address is '2001:db8::1': must be IPv4 by spec.ipFamilies"
    )
    assert len(plan(backends=backends, ip_families=["IPv4", "IPv6"]).explicit) == 2


def test_extensions_may_stand_in_annotations():
    """Clusters with Harvester's own CRD have no fields for them; a field of the spec wins."""
    notes = {
        "lbledger.io/backend-network": "default/vlan10",
        "lbledger.io/ip-families": "IPv6, IPv4",
        "lbledger.io/health-check": '{"protocol": "HTTP", "path": "/hz", "codes": "200"}',
        "lbledger.io/listener-health-checks": '{"tls": {"protocol": "HTTPS"}}',
        "lbledger.io/backend-pod-selector": '{"app": ["pod"]}',
        "lbledger.io/backends": '[{"name": "db", "address": "2001:db8::1"}]',
    }
    check = HealthCheck(port=80, path="/live")
    lb = balancer(annotations=notes, listeners=LISTENERS[:2], health_check=check)
    read_as = read(lb, DEFAULTS)
    assert read_as.message == ""
    assert (read_as.network, read_as.families) == ("default/vlan10", ("IPv6", "IPv4"))
    assert read_as.pods == {"app": ["pod"]}
    assert [(b.name, b.address) for b in read_as.explicit] == [("db", "2001:db8::1")]
    http, https = read_as.checks
    assert (http.protocol, http.path, http.codes) == ("HTTP", "/live", ((200, 200),))
    assert (https.protocol, https.port, https.verify) == ("HTTPS", 8443, True)


def test_an_annotation_that_is_no_json_is_named():
    """It is left out, the rest holds."""
    read_as = read(balancer(annotations={"lbledger.io/backends": "[{"}), DEFAULTS)
    assert read_as.reason == "InvalidAnnotation"
    assert "lbledger.io/backends" in read_as.message


@pytest.mark.parametrize("note", ["health-check", "listener-health-checks"])
def test_a_check_in_an_annotation_that_is_no_json_is_broken_and_not_off(note):
    """Else a slip of the pen would send traffic to what fails the check that was meant."""
    lb = balancer(
        annotations={f"lbledger.io/{note}": '{"protocol": HTTP'},
        listeners=LISTENERS[:2],
        health_check=HealthCheck(port=80),
    )
    read_as = read(lb, DEFAULTS)
    assert (read_as.checking, read_as.checks) == ("broken", ())
    assert read_as.reason == "InvalidAnnotation"
    assert f"lbledger.io/{note}" in read_as.message


def test_an_unknown_family_is_named():
    """IPv4 is then taken, as without the field."""
    read_as = plan(ip_families=["IPv5"])
    assert (read_as.families, read_as.reason) == (("IPv4",), "InvalidFamily")


def test_the_digest_of_the_checks_tells_configurations_apart():
    """Whatever changes what or how often is asked changes the digest; nothing else does."""
    base = plan(health_check=HealthCheck(port=80)).config
    assert plan(health_check=HealthCheck(port=80, period_seconds=5)).config == base
    assert plan(health_check=HealthCheck(port=80), description="x").config == base
    others = [HealthCheck(port=8443), HealthCheck(port=80, failure_threshold=4)]
    assert base not in [plan(health_check=check).config for check in others]
