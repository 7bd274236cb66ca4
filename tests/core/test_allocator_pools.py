"""What a pool's spec means: which addresses it may give out, and what is wrong with a bad one."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import addresses, objects
from schema.pools import PoolError, merge, read_plan, read_span, subtract
from tests.core.allocating import World, pool_range


def plan_of(*ranges, annotations=None, **spec):
    meta = objects.ObjectMeta(name="p", annotations=annotations)
    spec = objects.IPPoolSpec(ranges=[pool_range(text) for text in ranges], **spec)
    return read_plan(objects.IPPool(metadata=meta, spec=spec))


def all_of(plan):
    return [
        addresses.text(n)
        for shape in plan.shapes.values()
        for first, last in shape.spans
        for n in range(first, last + 1)
        if n in plan
    ]


@pytest.mark.parametrize(
    ("text", "total", "spans"),
    [
        ("192.168.100.0/24", 253, "192.168.100.1-192.168.100.254"),
        ("192.168.100.0/24 192.168.100.1-192.168.100.10 192.168.100.11", 10, None),
        ("192.168.100.0/24 192.168.100.1-192.168.100.10", 9, None),
        ("192.168.100.0/24 192.168.100.251-", 4, "192.168.100.251-192.168.100.254"),
        ("192.168.100.0/24 -192.168.100.10", 9, "192.168.100.1-192.168.100.10"),
        ("10.0.0.77/24", 253, "10.0.0.1-10.0.0.254"),
        ("10.0.0.4/30", 1, "10.0.0.5-10.0.0.6"),
        ("10.0.0.4/31", 2, "10.0.0.4-10.0.0.5"),
        ("10.0.0.4/31 - 10.0.0.4", 1, "10.0.0.4-10.0.0.5"),
        ("10.0.0.5/32", 1, "10.0.0.5-10.0.0.5"),
        ("10.0.0.0/24 10.0.0.9-10.0.0.9 10.0.0.9", 0, "10.0.0.9-10.0.0.9"),
        ("0.0.0.0/0", 2**32 - 3, None),
        ("fd00::/64", 2**64 - 2, "fd00::1-fd00::ffff:ffff:ffff:ffff"),
        ("fd00::/126", 2, "fd00::1-fd00::3"),
        ("fd00::4/127", 2, "fd00::4-fd00::5"),
        ("fd00::5/128", 1, "fd00::5-fd00::5"),
        ("fd00::/56", 2**72 - 2, None),
    ],
)
def test_a_range_counts_what_it_gives_out(text, total, spans):
    """Totals are exact for every size and family, never negative, and /31, /32 keep all."""
    plan = plan_of(text)
    assert plan.total == total
    if spans is not None:
        assert plan.text() == spans


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("192.168.100.0", "subnet", "a valid example is 192.168.1.0/24"),
        ("192.168.100.0/100", "subnet", "invalid CIDR address"),
        ("192.168.300.0/24", "subnet", "invalid CIDR address"),
        ("", "subnet", "invalid CIDR address"),
        ("192.168.10.1", "subnet", "invalid CIDR address: 192.168.10.1"),
        ("::ffff:192.0.2.0/120", "subnet", "invalid CIDR address"),
        ("192.168.100.0/24 192.168.100.0-", "rangeStart", "is the network address"),
        ("192.168.100.0/24 -192.168.100.255", "rangeEnd", "is the broadcast address"),
        ("192.168.100.0/24 192.168.101.1-", "rangeStart", "is out of subnet"),
        ("192.168.100.0/24 - 192.168.101.1", "gateway", "is out of subnet"),
        ("192.168.100.0/24 - 192.168.100.0", "gateway", "is the network address"),
        ("192.168.100.0/24 - x", "gateway", "invalid IP x"),
        ("192.168.100.5/32 192.168.100.6-", "rangeStart", "is out of subnet"),
        ("fd00::/64 fd00::-", "rangeStart", "is the network address"),
        ("fd00::/64 192.168.100.1-", "rangeStart", "is out of subnet"),
    ],
)
def test_a_bad_range_names_field_and_remedy(text, field, message):
    """The first wrong field of a range is named, with its value, as it stands in the spec."""
    with pytest.raises(PoolError) as caught:
        plan_of("172.16.0.0/24", text)
    assert caught.value.problem.field == f"spec.ranges[1].{field}"
    assert message in caught.value.problem.message


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("192.0.2.0/24 192.0.2.149-192.0.2.140", "rangeStart", "comes after range end"),
        ("192.0.2.0/24 192.0.2.10-198.51.100.9", "rangeEnd", "out of subnet"),
        ("192.0.2.0/24 192.0.2.251-192.0.2.259", "rangeEnd", "invalid IP 192.0.2.259"),
    ],
    ids=["report-65-order", "report-65-outside", "report-65-no-address"],
)
def test_a_mistyped_range_is_not_called_exhausted(text, field, message):
    """The pool is not ready for a reason that names the field; other pools go on working."""
    world = World()
    world.pool("bad", text)
    world.pool("good", "198.51.100.0/29")
    account = world.account()
    assert (account["bad"].ready, account["bad"].reason) == (False, "InvalidRange")
    assert f"spec.ranges[0].{field}" in account["bad"].message
    assert message in account["bad"].message
    world.lb("a", ip_pool="bad")
    assert world.refusal("loadbalancers", "a") == "InvalidRange"
    world.lb("b")
    assert world.lb_address("b") == "198.51.100.2"


def test_reserved_addresses_of_every_range_are_never_given_out():
    """Gateway, network and broadcast of one range are missing from all ranges of the pool."""
    plan = plan_of(
        "10.0.0.0/24 10.0.0.100-10.0.0.130",
        "10.0.0.0/25 10.0.0.10-10.0.0.12 10.0.0.101",
    )
    given_out = all_of(plan)
    assert "10.0.0.101" not in given_out  # gateway of the second range
    assert "10.0.0.127" not in given_out  # its broadcast address
    assert plan.total == len(given_out) == 31 - 2 + 3


def test_exclusions_in_every_form():
    """Addresses, ranges and CIDRs, in the spec and in the annotation, are taken out and counted."""
    plan = plan_of(
        "10.0.0.0/24",
        exclude=["10.0.0.9", "10.0.0.20-10.0.0.29", "10.0.0.64/26"],
        annotations={"lbledger.io/exclude": "10.0.0.200, 10.0.0.210-10.0.0.211"},
    )
    assert plan.total == 253 - 1 - 10 - 64 - 3
    given_out = set(all_of(plan))
    assert len(given_out) == plan.total
    assert not given_out & {"10.0.0.9", "10.0.0.25", "10.0.0.64", "10.0.0.127", "10.0.0.210"}


@pytest.mark.parametrize("text", ["10.0.0.300", "10.0.0.9-10.0.0.5", "10.0.0.1-fd00::1", "x/24"])
def test_a_bad_exclusion_names_itself(text):
    with pytest.raises(PoolError, match=r"spec\.exclude\[1\]"):
        plan_of("10.0.0.0/24", exclude=["10.0.0.9", text])


def test_avoiding_buggy_addresses_counts_right():
    """avoidBuggyIPs leaves out .0 and .255 of IPv4, across octets, in count and in fact."""
    plan = plan_of("10.0.0.0/22", avoid_buggy_ips=True)
    assert plan.total == 1024 - 2 - 1 - 6
    assert len(all_of(plan)) == plan.total
    assert plan_of("10.0.0.0/22", annotations={"lbledger.io/avoid-buggy-ips": "true"}) == plan
    assert plan_of("fd00::ff/120", avoid_buggy_ips=True).total == 254
    with pytest.raises(PoolError, match="avoid-buggy-ips"):
        plan_of("10.0.0.0/22", annotations={"lbledger.io/avoid-buggy-ips": "yes"})


def test_overlapping_ranges_of_one_pool_are_refused():
    with pytest.raises(PoolError, match="there are overlaps between range"):
        plan_of("10.0.0.0/24", "10.0.0.0/24 10.0.0.30-10.0.0.40")
    assert plan_of("10.0.0.0/24 10.0.0.10-10.0.0.20", "10.0.0.0/24 10.0.0.30-10.0.0.40").total == 22


def test_no_range_at_all():
    with pytest.raises(PoolError, match="range can't be empty"):
        plan_of()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("10.0.0.1", "is subnet's gateway"),
        ("10.0.0.0", "is the network address"),
        ("10.0.0.255", "is the broadcast address"),
        ("10.0.1.1", "not in range set 10.0.0.1-10.0.0.254"),
        ("10.0.0.9", "is excluded"),
        ("fd00::1", "not in range set"),
        ("10.0.0.7", ""),
    ],
)
def test_why_an_address_is_not_given_out(address, why):
    plan = plan_of("10.0.0.0/24", exclude=["10.0.0.9"])
    found = plan.why_not(addresses.parse(address))
    assert why in found
    assert bool(found) == bool(why)


def test_masks_and_gateways():
    """Dotted for IPv4, a prefix length for IPv6; a /32 has no gateway and never says <nil>."""
    plan = plan_of("10.0.0.0/20", "fd00::/64", "192.0.2.5/32")
    rendered = [(item.mask, item.gateway_text) for item in plan.ranges]
    assert rendered == [("255.255.240.0", "10.0.0.1"), ("64", "fd00::1"), ("255.255.255.255", "")]


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=6,
)


@given(spans, spans)
def test_span_arithmetic_is_set_arithmetic(whole, holes):
    """merge() and subtract() say of ranges what sets say of single numbers."""

    def points(parts):
        return {n for first, last in parts for n in range(first, last + 1)}

    left = subtract(merge(whole), merge(holes))
    assert points(left) == points(whole) - points(holes)
    assert list(left) == sorted(left)
    assert sum(last - first + 1 for first, last in left) == len(points(left))


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("192.0.2.5", "192.0.2.5"),
        ("192.0.2.5/32", "192.0.2.5"),
        ("2001:DB8::0:5", "2001:db8::5"),
        ("2001:db8:0:0::3", "2001:db8::3"),
        ("::ffff:192.0.2.4", "192.0.2.4"),
        (" 192.0.2.7 ", "192.0.2.7"),
    ],
    ids=lambda text: f"report-49-{text}",
)
def test_every_spelling_is_one_address(spelling, canonical):
    """[report-14] too: a mapped address is the IPv4 address, never a second one."""
    number = addresses.parse(spelling)
    assert addresses.text(number) == canonical
    assert addresses.parse_canonical(canonical) == number


@given(st.integers(0, (1 << 128) - 1) | st.integers(0, 1 << 66) | st.sampled_from([0, 1, 1 << 32]))
def test_text_of_an_ipv6_address_is_the_canonical_one(number):
    """As the standard library spells it, and it reads back."""
    address = ipaddress.IPv6Address(number)
    held = addresses.number(address)
    if address.ipv4_mapped is None:
        assert addresses.text(held) == str(address)
    assert addresses.parse_canonical(addresses.text(held)) == held == addresses.parse(str(address))


@pytest.mark.parametrize("text", ["", "192.0.2", "192.0.2.0/24", "fe80::1%eth0", "host", "1"])
def test_what_is_no_address(text):
    with pytest.raises(addresses.AddressError):
        addresses.parse(text)


def test_span_of_a_whole_network():
    assert read_span("10.0.0.0/30", "x") == (10 << 24, (10 << 24) + 3)
