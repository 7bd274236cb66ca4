"""What the log shows of a failure, and what it must not show."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, structlog
from services.kit import log
from services.kit.config import LogSettings
log.setup(LogSettings(format=sys.argv[1]), "test")

def connect(password):
    raise OSError("refused")

try:
    connect("hunter" + "2")
except OSError:
    structlog.get_logger().exception("it.failed")
"""


@pytest.mark.parametrize("format_", ["console", "json"])
def test_a_traceback_shows_no_values(format_):
    """The variables of a frame hold passwords; a traceback names the lines and nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, format_], capture_output=True, timeout=30, check=True
    )

    assert b"it.failed" in done.stderr
    assert b"OSError" in done.stderr
    assert b"hunter2" not in done.stderr
