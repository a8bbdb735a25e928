"""What sweeps cost: times of bounds from the networks' results, bytes measured on a real store.

`python -m benchmarks.sweeps.cost` writes cost.json and cost.md into benchmarks/results/sweeps. Data
and networks are looked for in the folder that STAGECERT_DATA names, or in ../shared/data.
"""

import argparse
import json
import os
import pickle
import sqlite3
import tempfile
import time
from pathlib import Path

from benchmarks.data import DATA, ROOT, images_file, network_file, read_images

RESULTS = ROOT / "benchmarks" / "results"
# Networks of the paper, their times, and the images that bytes are measured on.
SIZES = ("tiny", "small", "medium")
KIND = "relu_ibp"
IMAGES = 200
DEVICES, A_NODE = 1000, 8
# Name, images, bounds an image, bytes of an image as stored, and of one as float32.
SWEEPS = (
    ("CIFAR-10, test set", 10_000, 9, 3 * 32 * 32, 4 * 3 * 32 * 32),
    ("ImageNet, validation set", 50_000, 999, 3 * 224 * 224, 4 * 3 * 224 * 224),
)


def times() -> dict:
    """Seconds of one core for a bound, by network and method; compiled before."""
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        path = RESULTS / "networks" / f"stagecert_{size}_{KIND}.json"
        held = json.loads(path.read_text())
        for one in held["methods"]:
            name = one["method"] + (f" to {one['rtol']:.2g}" if "rtol" in one else "")
            bounds = held["images"] * len(one["bounds"][0])
            found.setdefault(size, {})[name] = one["cpu"] / bounds
    return found


def store_bytes() -> dict:
    """Bytes of rows on their way and in the store, with and without counterexamples."""
    from stagecert.robust.robust import Robustness
    from stagecert.sweeps.store import DATABASE

    images, labels = read_images(images_file(DATA))
    model = network_file(DATA, f"tiny_{KIND}")
    run = Robustness(model, images, labels, "8/255", method="backward", limit=IMAGES)
    with tempfile.TemporaryDirectory() as folder:
        with run.store(folder) as store:
            run.run(store)
            rows = list(store.rows(blobs=True))
        base = sqlite3.connect(Path(folder) / DATABASE)
        base.execute("UPDATE rows SET blob = NULL")
        base.commit()
        base.execute("VACUUM")
        base.close()
        plain = (Path(folder) / DATABASE).stat().st_size
    without = [row for row in rows if row.blob is None]
    return {
        "images": len(rows),
        "attacked": len(rows) - len(without),
        "row_on_the_way": len(pickle.dumps(without)) / len(without),
        "row_stored": plain / len(rows),
        "counterexample": len(next(row.blob for row in rows if row.blob is not None)),
        "model": model.stat().st_size,
        "work": len(pickle.dumps(run._work)),
        "work_images": len(rows),
    }


def store_speed(count: int = 100_000, together: int = 1_000) -> float:
    """Rows a second that one driver stores, synced to the disk."""
    from stagecert.sweeps import Row, Store

    data = {"label": 3, "status": "certified", "bound": 0.123456789, "gap": 0.25, "note": None}
    # Not in /tmp, which may be in memory.
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as folder,
        Store(Path(folder), {}) as store,
    ):
        begin = time.perf_counter()
        for first in range(0, count, together):
            store.add(Row(f"{k:032x}", k, data, 0.1) for k in range(first, first + together))
        return count / (time.perf_counter() - begin)


def start_seconds() -> float:
    """Seconds until a new worker process is ready, with an empty work."""
    from stagecert.sweeps import Item, Processes, Store, run

    begin = time.perf_counter()
    with Store(None, {}) as store:
        run([Item(0, "a")], Nothing(), store, batch=1, engine=Processes(1))
    return time.perf_counter() - begin


class Nothing:
    """Work without any."""

    def prepare(self):
        from stagecert.sweeps import Row

        return lambda items: [Row(item.key, item.place, {}) for item in items]

    def failed(self, item, why):
        raise RuntimeError(why)


def worked_through(held: dict, size: str = "medium", method: str = "nonconvex to 0.01") -> list:
    """The sweeps on DEVICES devices that are as fast as the core that was measured."""
    each, moved = held["times"][size][method], held["bytes"]
    nodes = DEVICES // A_NODE
    result = []
    for name, images, bounds, stored, single in SWEEPS:
        count = images * bounds
        down = images * stored * nodes
        up = images * moved["row_on_the_way"]
        result.append(
            {
                "sweep": name,
                "bounds": count,
                "core_hours": count * each / 3600,
                "seconds_on_devices": count * each / DEVICES,
                "rows_a_second": images / (count * each / DEVICES),
                "down_a_node": images * stored,
                "down": down,
                "up": up,
                "up_if_all_are_attacked": images * (moved["row_on_the_way"] + single),
                "bytes_a_bound": (down + up) / count,
                "stored": images * moved["row_stored"],
            }
        )
    return result


def markdown(held: dict) -> str:
    """The tables."""
    lines = [
        "Written by `python -m benchmarks.sweeps.cost`; the times of bounds are those of",
        "`benchmarks/results/networks`, on one core.",
        "",
        "| network | method | seconds a bound | bounds a second |",
        "|---|---|---|---|",
    ]
    for size, methods in held["times"].items():
        for name, one in methods.items():
            lines.append(f"| {size} | {name} | {one:.3g} | {1 / one:.4g} |")
    b = held["bytes"]
    lines += [
        "",
        "| measured | |",
        "|---|---|",
        f"| a row on its way to the driver | {b['row_on_the_way']:.0f} bytes |",
        f"| a row in the store | {b['row_stored']:.0f} bytes |",
        f"| a counterexample of CIFAR-10 | {b['counterexample']} bytes |",
        f"| the work: a model of {b['model']} bytes and {b['work_images']} images of 3072 "
        f"| {b['work']} bytes |",
        f"| rows stored a second, {held['together']} at a time | {held['rows_a_second']:.0f} |",
        f"| from nothing to a worker that is ready | {held['start']:.1f} s |",
        "",
        f"On {DEVICES} devices, each as fast as the core above ({A_NODE} a node), medium network, "
        "nonconvex to a relative gap of 0.01:",
        "",
        "| sweep | bounds | core hours | on the devices | rows a second | to each node | to all "
        "nodes | rows back | moved a bound | stored |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in held["sweeps"]:
        lines.append(
            f"| {one['sweep']} | {one['bounds']:,} | {one['core_hours']:.3g} "
            f"| {one['seconds_on_devices']:.3g} s | {one['rows_a_second']:.3g} "
            f"| {size_of(one['down_a_node'])} | {size_of(one['down'])} | {size_of(one['up'])} "
            f"| {size_of(one['bytes_a_bound'])} | {size_of(one['stored'])} |"
        )
    return "\n".join(lines) + "\n"


def size_of(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def main() -> None:
    """Measures, and writes the files."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.sweeps.cost", description=__doc__
    ).parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from stagecert.compiling import use_compilation_cache
    from stagecert.machine import made

    use_compilation_cache()
    held = {
        "made": made(),
        "kind": KIND,
        "times": times(),
        "bytes": store_bytes(),
        "together": 1_000,
        "rows_a_second": store_speed(),
        "start": start_seconds(),
    }
    held["sweeps"] = worked_through(held)
    folder = RESULTS / "sweeps"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.json").write_text(json.dumps(held, indent=1) + "\n")
    (folder / "cost.md").write_text(markdown(held))
    print(markdown(held))


if __name__ == "__main__":
    main()
