"""Which address is dialled for the one that an object holds."""

import pytest

from services.prober.dialling import BadDialMap, DialMap


def test_without_rules_the_address_itself_is_dialled():
    """The map is for sandboxes and tests only."""
    assert DialMap()("10.0.0.4") == "10.0.0.4"


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("10.0.0.4", "127.1.0.4"),
        ("10.0.7.9", "127.2.0.9"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::5", "::5"),
    ],
)
def test_networks_are_mapped_one_to_one_the_most_specific_first(address, dialled):
    """The host part stays; an address outside every rule is dialled as it is."""
    rules = ["10.0.0.0/16=127.1.0.0/16", "10.0.7.0/24=127.2.0.0/24", "2001:db8::/124=::/124"]
    assert DialMap(rules)(address) == dialled


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (["10.0.0.0/16"], "there is no '='"),
        (["10.0.0.0/16=127.0.0.0/8"], "the prefix lengths differ"),
        (["10.0.0.0/16=::/16"], "the families differ"),
        (["10.0.0.1/16=127.0.0.0/16"], "has host bits set"),
        (["ten=127.0.0.0/16"], "'ten' does not appear to be an IPv4 or IPv6 network"),
        (["10.0.0.0/16=127.1.0.0/16", "10.0.0.0/16=127.2.0.0/16"], "two rules for 10.0.0.0/16"),
    ],
)
def test_a_rule_that_cannot_be_used_is_named(rules, told):
    """With what would be right."""
    with pytest.raises(BadDialMap) as refused:
        DialMap(rules)
    assert told in str(refused.value)
    assert "must be" in str(refused.value)
