"""How fast trees of splits grow and are checked: `python -m benchmarks.vnncomp.nodes`.

For some properties of three sets, without attacks: CPU seconds of the search, nodes a second, and
the checker's CPU seconds for the leaves of the finished tree. Besides, the same for a tree of
10,000 leaves of the network of mnist_fc with four layers of 256 relu, whatever the checker says of
them, beside what the search takes for a tree of so many leaves at its rate.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.vnncomp.__main__ import DATA, RESULTS
from stagecert.verify.branches import LEAF, Branches
from stagecert.verify.complete import Complete
from stagecert.verify.models import opened
from stagecert.verify.pruning import tried
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.checker import Checker

FILE = RESULTS / "nodes.json"
PROPERTIES = (
    ("safenlp", "onnx/medical/perturbations_0.onnx", "vnnlib/medical/hyperrectangle_2321.vnnlib"),
    ("mnist_fc", "onnx/mnist-net_256x4.onnx", "vnnlib/prop_3_0.05.vnnlib"),
    ("mnist_fc", "onnx/mnist-net_256x4.onnx", "vnnlib/prop_8_0.03.vnnlib"),
    ("mnist_fc", "onnx/mnist-net_256x4.onnx", "vnnlib/prop_11_0.05.vnnlib"),
    ("mnist_fc", "onnx/mnist-net_256x4.onnx", "vnnlib/prop_14_0.05.vnnlib"),
    ("mnist_fc", "onnx/mnist-net_256x6.onnx", "vnnlib/prop_7_0.03.vnnlib"),
    ("oval21", "onnx/cifar_base_kw.onnx",
     "vnnlib/cifar_base_kw-img8717-eps0.011633986928104577.vnnlib"),
)  # fmt: skip
LARGE = ("mnist_fc", "onnx/mnist-net_256x4.onnx", "vnnlib/prop_2_0.05.vnnlib")
LEAVES, SPLIT = 10_000, 40


def _found(path: Path) -> str:
    return str(path if path.exists() else path.with_name(path.name + ".gz"))


def planted(name: str, model: str, property: str) -> Complete:
    """A search that is about to begin, with its intervals."""
    wanted = properties.load(_found(DATA / name / property))
    read = opened(_found(DATA / name / model), wanted)
    _, groups = groups_of(read.network, wanted)
    search = Complete(Checker(read.program, wanted), groups)
    open_ = []
    for g, group in enumerate(groups):
        passes = group.passes(search.whole(g).bounds)
        open_.append(np.array([not passes[rows].any() for rows in group.places]))
    search.tighten(open_, lambda: False)
    search.plant(open_, lambda: False)
    return search


def searched(case: tuple[str, str, str], limit: float) -> dict:
    """The search and the check of one property, in CPU seconds."""
    begin = time.process_time()
    search = planted(*case)
    tree = search.tree
    assert tree is not None
    ready = time.process_time()
    while not tree.done and not tree.stuck and time.process_time() - begin < limit:
        tree.step()
    done = time.process_time()
    trees = search.branches()
    told = [tried(search.checker, tree) for tree in trees]
    return {
        "set": case[0], "model": case[1], "property": case[2], "finished": tree.done,
        "neurons": tree.form.neurons, "nodes": tree.seen, "stations": len(tree.stations),
        "intervals_s": round(ready - begin, 2), "search_s": round(done - ready, 2),
        "nodes_a_second": round(tree.seen / (done - ready)),
        "leaves": sum(tree.leaves for tree in trees),
        "confirmed": sum(int(np.sum(one.refuted)) for one in told),
        "check_s": round(time.process_time() - done, 2),
    }  # fmt: skip


def checked(case: tuple[str, str, str], seconds: float) -> dict:
    """A tree with many leaves in the checker, and a search of some seconds on the same network."""
    search = planted(*case)
    tree = search.tree
    assert tree is not None
    begin = time.process_time()
    while not tree.done and time.process_time() - begin < seconds:
        tree.step()
    rate = tree.seen / (time.process_time() - begin)
    root = tree.roots[0]
    width = np.where((root.low < 0) & (root.high > 0), root.high - root.low, 0)
    # The widest neurons, from the root on: as even a tree as there is with so many leaves.
    neurons = search.kept[np.argsort(-width)[:SPLIT]] + len(root.box[0])
    axes, forces, stack = [], [], [(LEAVES, 0)]
    while stack:
        leaves, depth = stack.pop()
        axes.append(LEAF if leaves == 1 else neurons[depth])
        if leaves == 1:
            forces += [0.01] * depth
        else:
            stack += [(leaves // 2, depth + 1), (leaves - leaves // 2, depth + 1)]
    number = search.groups[root.group].numbers[root.case]
    given = Branches(number, np.array(axes), np.zeros(len(axes)),
                     np.ones((LEAVES, len(root.rows))), np.array(forces))  # fmt: skip
    begin = time.process_time()
    tried(search.checker, given)
    return {
        "set": case[0], "model": case[1], "property": case[2], "neurons": tree.form.neurons,
        "leaves": LEAVES, "check_s": round(time.process_time() - begin, 2),
        "nodes_a_second": round(rate), "search_s": round((2 * LEAVES - 1) / rate, 2),
    }  # fmt: skip


def main() -> None:
    """Runs everything, writes the file and prints it."""
    from stagecert.machine import made

    parser = argparse.ArgumentParser(prog="benchmarks.vnncomp.nodes", description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds for a search")
    options = parser.parse_args()
    with np.errstate(all="ignore"):
        found = {
            "made": made(),
            "searches": [searched(case, options.limit) for case in PROPERTIES],
            "many_leaves": checked(LARGE, min(options.limit, 5.0)),
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
