"""`make bench`: run the rows, print the table, write bench/results.json."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time

from bench import harness

# Module -> its rows (a list ROWS of harness.Row).
MODULES = ("bus", "pipeline", "ledger", "whole", "prober", "provider", "provider_calls")


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run of each")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    about = harness.machine()
    print(
        f"{about['cores']} cores, {about['model']}, kernel {about['kernel']}, Python "
        f"{about['python']}, a call {about['call_ns']} ns, fsync {about['fsync_ms']} ms, "
        f"load {about['load']:.1f}\n"
    )
    summaries: list[harness.Summary] = []
    for name in MODULES:
        rows: list[harness.Row] = importlib.import_module(f"bench.{name}").ROWS
        for row in rows:
            if options.only not in row.name:
                continue
            began = time.monotonic()
            found = await row.measure(options.quick)
            harness.show(found)
            print(f"    ({time.monotonic() - began:.1f} s)\n", flush=True)
            summaries += found
    if not options.only:
        harness.save(harness.HERE / "results.json", summaries, about)
        print("written to bench/results.json")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
