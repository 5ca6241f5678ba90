"""Runs the bars: `python -m benchmarks.reliability.run [--only N ...] [--json FILE]`."""

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path

from benchmarks.reliability import (  # noqa: F401  (each registers its bars)
    disconnects,
    endings,
    faults,
    fuzz,
    http_cost,
    isolation,
    losses,
    overload,
    probes,
    slow_clients,
    soak,
)
from benchmarks.reliability.harness import BARS, Check, Options


def main(argv: list[str] | None = None) -> int:
    """Prints every figure; the exit code is 1 if one misses its bar."""
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="BAR", help=", ".join(BARS))
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="of the soak")
    parser.add_argument("--repeats", type=int, default=defaults.repeats, help="of injected faults")
    parser.add_argument("--cases", type=int, default=defaults.cases, help="of the API fuzzer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args(argv)
    options = Options(arguments.minutes, arguments.repeats, arguments.cases)
    unknown = set(arguments.only) - set(BARS)
    if unknown:
        parser.error(f"no bar {', '.join(sorted(unknown))}")
    # Servers that were started are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    in_order = sorted(BARS, key=lambda number: (not number.isdigit(), number.zfill(2)))
    for number in arguments.only or in_order:
        title, measure = BARS[number]
        began = time.monotonic()
        print(f"{number}: {title}", flush=True)
        try:
            checks = measure(options)
        except Exception as error:
            # The other bars are still worth measuring.
            traceback.print_exc()
            checks = [Check(f"{type(error).__name__}: {error}", 1, "", 0)]
        for check in checks:
            print(f"   {check}", flush=True)
        results.append(
            {
                "bar": number,
                "title": title,
                "seconds": round(time.monotonic() - began, 1),
                "passed": all(check.passed for check in checks),
                "checks": [{**dataclasses.asdict(c), "passed": c.passed} for c in checks],
            }
        )
    passed = sum(bool(each["passed"]) for each in results)
    print(f"{passed} of {len(results)} bars met")
    if arguments.json is not None:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
        document = {"machine": machine, "python": platform.python_version(), "bars": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(passed < len(results))


if __name__ == "__main__":
    sys.exit(main())
