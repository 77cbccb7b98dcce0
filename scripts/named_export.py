"""Export a PyTorch module so that chosen values of the ONNX file have chosen names."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn

TOLERANCE = 1e-4


def export(module: nn.Module, x: Tensor, named: Sequence[str], *, dynamo: bool) -> bytes:
    """The file, its input being ``x`` and its output ``logits``, with the batch open.

    Initializers are named as in the module.

    Args:
        module: in evaluation form.
        x: a batch to trace and to check with.
        named: submodules; the value that each returns gets its name.
        dynamo: whether by the exporter of torch.export, which folds BatchNormalization into
            convolutions; the legacy one is kept from it.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _bare(_by_dynamo(module, x) if dynamo else _by_tracing(module, x))
    _rename(
        model, _transposed(model, module) | _equal(model, x, _returned(module, x, named))
    )
    onnx.checker.check_model(model, full_check=True)
    (logits,) = _run(model, x, ["logits"])
    np.testing.assert_allclose(logits, module(x).detach().numpy(), atol=TOLERANCE)
    return model.SerializeToString()


def _by_dynamo(module: nn.Module, x: Tensor) -> onnx.ModelProto:
    program = torch.onnx.export(
        module,
        (x,),
        dynamo=True,
        verbose=False,
        input_names=["x"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("N")},),
    )
    return program.model_proto


def _by_tracing(module: nn.Module, x: Tensor) -> onnx.ModelProto:
    file = io.BytesIO()
    torch.onnx.export(
        module,
        (x,),
        file,
        dynamo=False,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "N"}, "logits": {0: "N"}},
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
    )
    return onnx.load_from_string(file.getvalue())


def _transposed(model: onnx.ModelProto, module: nn.Module) -> dict[str, str]:
    """The initializers that are a parameter's transpose, and the parameter's name."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        other: name
        for name, parameter in module.named_parameters()
        for other, value in values.items()
        if parameter.ndim == 2
        and name not in values
        and np.array_equal(value, parameter.detach().numpy().T)
    }


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without the exporter's notes, which take more bytes than small weights do."""
    del model.metadata_props[:]
    for item in (model.graph, *model.graph.node, *model.graph.value_info):
        del item.metadata_props[:]
        item.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    del model.graph.value_info[:]
    return model


def _returned(module: nn.Module, x: Tensor, named: Sequence[str]) -> dict[str, Tensor]:
    """What submodules return."""
    values: dict[str, Tensor] = {}

    def keep(name: str) -> object:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            values[name] = output.detach()

        return hook

    handles = [
        module.get_submodule(name).register_forward_hook(keep(name)) for name in named
    ]
    with torch.no_grad():
        module(x)
    for handle in handles:
        handle.remove()
    return values


def _equal(
    model: onnx.ModelProto, x: Tensor, wanted: Mapping[str, Tensor]
) -> dict[str, str]:
    """The last value of the graph that equals each wanted one."""
    made = [name for node in model.graph.node for name in node.output]
    widened = onnx.ModelProto()
    widened.CopyFrom(model)
    del widened.graph.output[:]
    widened.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    values = dict(zip(made, _run(widened, x, made), strict=True))
    renamed = {}
    for name, target in wanted.items():
        matches = [
            other
            for other, value in values.items()
            if value.shape == tuple(target.shape)
            and np.allclose(value, target.numpy(), rtol=1e-3, atol=TOLERANCE)
        ]
        if not matches:
            raise SystemExit(f"no value of the ONNX file is what {name} returns")
        renamed[matches[-1]] = name
    return renamed


def _rename(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _run(model: onnx.ModelProto, x: Tensor, names: list[str]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(names, {"x": x.numpy()})
