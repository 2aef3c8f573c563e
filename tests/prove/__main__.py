"""Runs the lines that are asked for, in order, and prints one table. Exits with 1 if one of them does not hold."""

import sys
import time
import traceback

from tests.prove import issue_1, issue_2, issue_3, issue_4, issue_5, issue_6
from tests.prove.lines import Line, NotHere

LINES: list[Line] = [line for issue in (issue_1, issue_2, issue_3, issue_4, issue_5, issue_6) for line in issue.LINES]


def main(wanted: list[str]) -> int:
    rows = []
    for line in LINES:
        if wanted and line.number not in wanted:
            continue
        print(f"--- {line.number} {line.text}", flush=True)
        began = time.monotonic()
        try:
            verdict, figure = "holds", line.run()
        except NotHere as reason:
            verdict, figure = "not run", str(reason)
        except Exception as error:
            traceback.print_exc()
            verdict, figure = "FAILS", f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append((line.number, verdict, f"{time.monotonic() - began:.0f} s", figure))
        print(f"    {verdict}: {figure}", flush=True)
    print()
    for number, verdict, seconds, figure in rows:
        print(f"{number:6} {verdict:8} {seconds:>7}  {figure}")
    return int(any(verdict == "FAILS" for _, verdict, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
