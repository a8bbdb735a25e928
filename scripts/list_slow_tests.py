"""Lists tests that are too dear for `make test`, from the log of a run with `--durations=0`.

    pytest -q -n 2 -m "not slow" --durations=0 > log; python scripts/list_slow_tests.py log

Whatever took more than three seconds goes to tests/slow.txt, beside what is there already; of a
test with many parameters, the cheapest stays. `make test-all` runs them all.
"""

import collections
import re
import sys
from pathlib import Path

LIST = Path(__file__).parent.parent / "tests" / "slow.txt"
SECONDS = 3.0
DEAREST = 15.0  # more than this goes, even if nothing of its test stays


def main(log: str) -> None:
    """Adds what a log says to the list."""
    times: collections.Counter[str] = collections.Counter()
    for line in Path(log).read_text().splitlines():
        found = re.match(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S.*?)\s*$", line)
        if found:
            times[found[2]] += float(found[1])
    tests = collections.defaultdict(list)
    for name, seconds in times.items():
        tests[name.split("[")[0]].append((seconds, name))
    dear = set(LIST.read_text().splitlines()) if LIST.exists() else set()
    for of_one in tests.values():
        first, *others = sorted(of_one)
        dear |= {name for seconds, name in others if seconds > SECONDS}
        dear |= {first[1]} if first[0] > DEAREST else set()
    LIST.write_text("\n".join(sorted(dear)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
