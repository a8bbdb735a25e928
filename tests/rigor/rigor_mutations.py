"""Mutations of certificates, models and properties, and a count of what the checker says of them.

    python tests/rigor/rigor_mutations.py mutations --count 1000 --out RESULT.json
    python tests/rigor/rigor_mutations.py trees --count 5000 --out RESULT.json
    python tests/rigor/rigor_mutations.py fuzz --count 100000 --out RESULT.json

Mutations: one change, such as a forger would try; hashes follow changed files in half of the cases.
A change is harmless if the property still holds for the model, which an exact computation in
rational numbers says (`rigor_exact`). Trees: the same for certificates that split neurons
(`rigor_tree_mutations`). Fuzzing: files that are broken in any way. The checker must
answer, in little time and memory, and never accept what is false.
"""

import argparse
import collections
import copy
import datetime
import functools
import io
import json
import resource
import signal
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import rigor_exact
import rigor_models as models
import rigor_tree_mutations as trees
import rigor_trees
from onnx import numpy_helper

from stagecert import ProblemError
from stagecert.verify import certificates
from stagecert_check import check, properties


class Base:
    """A model, a property and an accepted certificate, small enough for exact arithmetic."""

    def __init__(self, folder: Path, with_slopes: bool):
        self.folder, self.written = folder / str(with_slopes), {}
        self.folder.mkdir()
        model = models.mlp((2, 6, 5, 3), seed=1)
        centre, radius = np.array([0.4, -0.1]), 0.2 if with_slopes else 0.6
        label = int(models.run(model, [centre])[0].argmax())
        text = models.vnnlib(centre - radius, centre + radius, 3, models.robust(label, 3))
        self.model, self.text = model.SerializeToString(), text.encode()
        paths = [self.folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
        for path, data in zip(paths, (self.model, self.text), strict=False):
            path.write_bytes(data)
        proof = models.proof_of(paths[0], paths[1])
        if with_slopes:
            cases = tuple(
                _sloped(case, model, centre)
                for case in proof.cases
                if isinstance(case, certificates.CaseProof)
            )
            proof = certificates.Proof(proof.model, proof.property, cases)
        paths[2].write_bytes(certificates.packed(proof))
        assert check(paths[0], paths[1], paths[2]).accepted
        self.certificate = paths[2].read_bytes()
        self.header, self.arrays = models.read(paths[2])


def _sloped(case: Any, model, centre) -> certificates.CaseProof:
    """The same case with slopes and boxes that are written down: what is linear at the centre."""
    first, bias, second, more, *_ = (numpy_helper.to_array(t) for t in model.graph.initializer)
    if first.ndim == 1:
        first, bias, second, more = bias, first, more, second
    one = centre @ first + bias
    two = np.maximum(one, 0) @ second + more
    on = [(x > 0).astype("<f4")[None] for x in (one, two)]
    rows = certificates.Rows(
        np.arange(5, dtype="<i4"),
        np.array([1, -1, 1, -1, 1], "<i4"),
        ((np.repeat(on[0][None], 5, axis=0).astype("<f2"), None),),
    )
    slopes = (on[0], None), (on[1].astype("<f8"), None)
    leaves = [certificates.Leaf(leaf.multipliers, slopes, (None, rows)) for leaf in case.leaves]
    return certificates.CaseProof(case.splits, tuple(leaves))


def verdict(base: Base, model: bytes, text: bytes, certificate: bytes) -> str:
    """ "rejected" or "unreadable", or else whether the truth agrees: "harmless" or "WRONG"."""
    # Each base has its own folder, and most mutations leave two of the files as they are.
    paths = [base.folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
    for path, data in zip(paths, (model, text, certificate), strict=True):
        if base.written.get(path) != data:
            path.write_bytes(data)
            base.written[path] = data
    try:
        report = check(paths[0], paths[1], paths[2])
    except ProblemError:
        return "unreadable"
    if not report.accepted:
        assert report.reasons
        return "rejected"
    if not all(np.isfinite(bound) and bound >= 0 for case in report.bounds for bound in case):
        return "WRONG: a bound that refutes nothing"
    parsed = onnx.ModelProto()
    parsed.ParseFromString(model)
    return "harmless" if rigor_exact.holds(parsed, properties.load(text)) else "WRONG: false"


# -- mutations -------------------------------------------------------------------------------------


def _pack(header, arrays, model=None, text=None) -> bytes:
    out = io.BytesIO()
    models.write(out, header, arrays, model, text)
    return out.getvalue()


def _nudged(random, array: np.ndarray) -> np.ndarray:
    array = array.copy()
    if not array.size:
        return array
    place = tuple(random.integers(n) for n in array.shape)
    if array.dtype.kind == "i":
        array[place] += random.choice([-2, -1, 1, 2])
        return array
    how = random.integers(6)
    change = float(random.choice([-1, 1]) * 10.0 ** random.uniform(-12, 2))
    with np.errstate(over="ignore"):
        if how < 3:
            array[place] += change
        else:
            array[place] = [0, -float(array[place]), 1 + float(array[place])][how - 3]
    return array


def mutated(random: np.random.Generator, base: Base) -> tuple[str, bytes, bytes, bytes]:
    """(what was done, model, property, certificate) with one change."""
    header, arrays = copy.deepcopy(base.header), dict(base.arrays)
    model, text = base.model, base.text
    kind = str(random.choice(list(_KINDS)))
    if kind == "bytes of the certificate":
        return kind, model, text, _flipped(random, base.certificate)
    changed = _KINDS[kind](random, base, header, arrays)
    follow = bool(random.integers(2))
    if kind in _MODELS:
        model, kind = changed, kind + (", hash follows" if follow else "")
        return kind, model, text, _pack(header, arrays, model if follow else None)
    if kind in _PROPERTIES:
        text, kind = changed, kind + (", hash follows" if follow else "")
        return kind, model, text, _pack(header, arrays, None, text if follow else None)
    return kind, model, text, changed if isinstance(changed, bytes) else _pack(header, arrays)


def _flipped(random, data: bytes) -> bytes:
    broken = bytearray(data)
    for place in random.integers(0, len(data), random.integers(1, 4)):
        broken[place] ^= 1 << int(random.integers(8))
    return bytes(broken)


def _array(random, base, header, arrays, keys=None):
    names = sorted(arrays) if keys is None else [c[k] for c in header["cases"] for k in keys]
    name = str(random.choice(names))
    arrays[name] = _nudged(random, arrays[name])


def _members(random, base, header, arrays):
    names = sorted(arrays)
    one, other = (str(name) for name in random.choice(names, 2))
    how = random.integers(4)
    if how == 0:
        del arrays[one]
    elif how == 1:
        arrays["copy"] = arrays[one]
    elif how == 2:
        arrays[one], arrays[other] = arrays[other], arrays[one]
    else:
        out = io.BytesIO(_pack(header, arrays))
        with zipfile.ZipFile(out, "a") as file, warnings.catch_warnings(action="ignore"):
            data = io.BytesIO()
            np.save(data, _nudged(random, arrays[one]))
            file.writestr(f"{one}.npy", data.getvalue())
        return out.getvalue()
    return None


def _header(random, base, header, arrays):
    case = header["cases"][random.integers(len(header["cases"]))]
    how = random.integers(9)
    if how == 0:
        header["cases"].reverse()
    elif how == 1:
        header["cases"].pop()
    elif how == 2:
        header["cases"].append(case)
    elif how == 3:
        header[str(random.choice(list(header)))] = random.choice(["", "0.2", "x" * 64])
    elif how == 4:
        case[str(random.choice(list(case)))] = str(random.choice(sorted(arrays)))
    elif how == 5:
        header["model_sha256"], header["property_sha256"] = (
            header["property_sha256"], header["model_sha256"])  # fmt: skip
    elif how == 6:
        header.pop(str(random.choice(list(header))))
    elif how == 7:
        header[f"key{random.integers(10)}"] = 1
    else:
        header["version"] = int(random.choice([0, 2, 3, -1, 10**9]))


def _weights(random, base, header, arrays):
    model = onnx.ModelProto()
    model.ParseFromString(base.model)
    tensor = model.graph.initializer[random.integers(len(model.graph.initializer))]
    array = _nudged(random, numpy_helper.to_array(tensor))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model.SerializeToString()


def _nodes(random, base, header, arrays):
    model = onnx.ModelProto()
    model.ParseFromString(base.model)
    nodes = model.graph.node
    node = nodes[random.integers(len(nodes))]
    how = random.integers(4)
    if how == 0:
        node.op_type = str(random.choice(["Relu", "Tanh", "Abs", "Sigmoid", "Gemm", "Nothing"]))
    elif how == 1:
        node.attribute.append(onnx.helper.make_attribute(
            str(random.choice(["alpha", "beta", "transA", "transB", "other"])), 1))  # fmt: skip
    elif how == 2:
        names = [name for one in nodes for name in one.input]
        node.input[random.integers(len(node.input))] = str(random.choice(names))
    else:
        nodes.remove(node)
    return model.SerializeToString()


def _text(random, base, header, arrays):
    lines = base.text.decode().splitlines()
    place = int(random.integers(5, len(lines)))
    words = lines[place].split()
    word = int(random.integers(len(words)))
    others = ["0.25", "0.25))", "X_1", "Y_2", "Y_0", "(and", "-1.5))", "(>=", "(<=", "(assert"]
    words[word] = str(random.choice(others))
    lines[place] = " ".join(words)
    if random.integers(4) == 0:
        lines.pop(place)
    return "\n".join(lines).encode()


_KINDS = {
    "bytes of the certificate": None,
    "arrays": _array,
    "splits": lambda *given: _array(*given, keys=("axes", "cuts")),
    "multipliers": lambda *given: _array(*given, keys=("multipliers",)),
    "members": _members,
    "header": _header,
    "weights": _weights,
    "nodes": _nodes,
    "bytes of the model": lambda random, base, header, arrays: _flipped(random, base.model),
    "rows and bounds": _text,
    "bytes of the property": lambda random, base, header, arrays: _flipped(random, base.text),
}
_MODELS = ("weights", "nodes", "bytes of the model")
_PROPERTIES = ("rows and bounds", "bytes of the property")


def run_mutations(count: int, seed: int, folder: Path) -> dict[str, collections.Counter]:
    """What became of so many mutations, by kind."""
    random = np.random.default_rng(seed)
    bases = [Base(folder, with_slopes) for with_slopes in (False, True)]
    tally: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for number in range(count):
        base = bases[number % 2]
        kind, model, text, certificate = mutated(random, base)
        found = verdict(base, model, text, certificate)
        changed = (model, text) != (base.model, base.text)
        if changed and "follows" not in kind and found == "harmless":
            found = "WRONG: another file"
        tally[kind][found] += 1
    return tally


def _tree_bases(folder: Path) -> list[trees.Base]:
    made = {"plain": rigor_trees.proven, "slopes": rigor_trees.proven} | {
        kind: functools.partial(rigor_trees.searched, kind=kind) for kind in rigor_trees.SEARCHED
    }
    found = []
    for kind, make in made.items():
        (folder / kind).mkdir()
        files = make(folder / kind)
        found += [trees.Base(folder, files, holds, kind) for holds in (False, True)]
    return found


def run_trees(count: int, seed: int, folder: Path) -> dict[str, collections.Counter]:
    """The same for certificates whose trees split neurons."""
    random, bases = np.random.default_rng(seed), _tree_bases(folder)
    tally: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for number in range(count):
        base = bases[number % len(bases)]
        kind, certificate = trees.mutated(random, base)
        tally[kind][base.verdict(certificate)] += 1
    return tally


# -- fuzzing ---------------------------------------------------------------------------------------

_ODD = [
    None, True, -1, 0, 1, 2**31, 10**400, 1e308, float("nan"), float("inf"), "", "a0", "a1", "a2",
    "../a0", "x" * 1000, [], {}, [[]], ["a0"], [None, None], {"a0": 1},
]  # fmt: skip


def _places(tree, found=None) -> list:
    """(container, key) of everything in a header."""
    found = [] if found is None else found
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], (dict, list)):
            _places(tree[key], found)
    return found


def _odd_npy(random) -> bytes:
    """An array's file with an odd header, or odd contents."""
    shape = [(), (0,), (3,), (2**62,), (-1,), (10**9, 10**9), (5, 1), (1, 6)][random.integers(8)]
    dtype = ["<f8", "<f4", "<f2", "<i4", ">f8", "|O", "<c16", "|V8", "<U9", "f8,f8", "?"]
    text = str({"descr": str(random.choice(dtype)), "fortran_order": bool(random.integers(2)),
                "shape": shape})  # fmt: skip
    if random.integers(4) == 0:
        text = "(" * int(random.integers(1, 5000)) + text
    raw = text.encode() + b"\n"
    version = bytes([int(random.choice([1, 1, 1, 2, 3, 9])), 0])
    length = int(random.choice([len(raw), len(raw), 65535, 0])).to_bytes(2, "little")
    return b"\x93NUMPY" + version + length + raw + bytes(int(random.choice([0, 24, 48, 1000])))


def fuzzed(random: np.random.Generator, base: Base | trees.Base) -> bytes:
    """A certificate that is broken in some way."""
    how = int(random.integers(8))
    data = base.certificate
    if how < 3:  # bytes
        broken = bytearray(data)
        for _ in range(int(random.integers(1, 20))):
            place = int(random.integers(len(broken)))
            action = random.integers(4)
            if action == 0:
                broken[place] = int(random.integers(256))
            elif action == 1:
                del broken[place : place + int(random.integers(1, 30))]
            elif action == 2:
                broken[place:place] = random.bytes(int(random.integers(1, 30)))
            else:
                other = int(random.integers(len(broken)))
                broken[place:place] = broken[other : other + int(random.integers(1, 200))]
            if not broken:
                break
        return bytes(broken)
    header, arrays = copy.deepcopy(base.header), dict(base.arrays)
    if how < 6:  # the header
        for _ in range(int(random.integers(1, 4))):
            places = _places(header)
            if places:
                tree, key = places[random.integers(len(places))]
                tree[key] = copy.deepcopy(_ODD[random.integers(len(_ODD))])
        if how == 5:
            text = json.dumps(header)
            broken = {
                0: text.replace("[", "[" * 100_000, 1),
                1: text[: len(text) // 2],
                2: text.replace(":", ":" + "9" * 5000, 1),
                3: text.replace("null", "[" * 900 + "]" * 900, 1),
            }
            text = broken.get(int(random.integers(9)), text)
            return _zip({"header.json": text.encode()} | _files(arrays))
        return _zip({"header.json": json.dumps(header).encode()} | _files(arrays))
    files = {"header.json": json.dumps(header).encode()} | _files(arrays)
    name = str(random.choice(sorted(files)))
    choice = random.integers(500)
    if choice == 0:  # a bomb: many zeros
        files[name] = files[name] + bytes(10**8)
    elif choice < 100:
        files[name] = random.bytes(int(random.integers(0, 200)))
    elif choice < 400:
        name = str(random.choice(sorted(set(files) - {"header.json"})))
        files[name] = _odd_npy(random)
    else:
        name = str(random.choice(sorted(arrays)))
        array = arrays[name].reshape(-1)
        array = np.resize(array, int(random.choice([0, 1, 3, 7, 100_000])))
        files |= _files({name: array.astype(str(random.choice(["<f8", "<f4", "<i4", "<f2"])))})
    return _zip(files)


def _files(arrays) -> dict[str, bytes]:
    files = {}
    for name, array in arrays.items():
        out = io.BytesIO()
        np.save(out, array)
        files[f"{name}.npy"] = out.getvalue()
    return files


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


def run_fuzz(count: int, seed: int, folder: Path, say=lambda _: None) -> dict:
    """What became of so many files; the longest time and the most memory that one took."""
    random = np.random.default_rng(seed)
    bases = [Base(folder, with_slopes) for with_slopes in (False, True)]
    bases += [base for base in _tree_bases(folder) if base.holds]
    tally: collections.Counter = collections.Counter()
    longest, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(BaseException("hangs")))
    for number in range(count):
        base = bases[number % len(bases)]
        data = fuzzed(random, base)
        begin = time.process_time()
        signal.alarm(60)
        if isinstance(base, Base):
            tally[verdict(base, base.model, base.text, data)] += 1
        else:
            tally[base.verdict(data, thorough=False)] += 1
        signal.alarm(0)
        longest = max(longest, time.process_time() - begin)
        if number % 1000 == 999:
            say(f"{number + 1} files: {dict(tally)}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "answers": dict(tally),
        "longest check, s": round(longest, 2),
        "memory at most, MiB more than before": (after - before) // 1024,
    }


def main() -> None:
    """Runs mutations or fuzzing and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("mutations", "trees", "fuzz"))
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    held = {"count": options.count, "seed": options.seed,
            "date": datetime.date.today().isoformat()}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if options.what != "fuzz":
            run = run_mutations if options.what == "mutations" else run_trees
            found = run(options.count, options.seed, Path(folder))
            total: collections.Counter = sum(found.values(), collections.Counter())
            held |= {"answers": dict(total), "kinds": {k: dict(v) for k, v in found.items()}}
        else:
            held |= run_fuzz(
                options.count, options.seed, Path(folder), lambda line: print(line, flush=True)
            )
    options.out.write_text(json.dumps(held, indent=1) + "\n")
    print(json.dumps(held, indent=1))


if __name__ == "__main__":
    main()
