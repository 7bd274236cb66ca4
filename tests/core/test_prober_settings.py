"""The prober's settings: what is taken, and what is said about the rest."""

import msgspec
import pytest

from services.kit.config import ConfigError, ProberSettings
from services.prober.main import read_settings


def test_the_defaults_can_be_used():
    """One success, three failures, 5 s, 3 s; a dummy that no host has."""
    defaults, dummies, dial = read_settings(ProberSettings())
    assert (defaults.success, defaults.failure, defaults.period, defaults.timeout) == (1, 3, 5, 3)
    assert dummies == ("192.0.0.8", "100::1")
    assert dial("10.0.0.4") == "10.0.0.4"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"dummy_address": "127.0.0.1"}, "prober.dummy_address is '127.0.0.1'"),
        ({"dummy_address": "100::1"}, "must be an IPv4 address"),
        ({"dummy_address6": "nonsense"}, "prober.dummy_address6 is 'nonsense'"),
        (
            {"dummy_address": "10.52.0.255", "cluster_cidrs": ("10.52.0.0/16",)},
            "inside 10.52.0.0/16 of prober.cluster_cidrs",
        ),
        ({"cluster_cidrs": ("10.52.0.1/16",)}, "prober.cluster_cidrs"),
        ({"dial_map": ("10.0.0.0/16",)}, "prober.dial_map has '10.0.0.0/16'"),
        ({"timeout_s": 9}, "prober.timeout_s is 9: must be at most prober.period_s (5)"),
        ({"period_s": 0}, "prober.period_s is 0: must be greater than 0"),
        ({"replica_silence_s": 9.0}, "prober.replica_silence_s is 9: must be 0.3 to"),
        ({"replica_silence_s": 0.1}, "or 0 for no sharing"),
        ({"hold_share": 0.1}, "prober.hold_share is 0.1: must be 0.5 to 1"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(setting, told):
    """With its value and what would be right."""
    with pytest.raises(ConfigError) as refused:
        read_settings(msgspec.structs.replace(ProberSettings(), **setting))
    assert told in str(refused.value)
