"""Static shapes: binding the inputs' dynamic extents, and knowing every value's shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper, shape_inference

from edgetrain.compiler import limits, reference
from edgetrain.compiler.values import tensor_spec, value_info
from edgetrain.errors import EngineError, GraphError
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]

_DATA_SHAPED: Final = frozenset({"NonMaxSuppression", "NonZero", "Unique"})
# Inputs whose value decides the output's shape.
_SHAPE_INPUTS: Final[Mapping[str, tuple[int, ...]]] = {
    "Compress": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}


def bind(
    graph: onnx.GraphProto, batch: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Give every data input a static shape, in place.

    Args:
        graph: its inputs are the data inputs only.
        batch: leading extent of each data input.
        shapes: shape of an input without its batch, where the file leaves it open.

    Returns:
        The rows that the file's own graph takes of each input: `batch` if it is open.

    Raises:
        GraphError: an extent is neither in the file nor in `shapes`, or they disagree.
    """
    names = {info.name for info in graph.input}
    for name in shapes:
        if name not in names:
            raise GraphError(
                f"a shape is given for {name!r}, which is not an input of the model;"
                f" its inputs are {sorted(names)}"
            )
    rows = {}
    for info in graph.input:
        if not info.type.tensor_type.HasField("shape"):
            raise GraphError(
                f"input {info.name!r} has no shape in the file, not even a rank;"
                " export the model with typed inputs"
            )
        dims = list(info.type.tensor_type.shape.dim)
        rows[info.name] = (_extent(dims[0]) if dims else 0) or batch
        _bind_rest(info.name, dims[1:], shapes.get(info.name))
        if dims:
            _set(dims[0], batch)
        _check_size(info, max(batch, rows[info.name]))
    for out in graph.output:
        out.type.tensor_type.ClearField("shape")
    return rows


def _bind_rest(
    name: str,
    dims: list[onnx.TensorShapeProto.Dimension],
    given: tuple[int, ...] | None,
) -> None:
    if given is not None and len(given) != len(dims):
        raise GraphError(
            f"input {name!r} has {len(dims)} dimensions behind the batch, the shape given"
            f" for it, {list(given)}, has {len(given)}"
        )
    for index, dim in enumerate(dims):
        extent = _extent(dim)
        wanted = given[index] if given is not None else extent
        if not wanted:
            label = f" ({dim.dim_param!r})" if dim.dim_param else ""
            raise GraphError(
                f"input {name!r}: dimension {index + 1}{label} is dynamic; give the input's"
                " shape without the batch, as the training data has it, or, if it is no"
                " data, its value in [model] fixed"
            )
        if extent and wanted != extent:
            raise GraphError(
                f"input {name!r}: dimension {index + 1} is {extent} in the model, the shape"
                f" given for it says {wanted}"
            )
        _set(dim, wanted)


def _check_size(info: onnx.ValueInfoProto, rows: int) -> None:
    spec = tensor_spec(info)
    itemsize = np.dtype(spec.dtype).itemsize
    limits.check_extents(spec.name, (rows, *spec.shape[1:]), itemsize)


def _extent(dim: onnx.TensorShapeProto.Dimension) -> int:
    """The extent in the file; 0 when it is dynamic (some exporters write -1)."""
    return max(0, dim.dim_value) if dim.HasField("dim_value") else 0


def _set(dim: onnx.TensorShapeProto.Dimension, extent: int) -> None:
    dim.dim_value = extent  # clears dim_param, its alternative


def rebatch(graph: onnx.GraphProto, data: Collection[str], old: int, new: int) -> int:
    """Let Reshape nodes that write the batch size into their data's shape write another.

    Whether the leading extent that is replaced was the batch is for the caller to check,
    by running the graph.

    Args:
        graph: with the shapes that Reshape nodes read as initializers.
        data: the data inputs.
        old: the batch size that the file fixes.
        new: the batch size wanted.

    Returns:
        How many nodes were changed.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    from_data = set(data)
    changed = 0
    for node in graph.node:
        if from_data.isdisjoint(node.input):
            continue
        from_data.update(node.output)
        if node.op_type != "Reshape" or node.input[1] not in tensors:
            continue
        target = numpy_helper.to_array(tensors[node.input[1]]).copy()
        if not target.size or target[0] != old:
            continue
        target[0] = new
        name = f"{node.output[0]}/batch_{new}"
        graph.initializer.append(numpy_helper.from_array(target, name))
        node.input[1] = name
        changed += 1
    return changed


def _refuse_data_dependent(graph: onnx.GraphProto) -> None:
    """Raises GraphError for the first node whose output's shape hangs on values of data.

    The result of a Shape or Size node is no such value.
    """
    from_data = {info.name for info in graph.input}
    for node in graph.node:
        places = _SHAPE_INPUTS.get(node.op_type, ())
        reads = [name for i, name in enumerate(node.input) if i in places]
        depends = not from_data.isdisjoint(node.input)
        if not from_data.isdisjoint(reads) or (depends and node.op_type in _DATA_SHAPED):
            raise GraphError(
                f"the shape that {node.op_type} node {node.name or node.output[0]!r} gives"
                " depends on the data; training needs static shapes: export the model"
                " without this step, such as the post-processing of a detector"
            )
        if depends and node.op_type not in ("Shape", "Size"):
            from_data.update(node.output)


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the types and shapes that ONNX's own inference derives.

    Raises:
        GraphError: it finds a contradiction, or a value is absurdly large.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    # With data propagation, inference lists the elements of what may be a shape: by then
    # it must be known that they are not billions.
    known(_inferred(bare, propagate=False))
    return _inferred(bare, propagate=True)


def _inferred(model: onnx.ModelProto, *, propagate: bool) -> onnx.ModelProto:
    try:
        return shape_inference.infer_shapes(model, data_prop=propagate)
    except (shape_inference.InferenceError, RuntimeError) as error:
        raise GraphError(
            f"the model's shapes contradict each other: {error}; export the model again, or"
            " check the shapes that are given for its inputs"
        ) from error


def known(model: onnx.ModelProto) -> dict[str, TensorSpec]:
    """The values of an inferred model whose type and shape are static.

    Raises:
        GraphError: a value is absurdly large.
    """
    graph = model.graph
    given = {info.name: tensor_spec(info) for info in filter(is_static, graph.input)}
    for constant in graph.initializer:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(constant.data_type)).name
        given[constant.name] = TensorSpec(constant.name, dtype, tuple(constant.dims))
    most = limits.most_bytes([spec.nbytes for spec in given.values()])
    infos = filter(is_static, (*graph.value_info, *graph.output))
    made = {info.name: tensor_spec(info) for info in infos}
    for spec in made.values():
        limits.check_extents(spec.name, spec.shape, np.dtype(spec.dtype).itemsize, most)
    return given | made


def is_static(info: onnx.ValueInfoProto) -> bool:
    """Whether a value is a tensor whose type and every extent are known."""
    tensor = info.type.tensor_type
    return bool(
        tensor.elem_type
        and tensor.HasField("shape")
        and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    )


def complete(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """A copy that records the static type and shape of every value.

    What inference leaves open is measured: the model runs once on `feeds` with every
    value as an output.

    Raises:
        GraphError: a shape depends on the data's values, or is still open as the model
            does not run on `feeds`.
    """
    inferred = infer(model)
    specs = known(inferred)
    names = [name for node in model.graph.node for name in node.output if name]
    missing = [name for name in names if name not in specs]
    if missing:
        _refuse_data_dependent(model.graph)
        specs.update(_measure(model, feeds, missing))
    outputs = [out.name for out in model.graph.output]
    done = {*outputs, *(info.name for info in model.graph.input)}
    del inferred.graph.value_info[:]
    inferred.graph.value_info.extend(value_info(specs[n]) for n in names if n not in done)
    del inferred.graph.output[:]
    inferred.graph.output.extend(value_info(specs[name]) for name in outputs)
    return inferred


def _measure(
    model: onnx.ModelProto, feeds: Mapping[str, Array], names: list[str]
) -> dict[str, TensorSpec]:
    try:
        values = reference.run(model, feeds, names)
    except EngineError as error:
        raise GraphError(
            f"the shape of {names[0]!r} is not known and the model does not run at this"
            f" batch size and input shape: {error}"
        ) from error
    absent = [name for name in names if name not in values]
    if absent:
        raise GraphError(
            f"value {absent[0]!r} is not a tensor (a sequence or an optional value);"
            " export the model without such values"
        )
    return {name: TensorSpec(name, v.dtype.name, v.shape) for name, v in values.items()}
