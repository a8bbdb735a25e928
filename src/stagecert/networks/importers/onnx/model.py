"""Networks from ONNX models.

`load` turns a model into a `Network`, or says which of its nodes cannot be handled and why;
`describe` lists all nodes without stopping at those.
"""

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

try:
    import onnx
    import onnx.external_data_helper
except ImportError as error:
    raise ImportError("Reading ONNX models needs the package onnx: pip install onnx") from error

from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert.networks.graph import Network, Value
from stagecert.networks.importers.enclosures import CONSTANT, Constant
from stagecert.networks.importers.onnx import (
    arithmetic,  # noqa: F401  (these register their operators)
    composed,  # noqa: F401
    recurrent,  # noqa: F401
    reductions,  # noqa: F401
    shapes,
    where,  # noqa: F401
    windows,  # noqa: F401
)
from stagecert.networks.importers.onnx.constants import constant, fold, stored
from stagecert.networks.importers.onnx.functions import inlined
from stagecert.networks.importers.onnx.nodes import (
    CONVERTERS,
    LARGEST,
    LARGEST_COMPUTED,
    Call,
    Draft,
    Item,
    Placeholder,
    Refused,
    words,
)

Source: TypeAlias = str | Path | bytes | onnx.ModelProto
Batched: TypeAlias = bool | Sequence[bool] | None

# The first opset whose arithmetic broadcasts as NumPy does.
OLDEST_OPSET = 7

_JOINT = words("Hardmax MeanVarianceNormalization Attention LpPool")
_STEPS = words(
    "ArgMax ArgMin TopK Equal Less LessOrEqual Greater GreaterOrEqual Not "
    "And Or Xor Mod IsNaN IsInf NonZero"
)
# Their outputs have the broadcast shape of their inputs, also where they are refused.
_ENTRYWISE = words(
    "Pow Softmax LogSoftmax Hardmax LayerNormalization InstanceNormalization "
    "GroupNormalization RMSNormalization Tan Sinh Cosh Asin "
    "Acos Atan Asinh Acosh Atanh ThresholdedRelu Shrink Where Clip PRelu"
)


@dataclass(frozen=True)
class Row:
    """One node of a model.

    Attributes:
        number: its place in the file, counted from one.
        operator: what ONNX calls it.
        name: its own name, which may be empty.
        shapes: the shapes of its outputs; None where they are not known.
        parameters: how many stored numbers it reads.
        role: affine, max, product, constant, or an activation's kind (several if it is made of
            several); "merged" if it is a part of an activation that is spelt out, "unused" if no
            output needs it, "refused", and "unknown" if it depends on a refused node.
        reason: why it is refused; None if it is not.
        relaxation: "exact"; "hull" if bounds know no more than the convex hull of its function on
            an interval or a box; "hulls" if they know those of its parts, each by itself; None if
            it is none of these.
        steps: how many operations it is made of that are relaxed, one after the other.
    """

    number: int
    operator: str
    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    parameters: int
    role: str
    reason: str | None = None
    relaxation: str | None = None
    steps: int = 0

    @property
    def supported(self) -> bool | None:
        """Whether stagecert can handle it; None if that depends on a node that it refuses."""
        return None if self.role == "unknown" else self.reason is None


@dataclass(frozen=True)
class Description:
    """What a model consists of.

    Attributes:
        inputs: name and shape of each input; a batch axis has length one.
        outputs: name and shape of each output; None where the shape is not known.
        rows: the nodes, in the order of the file.
        parameters: how many floating-point numbers the model stores.
        neurons: how many entries all activations, maxima and products have together.
    """

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...] | None], ...]
    rows: tuple[Row, ...]
    parameters: int
    neurons: int

    @property
    def refused(self) -> tuple[Row, ...]:
        """The nodes that stagecert cannot handle."""
        return tuple(row for row in self.rows if row.reason is not None)


def supported() -> list[str]:
    """The ONNX operators that `load` knows, in alphabetical order."""
    return sorted([*CONVERTERS, "Constant", "ConstantOfShape", "Range"])


def load(model: Source, *, batched: Batched = None) -> Network:
    """The network of an ONNX model.

    Args:
        model: path of a file (.onnx or .onnx.gz), its contents, or a parsed model.
        batched: whether the first axis of the inputs is a batch axis: one answer for all inputs or
            one for each. By default it is if its length is not fixed, or if it is one and there
            are further axes. Each point of a batch is then an input of its own: the network is
            what the model computes for a batch of one.

    Raises:
        ProblemError: if the model cannot be read, or for all its nodes that are not supported.
    """
    work = _convert(model, batched)
    refused = [row for row in work.rows if row.reason is not None]
    if refused:
        lines = [f"  {row.operator} '{row.name}' {row.reason}" for row in refused]
        nodes = "1 node" if len(refused) == 1 else f"{len(refused)} nodes"
        raise ProblemError(
            f"The ONNX model has {nodes} that stagecert cannot handle:\n"
            + "\n".join(lines)
            + f"\nSupported operators: {', '.join(supported())}."
        )
    return work.network()


def describe(model: Source, *, batched: Batched = None) -> Description:
    """What an ONNX model consists of, node by node, whether it is supported or not.

    Arguments as for `load`.

    Raises:
        ProblemError: if the model cannot be read.
    """
    return _convert(model, batched).description()


def _convert(source: Source, batched: Batched) -> "_Conversion":
    model = _read(source)
    try:
        return _Conversion(model, batched)
    except ProblemError:
        raise
    except Exception as error:  # A damaged file can be wrong in any way: it is never a crash.
        raise ProblemError(f"The ONNX model is damaged: {_text(error)}") from error


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _read(source: Source) -> onnx.ModelProto:
    folder = None
    if isinstance(source, onnx.ModelProto):
        model = source
    else:
        if isinstance(source, bytes):
            name, data = "The data", source
        elif isinstance(source, (str, Path)):
            path = Path(source)
            name, data, folder = f"The file {path}", _contents(path), path.parent
        else:
            raise ProblemError(
                "An ONNX model is given as a path, as bytes or as an onnx.ModelProto, not as "
                f"{type(source).__name__}."
            )
        model = onnx.ModelProto()
        try:
            model.ParseFromString(data)
        except Exception as error:
            raise ProblemError(f"{name} is no ONNX model, or is damaged: {_text(error)}") from error
    if not model.HasField("graph") or not model.graph.output:
        raise ProblemError("There is no graph with outputs in this ONNX model.")
    if not all(isinstance(name, str) for name in _names(model.graph)):
        raise ProblemError("The ONNX model is damaged: it has names that are not text.")
    if folder is not None:
        try:
            onnx.external_data_helper.load_external_data_for_model(model, str(folder))
        except Exception as error:
            raise ProblemError(
                "The ONNX model keeps weights in another file, which cannot be read: "
                f"{_text(error)}"
            ) from error
    return inlined(model) if model.functions else model


def _names(graph: onnx.GraphProto) -> Iterator[Any]:
    """All names in a graph; damaged ones are bytes."""
    for info in (*graph.input, *graph.output, *graph.initializer):
        yield info.name
    for node in graph.node:
        yield from (node.op_type, node.name, node.domain, *node.input, *node.output)
        yield from (item.name for item in node.attribute)


def _contents(path: Path) -> bytes:
    # Protocol buffers end at 2 GiB: whatever is larger is no model.
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # Piece by piece: to read up to a limit at once takes the memory of the limit.
            parts, size = [], 0
            while size <= LARGEST and (part := file.read(2**20)):
                parts.append(part)
                size += len(part)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"The file {path} cannot be read: {_text(error)}") from error
    if size > LARGEST:
        raise ProblemError(f"The file {path} is larger than 2 GiB, which no ONNX model is.")
    return b"".join(parts)


class _Unknown:
    """A value whose shape is not known, because an unsupported node made it."""


class _Conversion:
    """One pass over a model: every node becomes operations, or a reason why it cannot."""

    def __init__(self, model: onnx.ModelProto, batched: Batched):
        self.graph = model.graph
        self.opset = _opset(model)
        self.draft = Draft()
        self.values: dict[str, Item | _Unknown] = {}
        self.rows: list[Row] = []
        self._roots: list[Value] = []
        self._added: list[list[Value]] = []
        self._stored: dict[str, int] = {}
        self._types: dict[str, int] = {}  # what numbers of a value are stored as
        self._left = LARGEST_COMPUTED  # entries of constants, all nodes together
        self._initializers()
        self._inputs(batched)
        needed = self._needed()
        for number, node in enumerate(self.graph.node, 1):
            self._row(number, node, number in needed)
        self.outputs = self._outputs()
        self._finish()

    def network(self) -> Network:
        return self.draft.builder.network(
            [x for _, x in self.outputs if isinstance(x, Value)], [name for name, _ in self.outputs]
        )

    def description(self) -> Description:
        neurons = 0
        live = self.draft.live(self._roots)
        for value in (value for added in self._added for value in added):
            made = self.draft.made(value)
            if (value.is_input, value.index) in live and made:
                active = isinstance(made.operation, (op.Activation, op.Joint))
                neurons += math.prod(value.shape) if active else 0
        return Description(
            tuple((name, x.shape) for name, x in self.inputs),
            tuple((name, _shape(x)) for name, x in self.outputs),
            tuple(self.rows),
            sum(self._stored.values()),
            neurons,
        )

    def _initializers(self) -> None:
        if self.graph.sparse_initializer:
            raise ProblemError("The ONNX model has sparse initialisers; store them densely.")
        for tensor in self.graph.initializer:
            try:
                self._types[tensor.name] = tensor.data_type
                self._keep(tensor.name, stored(tensor))
            except Refused as error:
                raise ProblemError(f"The initialiser '{tensor.name}' {error}.") from error

    def _keep(self, name: str, array: np.ndarray) -> None:
        self.values[name] = array
        self._stored[name] = array.size if np.issubdtype(array.dtype, np.floating) else 0

    def _inputs(self, batched: Batched) -> None:
        inputs = [info for info in self.graph.input if info.name not in self.values]
        if not inputs:
            raise ProblemError("The ONNX model has no inputs.")
        answers: Sequence[bool | None]
        if batched is None or isinstance(batched, bool):
            answers = [batched] * len(inputs)
        else:
            answers = list(batched)
        if len(answers) != len(inputs):
            raise ProblemError(f"batched has {len(answers)} entries for {len(inputs)} inputs.")
        self.inputs: list[tuple[str, Value]] = []
        for info, hidden in zip(inputs, answers, strict=True):
            shape, hidden = _input_shape(info, hidden)
            if info.name in self.values:
                raise ProblemError(f"The input '{info.name}' is declared twice.")
            value = self.draft.builder.input(info.name, shape, hidden)
            self._types[info.name] = info.type.tensor_type.elem_type
            self.values[info.name] = value
            self.inputs.append((info.name, value))

    def _needed(self) -> set[int]:
        """The numbers of the nodes that some output depends on."""
        names = {info.name for info in self.graph.output}
        needed: set[int] = set()
        for number in range(len(self.graph.node), 0, -1):
            node = self.graph.node[number - 1]
            if names.intersection(name for name in node.output if name):
                needed.add(number)
                names.update(node.input)
        self._read = names
        return needed

    def _row(self, number: int, node: onnx.NodeProto, needed: bool) -> None:
        if not needed:
            shapes = (None,) * len(node.output)
            self.rows.append(Row(number, node.op_type, node.name, shapes, 0, "unused"))
            self._added.append([])
            return
        inputs, outputs, added, reason = [], [], [], None
        try:
            inputs = self._items(node)
            outputs, added = self._outputs_of(node, inputs)
        except Refused as error:
            reason = str(error)
        except ProblemError as error:
            reason = f"is not supported: {_text(error)}"
        except Exception as error:  # As in _convert: a reason, not a crash.
            reason = f"is malformed: {_text(error)}"
        if reason is not None:
            outputs, added = self._substitute(node, inputs), []
        kind = self._type(node)
        for name, item in zip(node.output, outputs, strict=False):
            if name:
                self.values[name] = item
                self._types[name] = kind
        floats = (x for x in inputs if isinstance(x, np.ndarray))
        parameters = sum(x.size for x in floats if np.issubdtype(x.dtype, np.floating))
        role = _role(outputs) if reason is None else "refused"
        shapes = tuple(_shape(item) for item in outputs)
        self.rows.append(Row(number, node.op_type, node.name, shapes, parameters, role, reason))
        self._added.append(added)

    def _type(self, node: onnx.NodeProto) -> int:
        """What the outputs of a node are stored as, if they are floating-point numbers."""
        given = {item.name: item for item in node.attribute}
        if node.op_type == "Cast" and "to" in given:
            return given["to"].i
        if node.op_type in ("Constant", "ConstantOfShape"):
            return given["value"].t.data_type if "value" in given else onnx.TensorProto.FLOAT
        known = [self._types.get(name, 0) for name in node.input]
        if node.op_type == "CastLike":
            return known[-1]
        return next((kind for kind in known if kind in shapes.FLOATS), 0)

    def _items(self, node: onnx.NodeProto) -> list[Any]:
        items: list[Any] = []
        for name in node.input:
            if name and name not in self.values:
                raise Refused(f"reads '{name}', which no earlier node makes")
            items.append(self.values[name] if name else None)
        return items

    def _outputs_of(self, node: onnx.NodeProto, inputs: list[Any]):
        for name in node.output:
            if name and name in self.values:
                raise Refused(f"makes '{name}', which was there already")
        attributes = _attributes(node, self.opset)
        constants = all(x is None or isinstance(x, CONSTANT) for x in inputs)
        if not constants and node.op_type not in CONVERTERS:
            raise Refused(_unsupported(node.op_type))
        if any(isinstance(x, _Unknown) for x in inputs):
            return [_Unknown()] * len(node.output), []
        if constants and node.op_type == "Constant":
            array = constant(attributes)
            self._keep(node.output[0], array)
            return [array], []
        # An output that nothing reads is as good as left out.
        outputs = [name if name in self._read else "" for name in node.output]
        call = Call(self.draft, node.op_type, node.name, inputs, attributes, self.opset, outputs)
        if constants:
            own = self._types.get(node.input[0]) if node.input else None
            made = fold(call, node, self._type(node), self._left, own)
            assert all(isinstance(x, CONSTANT) for x in made), node.op_type
            self._left -= sum(array.size for array in made)
            return made, []
        found = list(CONVERTERS[node.op_type](call))
        assert all(isinstance(x, (Value, *CONSTANT)) for x in found), node.op_type
        return found, call.added

    def _substitute(self, node: onnx.NodeProto, inputs: list[Any]) -> list[Any]:
        """What stands for the outputs of a refused node, so that the others are checked too."""
        variables = [x for x in inputs if isinstance(x, Value)]
        self._roots.extend(variables)
        if node.op_type in _ENTRYWISE and len(node.output) == 1 and variables:
            known = [x for x in inputs if isinstance(x, (Value, *CONSTANT))]
            try:
                shape = np.broadcast_shapes(*(x.shape for x in known))
                return [self.draft.add(Placeholder("refused", shape), *variables)]
            except (ValueError, Refused):
                pass
        return [_Unknown()] * len(node.output)

    def _outputs(self) -> list[tuple[str, Any]]:
        outputs: list[tuple[str, Any]] = []
        for info in self.graph.output:
            if info.name not in self.values:
                raise ProblemError(f"No node makes the output '{info.name}' of the ONNX model.")
            item = self.values[info.name]
            if isinstance(item, CONSTANT):
                item = self._constant_output(info.name, item)
            outputs.append((info.name, item))
        self._roots.extend(item for _, item in outputs if isinstance(item, Value))
        return outputs

    def _constant_output(self, name: str, array: Constant) -> Value:
        if not array.size or (isinstance(array, np.ndarray) and array.dtype.kind != "f"):
            raise ProblemError(
                f"The output '{name}' of the ONNX model is constant, and not made of floating-point"
                " numbers."
            )
        # A network has no constants of its own: this is zero times an input, shifted.
        _, x = self.inputs[0]
        add = self.draft.add
        x = add(op.Reshape((-1,)), x, name=name)
        x = add(op.Slice((0,), (1,), (1,)), x, name=name)
        x = add(op.Scale(), x, weights=np.zeros((), np.float32), name=name)
        x = add(op.Broadcast(array.shape), add(op.Reshape(()), x, name=name), name=name)
        try:
            return self.draft.apply(op.Shift, x, array, name=name)
        except Refused as error:
            raise ProblemError(f"The output '{name}' of the ONNX model {error}.") from error

    def _finish(self) -> None:
        """Roles, now that it is known what the outputs depend on."""
        live = self.draft.live(self._roots)
        for place, (row, added) in enumerate(zip(self.rows, self._added, strict=True)):
            kept = [x for x in added if (x.is_input, x.index) in live]
            made = [m.operation for m in map(self.draft.made, kept) if m]
            role = "merged" if added and not kept else row.role
            kinds = [_kind(x) for x in made if isinstance(x, (op.Activation, op.Joint))]
            role = ", ".join(dict.fromkeys(kinds)) or role
            relaxation = "exact" if role in ("affine", "constant") else None
            if kinds:
                # Sums of relaxed values are not relaxed together.
                last = max(
                    k for k, x in enumerate(made) if isinstance(x, (op.Activation, op.Joint))
                )
                mixed = any(isinstance(x, (op.Reduce, op.Sum)) for x in made[last:])
                relaxation = "hulls" if len(kinds) > 1 or mixed else "hull"
            reason = row.reason
            if any(isinstance(x, Placeholder) and x.kind == "condition" for x in made):
                role, relaxation = "refused", None
                reason = "is only supported as the condition of a Where, or cast to a number"
            self.rows[place] = replace(
                row, role=role, reason=reason, relaxation=relaxation, steps=len(kinds)
            )


def _kind(operation: op.Activation | op.Joint) -> str:
    return operation.kind if isinstance(operation, op.Activation) else operation.label


def _role(outputs: Sequence[Any]) -> str:
    if all(isinstance(x, CONSTANT) for x in outputs):
        return "constant"
    return "unknown" if any(isinstance(x, _Unknown) for x in outputs) else "affine"


def _shape(item: Any) -> tuple[int, ...] | None:
    return None if isinstance(item, _Unknown) else tuple(item.shape)


def _unsupported(operator: str) -> str:
    if operator in _JOINT:
        return "is nonlinear in several variables at once"
    if operator in _STEPS:
        return "is not continuous"
    return "is not supported"


def _opset(model: onnx.ModelProto) -> int:
    versions = {item.version for item in model.opset_import if item.domain in ("", "ai.onnx")}
    newest = onnx.defs.onnx_opset_version()
    if len(versions) != 1:
        raise ProblemError(f"The ONNX model names {len(versions)} opsets instead of one.")
    (version,) = versions
    if not OLDEST_OPSET <= version <= newest:
        raise ProblemError(
            f"The ONNX model uses opset {version}; supported are {OLDEST_OPSET} to {newest}. "
            "Convert it with onnx.version_converter, or export it again."
        )
    return version


def _attributes(node: onnx.NodeProto, opset: int) -> dict[str, Any]:
    """The attributes of a node, checked against its operator's schema."""
    if node.domain not in ("", "ai.onnx"):
        raise Refused(f"is from the domain '{node.domain}', which is not supported")
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        raise Refused(f"does not exist in opset {opset}") from None
    if not schema.min_input <= len(node.input) <= schema.max_input:
        raise Refused(f"has {len(node.input)} inputs, which opset {opset} does not allow")
    if not schema.min_output <= len(node.output) <= schema.max_output:
        raise Refused(f"has {len(node.output)} outputs, which opset {opset} does not allow")
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for k, name in enumerate(node.input):
        # The last one may stand for many (Sum).
        if not name and schema.inputs[min(k, len(schema.inputs) - 1)].option != optional:
            raise Refused("lacks an input")
    known: dict[str, Any] = dict(schema.attributes)
    attributes = {}
    for item in node.attribute:
        if item.name not in known:
            raise Refused(f"has an attribute '{item.name}', which opset {opset} does not know")
        if known[item.name].type.value != item.type or item.ref_attr_name:
            raise Refused(f"has an attribute '{item.name}' of the wrong type")
        attributes[item.name] = onnx.helper.get_attribute_value(item)
    for name, declared in known.items():
        if declared.required and name not in attributes:
            raise Refused(f"lacks the attribute '{name}'")
    return attributes


def _input_shape(info: onnx.ValueInfoProto, batched: bool | None) -> tuple[tuple[int, ...], bool]:
    """The shape of an input, and whether its first axis is the batch."""
    name = f"The input '{info.name}' of the ONNX model"
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or tensor.elem_type not in shapes.FLOATS:
        raise ProblemError(
            f"{name} is not made of floating-point numbers; stagecert needs inputs that vary "
            "continuously."
        )
    if not tensor.HasField("shape"):
        raise ProblemError(f"{name} has no shape; export the model with fixed shapes.")
    # Lengths that are not fixed count as zero.
    lengths = [d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
    text = " x ".join(
        str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?"
        for d in tensor.shape.dim
    )
    if batched is None:
        # A fixed length above one is part of the input, as runtimes read it.
        batched = bool(lengths) and (lengths[0] <= 0 or (lengths[0] == 1 and len(lengths) > 1))
    if batched:
        if not lengths:
            raise ProblemError(f"{name} has no axes, so there is no batch axis.")
        if lengths[0] > 1:
            raise ProblemError(
                f"{name} is {text}, a fixed batch of {lengths[0]}; export the model for a batch of "
                "one or of any size."
            )
        lengths[0] = 1
    if any(n <= 0 for n in lengths):
        raise ProblemError(
            f"{name} is {text}; only a batch axis may be of unknown length. Fix the others, for "
            "example with onnx.tools.update_model_dims, or export the model with fixed shapes."
        )
    if math.prod(lengths) > LARGEST_COMPUTED:
        raise ProblemError(f"{name} is {text}: more than {LARGEST_COMPUTED} numbers.")
    return tuple(lengths), batched
