"""docs/nrp-conformance.md lists every row, and every test that it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nrp-conformance.md").read_text()
LAST = {
    "S": 12,
    "K": 16,
    "N": 8,
    "D": 15,
    "W": 17,
    "R": 16,
    "E": 41,
    "P": 18,
    "G": 36,
    "F": 15,
    "U": 10,
    "A": 11,
    "L": 11,
    "I": 23,
    "M": 5,
    "C": 8,
    "Z": 53,
}


@pytest.mark.parametrize("group", LAST)
def test_every_row_is_listed_once(group):
    """Each row has one line, with a test or with a reason."""
    lines = re.findall(rf"^\| ({group}\d\d) \| .+ \| (.+) \|$", PAGE, flags=re.MULTILINE)
    assert [row for row, _ in lines] == [f"{group}{n:02d}" for n in range(1, LAST[group] + 1)]
    for row, where in lines:
        assert "::" in where or where.startswith("not applicable: "), row


def test_every_test_named_exists():
    """A renamed or deleted test has to be changed on the page too."""
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 100
    for path, name in sorted(named):
        source = (ROOT / "tests" / path).read_text()
        assert re.search(rf"(def {name}\(|^{name} = )", source, flags=re.MULTILINE), (path, name)
