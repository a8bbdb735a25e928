"""One sweep as a program, to be measured or killed.

python -m benchmarks.sweeps.driver '{"what": ..., "engine": ..., "folder": ...}'

It prints JSON: seconds, those until the first rows were stored, and MiB of memory of this process
before the sweep and at most.
"""

import json
import sys
import threading
import time
from pathlib import Path

from benchmarks.sweeps import works
from stagecert import sweeps
from stagecert.compiling import use_compilation_cache
from stagecert.sweeps import Item, Store


def main(what: str, engine: str, folder: str, count: int, batch: int = 1, address: str = "local",
         workers: int = 2, seconds: float = 0.0, log: bool = False) -> None:  # fmt: skip
    """Runs a sweep.

    Args:
        what: "images" (all methods), "backward" (images, no more than that method), or "spin".
        engine: "in-process", "processes" or "ray".
        folder: for the store and the log.
        count: how many items.
        batch: items at once.
        address: of the Ray cluster.
        workers: how many.
        seconds: of an item, for "spin".
        log: whether items are logged when they are begun.
    """
    use_compilation_cache()
    if what == "spin":
        items = [Item(place, f"{place:032x}") for place in range(count)]
        work, configuration = works.Spin(seconds), {"seconds": seconds}
    else:
        run = works.images(count, batch, "nonconvex" if what == "images" else what)
        items, work, configuration = run.items, run._work, run.configuration
    if log:
        work = works.Counted(work, Path(folder) / "log")
    if engine == "ray":
        import ray

        # Workers of a cluster do not find the benchmarks.
        ray.cloudpickle.register_pickle_by_value(works)  # type: ignore
        how = sweeps.Ray(address, workers)
    else:
        how = sweeps.InProcess() if engine == "in-process" else sweeps.Processes(workers)
    with Store(Path(folder), configuration) as store, _Memory() as memory:
        begin = time.perf_counter()
        times: list[float] = []
        sweeps.run(
            items, work, store, batch=batch, engine=how,
            progress=lambda rows: times.append(time.perf_counter() - begin),
        )  # fmt: skip
        taken = time.perf_counter() - begin
        assert len(store) == count
    found = {"seconds": taken, "first": times[0], "before": memory.before, "most": memory.most}
    print(json.dumps(found))


class _Memory:
    """Looks at the memory of this process ten times a second."""

    def __enter__(self) -> "_Memory":
        self.before = self.most = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self.most = max(self.most, self._now())

    def _now(self) -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("/proc/self/status does not say how much memory is used.")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
