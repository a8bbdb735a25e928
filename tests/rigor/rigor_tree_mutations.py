"""Mutations of certificates whose trees split neurons; see `rigor_mutations`, which runs them.

Each is for one of two properties of one network: one that holds, by little, and one that is false,
by little, for which no certificate may ever be accepted. Where a changed certificate of the one
that holds is accepted, every bound is compared with the exact minimum over its leaf.
"""

import contextlib
import copy
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rigor_exact
import rigor_models as models
import rigor_trees
from flint import fmpq

from stagecert import ProblemError
from stagecert.verify.pruning import pruned
from stagecert_check import check, properties
from stagecert_check.certificate import Case, Certificate
from stagecert_check.tree import Task


class Base:
    """A model, a property, and a certificate with trees; it is accepted if the property `holds`."""

    def __init__(self, folder: Path, made: Any, holds: bool, kind: str):
        """`made` is what `rigor_trees.proven` or `rigor_trees.searched` made, by `kind`."""
        self.holds, folder = holds, folder / f"trees {holds} {kind}"
        files, trees = (made, None) if kind in rigor_trees.SEARCHED else made
        shutil.copytree(files[0].parent, folder)
        self.paths = [folder / path.name for path in files]
        model = onnx.load(self.paths[0])
        checker = rigor_trees.checker_of(model, self.paths[1].read_text())
        if trees is not None and kind == "slopes":
            trees = [rigor_trees.with_slopes(checker, tree) for tree in trees]
        if trees is not None:
            trees = [pruned(checker, tree) for tree in trees]
        if not holds:  # the same trees for a property that is false
            rigor_trees.property_of(self.paths[1], model, -1e-3)
        if trees is None:
            contents = (path.read_bytes() for path in self.paths[:2])
            models.write(self.paths[2], *models.read(self.paths[2]), *contents)
        else:
            rigor_trees.write(self.paths, trees)
        report = check(*self.paths)
        assert report.accepted == holds, report.reasons
        self.certificate = self.paths[2].read_bytes()
        self.header, self.arrays = models.read(self.paths[2])
        self.wanted = properties.load(self.paths[1].read_bytes())
        box = self.wanted.cases[0].inputs
        ends = [[fmpq(v.numerator, v.denominator) for v in x] for x in (box.lower, box.upper)]
        self.pieces = list(rigor_exact.traced(rigor_exact.layers_of(model), *ends))
        self.checker = rigor_trees.checker_of(model, self.paths[1].read_text())
        self.ends = _ends(self.pieces)
        self._known: dict[tuple, fmpq | None] = {}  # most leaves are as they were

    def verdict(self, certificate: bytes, thorough: bool = True) -> str:
        """ "rejected" or "unreadable", or else whether the truth agrees: "harmless" or "WRONG".

        If `thorough`, bounds and intervals of what is rejected are compared with the truth, too.
        """
        self.paths[2].write_bytes(certificate)
        try:
            report = check(*self.paths)
        except ProblemError:
            return "unreadable"
        if report.accepted and not self.holds:
            return "WRONG: the property is false"
        if not report.accepted and not report.reasons:
            return "WRONG: no reason"
        if not all(bound >= 0 for bounds in report.bounds for bound in bounds if report.accepted):
            return "WRONG: a bound that refutes nothing"
        wrong = self._wrong(report.accepted) if report.accepted or thorough else None
        return wrong or ("harmless" if report.accepted else "rejected")

    def _wrong(self, accepted: bool) -> str | None:
        """What is not true of the bounds and intervals that follow from the certificate."""
        rows = [len(case.outputs) for case in self.wanted.cases]
        try:
            opened = Certificate(self.paths[2])
            cases = opened.cases(len(self.checker.activations), rows)
        except Exception:  # there are no bounds, then
            return "WRONG: it cannot be read" if accepted else None
        for number, case in enumerate(cases):
            known, wanted = self._bounds(number, case, opened), self.wanted.cases[number]
            if accepted and len(known) < len(case.multipliers):
                return "WRONG: a leaf is missing"
            if accepted and not _cover(_leaves(case, len(wanted.inputs.lower64)), self.pieces):
                return "WRONG: the leaves do not cover"
            for task, bound in known:
                truth = self._least(task)
                if truth is None or bound == -np.inf:
                    continue
                if np.isinf(bound) or rigor_exact.exact(bound) > truth:
                    return "WRONG: a bound is above the exact minimum"
            if not self._intervals_hold(number, case, opened):
                return "WRONG: an interval lacks a number that is attained"
        return None

    def _bounds(self, number: int, case: Case, opened: Certificate) -> list[tuple[Task, float]]:
        """The leaves that have bounds, and these, until something is refused."""
        found = []
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            tasks = list(self.checker.tasks(number, case))
            for some, bounds in self.checker.bounds(opened, tasks):
                pairs = zip(some, map(float, bounds), strict=True)
                found += [(task, bound) for task, bound in pairs if not np.isnan(bound)]
        return found

    def _least(self, task: Task) -> fmpq | None:
        path: Any = task.path
        arrays = task.low, task.high, path.neurons, path.cuts, path.sides, path.forces
        key = (task.case, task.multipliers, *(x.tobytes() for x in arrays))
        if key not in self._known:
            case = self.wanted.cases[task.case]
            self._known[key] = rigor_trees.exact_minimum(self.pieces, case, task)
        return self._known[key]

    def _intervals_hold(self, number: int, case: Case, opened: Certificate) -> bool:
        """Whether what is said of the whole box is true of every neuron."""
        if case.all is None or not any(case.all.boxes):
            return True
        inputs, branching = self.wanted.cases[number].inputs, self.checker.branching
        low, high = (np.array([x], float) for x in (inputs.lower64, inputs.upper64))
        try:
            with np.errstate(all="ignore"):
                narrow = branching.refined(opened, branching.plain(low, high), case.all.boxes)
        except Exception:
            return True
        begin = 0
        for k, size in self.checker.given.sizes.items():
            own, begin = self.ends[begin : begin + size], begin + size
            kept = narrow.kept.get(k, np.arange(size)).tolist()
            ends = [x.reshape(-1).tolist() for x in narrow.facts.boxes[k]]
            for place, low, high in zip(kept, *ends, strict=True):
                least, most = own[place]
                if not (rigor_exact.exact(low) <= least and most <= rigor_exact.exact(high)):
                    return False
            if any(most > 0 for place, (_, most) in enumerate(own) if place not in kept):
                return False
        return True


def _ends(pieces) -> list[tuple[fmpq, fmpq]]:
    """The least and the largest number that each neuron reads."""
    found = []
    for neuron in range(len(pieces[0][2])):
        values = []
        for polygon, _, hidden in pieces:
            a, b, c = hidden[neuron]
            values += [a * x + b * y + c for x, y in polygon]
        found.append((min(values), max(values)))
    return found


def _leaves(case, inputs: int) -> list[list[tuple[int, float, int]]]:
    """The splits (axis, cut, side) above every leaf, by a walk of its own."""
    nodes = iter(zip(case.axes.tolist(), case.cuts.tolist(), strict=True))

    def below(above):
        axis, cut = next(nodes)
        if axis == -1:
            return [above]
        return below([*above, (axis, cut, 1)]) + below([*above, (axis, cut, -1)])

    found = below([])
    assert next(nodes, None) is None
    return found


def _cover(leaves, pieces) -> bool:
    """Whether corners and middles of all linear pieces are on some leaf."""
    for polygon, _, hidden in pieces:
        if not polygon:
            continue
        middle = [sum((p[k] for p in polygon), fmpq(0)) / len(polygon) for k in range(2)]
        for x, y in [*polygon, middle]:
            values = [x, y, *(a * x + b * y + c for a, b, c in hidden)]
            if not any(
                all(side * (values[axis] - rigor_exact.exact(cut)) <= 0 for axis, cut, side in leaf)
                for leaf in leaves
            ):
                return False
    return True


# -- kinds -----------------------------------------------------------------------------------------


def mutated(random: np.random.Generator, base: Base) -> tuple[str, bytes]:
    """(what was done, the certificate) with one change."""
    header, arrays = copy.deepcopy(base.header), {k: v.copy() for k, v in base.arrays.items()}
    kind = str(random.choice(list(_KINDS)))
    case = header["cases"][random.integers(len(header["cases"]))]
    _KINDS[kind](random, case, arrays, header)
    out = io.BytesIO()
    models.write(out, header, arrays)
    return kind, out.getvalue()


def _depths(axes) -> list[int]:
    """How many splits of neurons are above every leaf."""
    found, stack = [], [0]
    for axis in axes:
        depth = stack.pop()
        if axis == -1:
            found.append(depth)
        else:
            stack += [depth + (axis >= 2)] * 2
    return found


def _leaf_dropped(random, case, arrays, header):
    """A leaf goes, and its sibling takes the place of their parent; all arrays follow."""
    axes, cuts = arrays[case["axes"]], arrays[case["cuts"]]
    splits = np.flatnonzero(axes[:-1] >= 0)
    splits = splits[axes[splits + 1] == -1]  # those whose part below is a leaf
    if not len(splits):
        return
    node = int(random.choice(splits))
    leaf = int(np.sum(axes[: node + 1] == -1))
    depths = _depths(axes)
    level = depths[leaf] - 1  # of the split that goes, in the paths below it
    size, open_ = 0, 1  # of the sibling, in nodes
    while open_:
        open_ += 1 if axes[node + 2 + size] >= 0 else -1
        size += 1
    siblings = int(np.sum(axes[node + 2 : node + 2 + size] == -1))
    forces = np.split(arrays[case["forces"]], np.cumsum(depths)[:-1])
    if axes[node] >= 2:
        for k in range(leaf + 1, leaf + 1 + siblings):
            forces[k] = np.delete(forces[k], level)
    del forces[leaf]
    keep = np.delete(np.arange(len(axes)), [node, node + 1])
    arrays[case["axes"]], arrays[case["cuts"]] = axes[keep], cuts[keep]
    arrays[case["forces"]] = np.concatenate(forces)
    rows = np.delete(np.arange(len(depths)), leaf)
    arrays[case["multipliers"]] = arrays[case["multipliers"]][rows]
    for pair in case["slopes"]:
        for name in pair or ():
            if name is not None and len(arrays[name]) == len(depths):
                arrays[name] = arrays[name][rows]


def _sign(random, case, arrays, header):
    name = case[str(random.choice(["forces", "multipliers", "cuts"]))]
    used = np.flatnonzero(arrays[name])
    if len(used):
        arrays[name].reshape(-1)[random.choice(used)] *= -1


def _another_point(random, case, arrays, header):
    axes, cuts = arrays[case["axes"]], arrays[case["cuts"]]
    if not np.any(axes >= 0):
        return
    node = random.choice(np.flatnonzero(axes >= 0))
    change = random.choice([-1, 1]) * 10.0 ** random.uniform(-9, 1)
    cuts[node] += change


def _another_neuron(random, case, arrays, header):
    axes = arrays[case["axes"]]
    if not np.any(axes >= 0):
        return
    node = random.choice(np.flatnonzero(axes >= 0))
    axes[node] = random.choice([-2, 11, 12, 2**31 - 1, *range(11)])  # 2 inputs, 9 neurons


def _another_side(random, case, arrays, header):
    """Two leaves exchange what refutes them."""
    depths = _depths(arrays[case["axes"]])
    one, other = random.integers(len(depths), size=2)
    forces = np.split(arrays[case["forces"]], np.cumsum(depths)[:-1])
    if len(forces[one]) == len(forces[other]):
        forces[one], forces[other] = forces[other].copy(), forces[one].copy()
    arrays[case["forces"]] = np.concatenate(forces)
    rows = arrays[case["multipliers"]]
    rows[[one, other]] = rows[[other, one]]


def _number(random, case, arrays, header):
    """A number of the tree is changed a little or much, or is none."""
    name = case[str(random.choice(["forces", "multipliers", "cuts"]))]
    flat = arrays[name].reshape(-1)
    if len(flat):
        place = random.integers(len(flat))
        odd = [np.nan, np.inf, -np.inf, 1e300, -1e300, 1e31, 0, -1e-300]
        near = [flat[place] * (1 + 10.0 ** random.uniform(-9, 0)), flat[place] - 1e-3, -flat[place]]
        flat[place] = random.choice([*odd, *near, *near])


def _structure(random, case, arrays, header):
    axes = arrays[case["axes"]]
    one, other = random.integers(len(axes), size=2)
    for name in (case["axes"], case["cuts"]) if random.integers(2) else (case["axes"],):
        arrays[name][[one, other]] = arrays[name][[other, one]]


def _shapes(random, case, arrays, header):
    name = case[str(random.choice(["axes", "cuts", "forces", "multipliers"]))]
    array = arrays[name]
    changes = [array[:-1], np.concatenate([array, array[-1:]]), array[None], array[:0],
               array.astype("<f4"), array.reshape(-1), np.repeat(array, 2, axis=0)]  # fmt: skip
    arrays[name] = changes[random.integers(len(changes))]


def _slopes(random, case, arrays, header):
    """Slopes are changed, or their shapes, or they get in where there were none."""
    names = [name for pair in case["slopes"] for name in pair or () if name is not None]
    if not names:
        arrays["new"] = random.uniform(-2, 2, (1, 1, int(random.choice([4, 5])))).astype("<f4")
        case["slopes"] = [["new", None], None][:: random.choice([1, -1])]
        return
    name = str(random.choice(names))
    array = arrays[name]
    place = random.integers(array.size)
    flat = array.reshape(-1)
    how = random.integers(4)
    if how == 0:
        arrays[name] = array[: random.integers(len(array) + 1)]
    elif how == 1:
        arrays[name] = np.moveaxis(array, 0, -1)
    else:
        flat[place] = random.choice([np.nan, -1, 2, 6e4, -flat[place], flat[place] + 0.5])


def _stations(random, case, arrays, header):
    """Stations get in, with slopes and forces of any kind: right ones do no harm."""
    axes = arrays[case["axes"]]
    above, stack = [], [0]  # splits of neurons above every node
    for axis in axes:
        above.append(stack.pop())
        stack += [above[-1] + (axis >= 2)] * 2 if axis >= 0 else []
    stations = []
    for node in sorted(set(random.integers(len(axes), size=2).tolist())):
        forces = random.exponential(size=(8, above[node])) * random.integers(2, size=(8, 1))
        if random.integers(3) == 0 and forces.size:
            odd = [np.nan, -1e-3, 1e31, np.inf, 1e-310]
            forces.reshape(-1)[random.integers(forces.size)] = random.choice(odd)
        if random.integers(8) == 0:
            forces = forces[:, :-1]
        places, k = np.arange(4, dtype="<i4"), len(stations)
        arrays |= {
            f"entries{k}": np.tile(places, 2) + int(random.integers(8) == 0),
            f"sides{k}": np.repeat([1, -1], 4).astype("<i4"),
            f"slopes{k}": random.uniform(-0.2, 1.2, (8, 1, 5)).astype("<f2"),
            f"forces{k}": forces.astype(random.choice(["<f4", "<f8"])),
        }
        slopes = [[f"slopes{k}", None]]
        rows = {"entries": f"entries{k}", "sides": f"sides{k}", "slopes": slopes}
        boxes = [None, rows | {"forces": f"forces{k}"}]
        if random.integers(8) == 0:
            boxes.reverse()
        stations.append({"node": int(node + (random.integers(4) == 0)), "boxes": boxes})
    case["stations"] = stations


def _proofs_by_cases(random, case, arrays, header):
    """Proofs by cases get in, with numbers of any kind: right ones do no harm."""
    axes, cuts, forces = [], [], []
    for _ in range(8):
        open_ = [0]
        while open_:
            depth = open_.pop()
            leaf = depth > 2 or random.integers(3) == 0
            axes.append(-1 if leaf else int(random.integers(5 + (random.integers(40) == 0))))
            cuts.append(0.0 if leaf or random.integers(2) else float(random.normal()))
            forces += random.exponential(size=depth).tolist() if leaf else []
            open_ += [] if leaf else [depth + 1] * 2
    odd = [np.nan, -1e-3, 1e31, np.inf, 1e-310]
    if random.integers(4) == 0 and forces:
        forces[random.integers(len(forces))] = random.choice(odd)
    if random.integers(8) == 0:
        place = random.integers(len(axes))
        axes[place] = int(random.choice([-2, -1, 0, 9, 2**31 - 1]))
    cut = slice(None, -1 if random.integers(8) == 0 else None)
    leaves = sum(axis == -1 for axis in axes)
    places = np.tile(np.arange(4, dtype="<i4"), 2) + int(random.integers(16) == 0)
    arrays |= {
        "lemma entries": places, "lemma sides": np.repeat([1, -1], 4).astype("<i4"),
        "lemma axes": np.array(axes, "<i4"), "lemma cuts": np.array(cuts, "<f8"),
        "lemma forces": np.array(forces, "<f8")[cut], "none": np.zeros(0, "<i4"),
        "lemma slopes": random.uniform(-0.2, 1.2, (leaves, 1, 5)).astype("<f2"),
    }  # fmt: skip
    cases: dict[str, Any] = {
        key: f"lemma {key}" for key in ("entries", "sides", "axes", "cuts", "forces")
    }
    cases["slopes"] = [["lemma slopes", None]]
    rows = {"entries": "none", "sides": "none", "slopes": [None], "cases": cases}
    case["boxes"] = [None, rows] if random.integers(8) else [rows, None]
    header["version"] = int(random.choice([3, 4, 4, 4]))


# -- trees as nested lists -------------------------------------------------------------------------

Nested = list  # [axis, cut, below, above], or [-1, 0.0, number of the leaf, its forces]


def _nested(axes, cuts, forces, inputs: int) -> list[Nested]:
    """Trees in preorder, one after the other."""
    nodes, used, leaf, found = iter(zip(axes.tolist(), cuts.tolist(), strict=True)), 0, 0, []

    def below(depth):
        nonlocal used, leaf
        axis, cut = next(nodes)
        if axis == -1:
            mine, used, leaf = forces[used : used + depth].tolist(), used + depth, leaf + 1
            return [-1, 0.0, leaf - 1, mine]
        deeper = depth + (axis >= inputs)
        return [axis, cut, below(deeper), below(deeper)]

    while used < len(forces) or sum(map(_size, found)) < len(axes):
        found.append(below(0))
    return found


def _size(tree: Nested) -> int:
    return 1 if tree[0] == -1 else 1 + _size(tree[2]) + _size(tree[3])


def _all(tree: Nested, depth: int = 0, inputs: int = 0) -> list[tuple[Nested, int]]:
    """All nodes, with how many splits of neurons are above them."""
    own = [(tree, depth)]
    deeper = depth + (tree[0] >= inputs)
    return own if tree[0] == -1 else own + [
        pair for part in tree[2:] for pair in _all(part, deeper, inputs)
    ]  # fmt: skip


def _flat(trees: list[Nested]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Axes, cuts, forces, and the numbers that the leaves had."""
    every = [node for tree in trees for node, _ in _all(tree)]
    leaves = [node for node in every if node[0] == -1]
    forces = np.array([force for leaf in leaves for force in leaf[3]], "<f8")
    axes, cuts = (np.array([node[k] for node in every]) for k in (0, 1))
    return axes.astype("<i4"), cuts.astype("<f8"), forces, [leaf[2] for leaf in leaves]


def _changed(random, trees: list[Nested], inputs: int, axes: list[int]) -> None:
    """One change of the trees that leaves all arrays in order."""
    tree = trees[random.integers(len(trees))]
    every = _all(tree, 0, inputs)
    inner = [pair for pair in every if pair[0][0] != -1]
    how = int(random.integers(7))
    if how == 0 and len(trees) > 1:  # what proves one is said to prove another
        one, other = random.integers(len(trees), size=2)
        trees[one], trees[other] = trees[other], trees[one]
    elif how == 1:  # a leaf is cut in two, with forces that may have any sign
        leaf, depth = next(pair for pair in every if pair[0][0] == -1)
        axis = int(random.choice(axes))
        more = [float(random.choice([0, 1, 1e-3, -1, 1e31]))] * (axis >= inputs)
        parts = [[-1, 0.0, leaf[2], leaf[3] + more] for _ in range(2)]
        leaf[:] = [axis, float(random.choice([0, -0.0, random.normal()])), *parts]
    elif not inner:
        return
    elif how == 2:  # a part is dropped, with all that is below it
        node, depth = inner[random.integers(len(inner))]
        split, rest = node[0] >= inputs, node[2 + random.integers(2)]
        for leaf, _ in _all(rest):
            if leaf[0] == -1 and split:
                del leaf[3][depth]
        node[:] = list(rest)
    elif how == 3:  # parts change sides
        node, _ = inner[random.integers(len(inner))]
        node[2], node[3] = node[3], node[2]
    elif how == 4:  # what was grown on one box, or part, gets on another
        one, depth = every[random.integers(len(every))]
        same = [node for node, other in every if other == depth and not _within(node, one)]
        if same:
            other = same[random.integers(len(same))]
            if not _within(one, other):
                one[:], other[:] = list(other), list(one)
    elif how == 5:  # a split is of something else
        node, _ = inner[random.integers(len(inner))]
        same = [axis for axis in axes if (axis >= inputs) == (node[0] >= inputs)]
        node[0] = int(random.choice(same or axes))
    else:
        node, _ = inner[random.integers(len(inner))]
        node[1] = float(random.choice([-0.0, 5e-324, node[1] + random.normal(), 1e30, 1e31, -1e30]))


def _within(node: Nested, tree: Nested) -> bool:
    return any(node is other for other, _ in _all(tree))


def _trees(random, case, arrays, header):
    """The tree of a case is changed as a whole: parts are dropped, moved or cut again."""
    axes, cuts, forces = (arrays[case[key]] for key in ("axes", "cuts", "forces"))
    trees = _nested(axes, cuts, forces, 2)
    _changed(random, trees, 2, list(range(12)))
    axes, cuts, forces, leaves = _flat(trees)
    arrays |= {"own axes": axes, "own cuts": cuts, "own forces": forces}
    case |= {"axes": "own axes", "cuts": "own cuts", "forces": "own forces"}
    count = len(arrays[case["multipliers"]])
    arrays["own multipliers"] = arrays[case["multipliers"]][leaves]
    case["multipliers"] = "own multipliers"
    _follow(case, arrays, count, leaves)
    _clean(header, arrays)


def _follow(holder, arrays, count: int, leaves: list[int]) -> None:
    """The slopes of leaves that have moved."""
    for k, pair in enumerate(holder["slopes"]):
        for side, name in enumerate(pair or ()):
            if name is not None and len(arrays[name]) == count:
                arrays[f"own slopes {k} {side}"] = arrays[name][leaves]
                holder["slopes"][k][side] = f"own slopes {k} {side}"


def _clean(header, arrays) -> None:
    """Arrays that nothing refers to any more are left out."""
    used = json.dumps(header)
    for name in [name for name in arrays if json.dumps(name) not in used]:
        del arrays[name]


def _lemmas(random, case, arrays, header):
    """Proofs by cases of a search are changed; where there are none, random ones get in."""
    some = [rows for rows in case["boxes"] if rows and "cases" in rows]
    if not some:
        _proofs_by_cases(random, case, arrays, header)
        return
    rows = some[random.integers(len(some))]
    cases = rows["cases"] = copy.deepcopy(rows["cases"])
    for key in ("entries", "sides", "axes", "cuts", "forces"):
        arrays[f"its {key}"] = arrays[cases[key]].copy()
        cases[key] = f"its {key}"
    entries, sides, forces = (arrays[f"its {key}"] for key in ("entries", "sides", "forces"))
    how = int(random.integers(10))
    if how < 4:
        trees = _nested(arrays["its axes"], arrays["its cuts"], forces, 0)
        count = sum((_size(tree) + 1) // 2 for tree in trees)
        _changed(random, trees, 0, list(range(9)))
        (arrays["its axes"], arrays["its cuts"], arrays["its forces"], leaves) = _flat(trees)
        _follow(cases, arrays, count, leaves)
    elif how == 4:  # another end
        sides[random.integers(len(sides))] *= -1
    elif how == 5:  # of another neuron
        entries[random.integers(len(entries))] = random.integers(-1, 5)
    elif how == 6:  # another force
        if len(forces):
            place = random.integers(len(forces))
            near = [forces[place] + random.exponential(), -forces[place], -random.exponential()]
            odd = [-1e-9, 1e31, 5e-324, 1e-310, 1e30, -0.0, *near, *near]
            forces[place] = random.choice(odd)
    elif how == 7:  # a layer before, or after
        case["boxes"].reverse()
    elif how == 8:  # two for one end, or one for none
        arrays["its entries"], arrays["its sides"] = (
            (np.append(x, x[-1:]) if random.integers(2) else x[:-1]).astype("<i4")
            for x in (entries, sides)
        )
    else:
        for k, pair in enumerate(cases["slopes"]):
            for side, name in enumerate(pair or ()):
                if name is not None:
                    array = arrays[name].copy()
                    odd = [-1, 2, 6e4, -6e4, 1e-7, 0.5]
                    array.reshape(-1)[random.integers(array.size)] = random.choice(odd)
                    arrays[f"its slopes {k} {side}"] = array
                    cases["slopes"][k][side] = f"its slopes {k} {side}"
    _clean(header, arrays)


def _header(random, case, arrays, header):
    how = random.integers(6)
    if how == 0:
        header["version"] = int(random.choice([0, 1, 3, 4]))
    elif how == 1:
        case.pop(str(random.choice(list(case))))
    elif how == 2:
        case["leaves"] = []
    elif how == 3:
        case["forces"] = str(random.choice(sorted(arrays)))
    elif how == 4:
        case["boxes"] = [None, {"entries": case["axes"], "sides": case["axes"], "slopes": [None]}]
    else:
        header["cases"].reverse()


_KINDS = {
    "a leaf dropped": _leaf_dropped,
    "a sign flipped": _sign,
    "a split at another point": _another_point,
    "another neuron": _another_neuron,
    "leaves exchanged": _another_side,
    "a number": _number,
    "the order of nodes": _structure,
    "shapes": _shapes,
    "slopes": _slopes,
    "stations": _stations,
    "proofs by cases": _proofs_by_cases,
    "proofs by cases of a search": _lemmas,
    "trees": _trees,
    "the header": _header,
}
