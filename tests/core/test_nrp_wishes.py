"""Reading a Service or an egress label. Ids name the rows of docs/nrp-conformance.md."""

import msgspec
import pytest

from services.nrp_sync.shapes import parse_ip
from services.nrp_sync.sources import read_node
from services.nrp_sync.wishes import (
    IDLE_TIMEOUT,
    INTERNAL,
    InboundSpec,
    OutboundSpec,
    Port,
    Refusal,
    claims,
    load_balancer,
    nat_gateway,
    owner_of_public_ip,
    public_ips,
    read_egress,
    read_service,
)
from tests.core.nrp_world import node, port_of, service, uid

NAME = uid(1)


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        pytest.param([(80, 8080)], (Port("Tcp", 80, 8080),), id="R01-tcp"),
        pytest.param(
            [port_of(53, 53, "UDP"), port_of(80, 8080)],
            (Port("Tcp", 80, 8080), Port("Udp", 53, 53)),
            id="R01-several",
        ),
        pytest.param([(80, 0)], (Port("Tcp", 80, 80),), id="R01-no-target-port"),
        pytest.param([port_of(80, 8080, "")], (Port("Tcp", 80, 8080),), id="R01-no-protocol"),
        pytest.param(
            [port_of(53, 53, "TCP"), port_of(53, 53, "UDP")],
            (Port("Tcp", 53, 53), Port("Udp", 53, 53)),
            id="Z18-one-port-two-protocols",
        ),
    ],
)
def test_ports_are_read(ports, expected):
    """Every port is a pair of protocol, front and back, with the documented defaults."""
    assert read_service(service(ports=ports)).ports == expected


@pytest.mark.parametrize("row", ["R02", "E05"])
def test_service_without_ports_asks_for_nothing(row):
    """Without a port there is nothing to provide, and that is no refusal."""
    assert read_service(service(ports=[])) is None


@pytest.mark.parametrize(
    ("over", "reason", "field"),
    [
        pytest.param(
            {"annotations": {INTERNAL: "true"}},
            "UnsupportedInternalLoadBalancer",
            "metadata.annotations",
            id="R10",
        ),
        pytest.param(
            {"annotations": {INTERNAL: "True"}},
            "UnsupportedInternalLoadBalancer",
            "metadata.annotations",
            id="R10-case",
        ),
        pytest.param(
            {"session_affinity": "ClientIP"},
            "UnsupportedSessionAffinity",
            "spec.sessionAffinity",
            id="R11-affinity",
        ),
        pytest.param(
            {"load_balancer_ip": "192.0.2.1"},
            "UnsupportedLoadBalancerIP",
            "spec.loadBalancerIP",
            id="R11-address",
        ),
        pytest.param(
            {"ip_families": ["IPv4", "IPv6"]},
            "UnsupportedDualStack",
            "spec.ipFamilies",
            id="R08-dual-stack",
        ),
        pytest.param(
            {"ports": [port_of(80, "http")]},
            "UnsupportedNamedTargetPort",
            "spec.ports[0].targetPort",
            id="R03",
        ),
        pytest.param(
            {"ports": [port_of(80, 80, "SCTP")]},
            "UnsupportedProtocol",
            "spec.ports[0].protocol",
            id="R05-protocol",
        ),
        pytest.param(
            {"ports": [(65_535, 80)]}, "UnsupportedPort", "spec.ports[0].port", id="R05-frontend"
        ),
        pytest.param(
            {"ports": [(80, 65_536)]},
            "UnsupportedPort",
            "spec.ports[0].targetPort",
            id="R05-backend",
        ),
        pytest.param(
            {"ports": [(80, 8080), (81, 8080)]},
            "UnsupportedBackendPortCollision",
            "spec.ports[1].targetPort",
            id="R06",
        ),
        pytest.param(
            {"annotations": {IDLE_TIMEOUT: "3"}},
            "InvalidIdleTimeout",
            "metadata.annotations",
            id="R05-idle",
        ),
        pytest.param(
            {"annotations": {IDLE_TIMEOUT: "4.5"}},
            "InvalidIdleTimeout",
            "metadata.annotations",
            id="R09-malformed",
        ),
        pytest.param(
            {"annotations": {IDLE_TIMEOUT: ""}},
            "InvalidIdleTimeout",
            "metadata.annotations",
            id="R09-empty",
        ),
    ],
)
def test_what_can_not_be_had_is_refused(over, reason, field):
    """A refusal has a reason, names the field, the value and what would be right."""
    refusal = read_service(service(**over))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert refusal.field.startswith(field)
    assert "must" in refusal.message or "remove" in refusal.message or "needs" in refusal.message


@pytest.mark.parametrize(
    "over",
    [
        pytest.param({"external_traffic_policy": "Local"}, id="R12-local"),
        pytest.param({"external_traffic_policy": "Cluster"}, id="R12-cluster"),
        pytest.param({"session_affinity": "None"}, id="R11-default"),
        pytest.param({"annotations": {INTERNAL: "false"}}, id="R10-false"),
        pytest.param({"ports": [(65_534, 65_535)]}, id="R05-highest"),
        pytest.param({"ports": [(80, 8080), (81, 8081)]}, id="R06-distinct"),
        pytest.param({"allocate_load_balancer_node_ports": False}, id="Z24"),
    ],
)
def test_what_can_be_had_is_admitted(over):
    """These are served as they are."""
    assert isinstance(read_service(service(**over)), InboundSpec)


@pytest.mark.parametrize("minutes", range(4, 31), ids="R09-{}".format)
def test_every_admitted_idle_timeout_can_be_built(minutes):
    """What admission lets through the provider accepts."""
    spec = read_service(service(annotations={IDLE_TIMEOUT: str(minutes)}))
    assert {rule.idle_timeout_minutes for rule in load_balancer(NAME, spec).rules} == {minutes}


@pytest.mark.parametrize("row", ["R09-absent"])
def test_idle_timeout_has_a_default(row):
    """Without the annotation connections idle out after four minutes."""
    spec = read_service(service())
    assert load_balancer(NAME, spec).rules[0].idle_timeout_minutes == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(service(), service(ports=[(81, 8080)]), id="S10-port"),
        pytest.param(service(), service(ports=[(80, 8081)]), id="S10-target"),
        pytest.param(service(), service(ports=[port_of(80, 8080, "UDP")]), id="S10-protocol"),
        pytest.param(service(), service(annotations={IDLE_TIMEOUT: "9"}), id="S10-idle"),
        pytest.param(service(), service(ip_families=["IPv6"]), id="S10-family"),
    ],
)
def test_specs_differ_in_what_matters(one, other):
    """A change of any part that reaches the provider is a change."""
    assert read_service(one) == read_service(one)
    assert read_service(one) != read_service(other)


@pytest.mark.parametrize("row", ["S10-same", "Z14"])
def test_specs_do_not_differ_in_the_rest(row):
    """The order of ports, foreign annotations and metadata are no change."""
    one = service(ports=[(80, 8080), (443, 8443)])
    two = service(ports=[(443, 8443), (80, 8080)], annotations={"x": "y"}, generation=7)
    assert read_service(one) == read_service(two)


@pytest.mark.parametrize(
    ("label", "identity"),
    [
        pytest.param("shop", "shop", id="R14-valid"),
        pytest.param("Shop_1.x", "shop_1.x", id="R14-upper-case"),
        pytest.param("SHOP", "shop", id="G03"),
        pytest.param("a", "a", id="R14-one"),
        pytest.param("a" * 73, "a" * 73, id="R14-longest"),
        pytest.param("a_", "a_", id="R14-underscore-at-the-end"),
    ],
)
def test_egress_labels_name_gateways(label, identity):
    """A label is compared without regard to case."""
    assert read_egress(label) == identity


@pytest.mark.parametrize(
    "label",
    [
        pytest.param("../x", id="R14-dots"),
        pytest.param("a/b", id="G04-slash"),
        pytest.param("a" * 74, id="R14-too-long"),
        pytest.param("a-", id="R14-dash-at-the-end"),
        pytest.param("-a", id="R14-dash-at-the-start"),
        pytest.param("default-natgw", id="R14-reserved"),
        pytest.param("Default-NatGW", id="G04-reserved-case"),
        pytest.param(uid(7).upper(), id="G16-uid"),
    ],
)
def test_other_egress_labels_are_refused(label):
    """What can be no gateway of ours is refused with the value in the message."""
    refusal = read_egress(label)
    assert isinstance(refusal, Refusal)
    assert label in refusal.message


@pytest.mark.parametrize("row", ["R04", "W16"])
def test_rules_are_named_and_spelled_as_the_provider_has_them(row):
    """One rule for each port, by protocol and front port, in the provider's spelling."""
    made = load_balancer(NAME, read_service(service(ports=[port_of(53, 5353, "udp"), (80, 8080)])))
    assert [(rule.name, rule.protocol) for rule in made.rules] == [
        ("rule-tcp-80", "Tcp"),
        ("rule-udp-53", "Udp"),
    ]


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        pytest.param((4,), {("shop-pip", 4)}, id="R15-one"),
        pytest.param((4, 6), {("shop-pip", 4), ("shop-pip-v6", 6)}, id="R15-two"),
    ],
)
def test_gateway_has_an_address_of_each_family(families, expected):
    """Each family's address is on its own list."""
    spec = OutboundSpec(families=families)
    assert {(ip.name, ip.family) for ip in public_ips("shop", spec)} == expected
    made = nat_gateway("shop", spec)
    assert made.public_ips == ("shop-pip",)
    assert made.public_ips_v6 == (("shop-pip-v6",) if 6 in families else ())


@pytest.mark.parametrize("family", [4, 6], ids="R08-{}".format)
def test_address_has_the_services_family(family):
    """The public address is of the family that the Service has."""
    spec = read_service(service(ip_families=[f"IPv{family}"]))
    assert [ip.family for ip in public_ips(NAME, spec)] == [family]


@pytest.mark.parametrize("row", ["R16", "report-53"])
def test_names_never_meet(row):
    """Resources of different services have different names, whatever the services are called."""
    spec, names = read_service(service()), set()
    for identity in (uid(1), uid(2), uid(11)):
        made = {identity, *(ip.name for ip in public_ips(identity, spec))}
        assert not made & names
        names |= made
    both = OutboundSpec(families=(4, 6))
    for identity in ("a", "a-pip", "a-pip-v6"):
        made = {identity, *(ip.name for ip in public_ips(identity, both))}
        assert not {ip.name for ip in public_ips(identity, both)} & names
        names |= made - {identity}


@pytest.mark.parametrize(
    ("name", "owner"),
    [("a-pip", "a"), ("a-pip-v6", "a"), ("A-PIP-V6", "a"), ("a", ""), ("a-pip-v4", "")],
    ids="I15-{}".format,
)
def test_owner_is_read_from_the_longer_suffix_first(name, owner):
    """`a-pip-v6` belongs to a."""
    assert owner_of_public_ip(name) == owner


@pytest.mark.parametrize(
    ("over", "classless", "expected"),
    [
        pytest.param({}, False, True, id="claims-ours"),
        pytest.param({"load_balancer_class": "x/y"}, True, False, id="I05-Z23-foreign"),
        pytest.param({"load_balancer_class": ""}, False, False, id="claims-none"),
        pytest.param({"load_balancer_class": ""}, True, True, id="claims-classless"),
        pytest.param({"type": "ClusterIP"}, True, False, id="claims-type"),
    ],
)
def test_only_our_services_are_claimed(over, classless, expected):
    """A Service is ours by its class; one without a class where a setting says so."""
    assert claims(service(**over), classless=classless) is expected


@pytest.mark.parametrize(
    ("addresses", "v4", "v6"),
    [
        pytest.param(["172.16.0.2", "172.16.0.1"], "172.16.0.1", None, id="P16-smallest"),
        pytest.param(["172.16.0.1", "172.16.0.2"], "172.16.0.1", None, id="P16-any-order"),
        pytest.param(["x", "172.16.0.2"], "172.16.0.2", None, id="P16-malformed"),
        pytest.param(["172.16.0.2", "2001:DB8::0001"], "172.16.0.2", "2001:db8::1", id="I04"),
        pytest.param([], None, None, id="P18-none"),
    ],
)
def test_location_is_the_smallest_internal_address(addresses, v4, v6):
    """One location of each family, always the same one, in canonical text."""
    assert read_node(node("n1", *addresses)) == (v4, v6)


@pytest.mark.parametrize("kind", ["ExternalIP", "Hostname"], ids="P18-{}".format)
def test_only_internal_addresses_are_locations(kind):
    """Addresses of other types are no locations."""
    assert read_node(node("n1", "203.0.113.1", kind=kind)) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        (" 2001:DB8::0001 ", "2001:db8::1"),
        ("10.0.0.01", None),
        ("host.example", None),
        ("fe80::1%eth0", None),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:a00:1", "10.0.0.1"),
        ("::10.0.0.1", None),
        ("::2", None),
        ("64:ff9b::10.0.0.1", "64:ff9b::a00:1"),
        ("10.0.0.0/24", None),
        ("", None),
    ],
    ids="P11-{}".format,
)
def test_addresses_are_canonical_or_none(text, expected):
    """One spelling for each address; what is none is none."""
    assert parse_ip(text) == expected


def test_long_texts_are_shown_in_part():
    """A message names what was written, but not all of a novel."""
    for made in (
        service(annotations={IDLE_TIMEOUT: "x" * 100_000}),
        service(load_balancer_ip="\0" * 100_000),
    ):
        refusal = read_service(made)
        assert len(refusal.message) < 600
        assert "100000 characters" in refusal.message


def test_specs_survive_their_row():
    """[S06] A spec written down is read back equal."""
    for spec in (read_service(service()), OutboundSpec(families=(4, 6))):
        data = msgspec.json.decode(msgspec.json.encode(spec))
        assert msgspec.convert(data, InboundSpec | OutboundSpec) == spec
