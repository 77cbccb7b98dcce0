"""Differentiating an ONNX file into another one that any ONNX runtime can run.

For each input IN, output OUT and selected weight WEIGHT of floating point the result has

    vjp         in: cotangent/OUT                  out: gradient/WEIGHT, cotangent/IN
    vjp, loss   in: labels                         out: loss, losses, gradient/WEIGHT
    jvp         in: tangent/IN, tangent/WEIGHT     out: tangent/OUT
    jvp, loss   in: these and labels               out: these, loss, losses, tangent/loss

beside the model's own. `losses` are those of the samples, [N]; `loss` is their mean, [].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import onnx
from onnx import helper

from edgetrain.bundle import sha256
from edgetrain.compiler.derivative import Derivative
from edgetrain.compiler.load import load, model_sha256
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.trainable import select_trainable
from edgetrain.errors import GraphError
from edgetrain.losses import PLAIN, LossOptions, check_loss
from edgetrain.settings import choose

MODES: Final = ("vjp", "jvp")
MAX_FILE_BYTES: Final = (1 << 31) - 1  # of one protobuf message
_INNER: Final = "et/"  # begins the names of the values that the compiler adds

Model = str | Path | onnx.ModelProto


def grad(  # noqa: PLR0913  the keywords of the public face
    model: Model,
    *,
    mode: str = "vjp",
    loss: str | None = None,
    loss_options: LossOptions = PLAIN,
    output: str = "",
    wrt: str | Sequence[str] = "all",
    batch: int = 1,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> onnx.ModelProto:
    """A model and its derivative, self-contained, in standard operators.

    The weights that `wrt` selects are inputs of their own name, and their default is the
    file's value; all others are constants. Inputs and outputs have static shapes; the
    module's table names them. Whatever does not depend on what it is differentiated by has
    derivative zero. The model is taken in inference form: no Dropout, BatchNormalization
    with the file's statistics. Half and double precision become float32. The result may be
    differentiated again: a jvp of a vjp gives products with the Hessian.

    Args:
        model: an ONNX file, or a model with all its tensors; it is not altered.
        mode: reverse ("vjp") or forward ("jvp").
        loss: one of `edgetrain.losses.LOSSES`; a final Softmax or Sigmoid that it already
            contains is left out of its derivative.
        loss_options: what the loss is told, such as label smoothing.
        output: the output the loss applies to, where the model has several.
        wrt: weights: ``"all"``, ``"last:N"`` (from the N-th last linear operator on), or
            regular expressions of whole names; an empty sequence for none.
        batch: samples: the leading extent of every input.
        shapes: shape without the batch of an input that the file leaves open.

    Returns:
        The model; `metadata_props` hold edgetrain's version and the source's SHA-256.

    Raises:
        ConfigError: an unknown mode, loss or option, or `wrt` selects no weight.
        GraphError: the model cannot be read or normalised, or the loss does not fit it.
        UnsupportedOpError: an operator on the way has no rule.

    Cost: the arithmetic of about three forwards for a vjp, of two for a jvp.
    """
    choose("mode", mode, MODES)
    if loss is not None:
        check_loss("loss", loss, loss_options)
    source, digest = _read(model)
    program = normalise(_apart(source), batch=batch, shapes=shapes)
    derivative = Derivative(program, _selected(program, wrt))
    if loss is not None:
        derivative.add_loss(loss, loss_options, output)
    if mode == "vjp":
        derivative.add_vjp()
    else:
        derivative.add_jvp()
    result = derivative.model(f"{source.graph.name}/{mode}")
    _check_size(result)
    return _signed(result, mode=mode, loss=loss or "", source_sha256=digest)


def _signed(model: onnx.ModelProto, **facts: str) -> onnx.ModelProto:
    """The model, with what made it, and of what, in its metadata."""
    facts["version"] = model.producer_version = metadata.version("edgetrain")
    helper.set_model_props(model, {f"edgetrain.{k}": v for k, v in facts.items()})
    return model


def _read(model: Model) -> tuple[onnx.ModelProto, str]:
    """The model, and the hash of its file, or of its bytes where there is no file."""
    if isinstance(model, onnx.ModelProto):
        _check_size(model)
        return model, sha256(model.SerializeToString(deterministic=True))
    return load(Path(model)), model_sha256(Path(model))


def _selected(program: Program, wrt: str | Sequence[str]) -> frozenset[str]:
    if not wrt or (wrt == "all" and program.weights.keys() <= program.states):
        return frozenset()  # the inputs may still be differentiated by
    return select_trainable(program, wrt, place="wrt")


def _apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with the names of values that an earlier `grad` added made different."""
    names = (name for node in model.graph.node for name in (*node.input, *node.output))
    if not any(name.startswith(_INNER) for name in names):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for item in (*copy.graph.node, *copy.graph.initializer):
        item.name = _moved(item.name)
    for node in copy.graph.node:
        for values in (node.input, node.output):
            values[:] = map(_moved, values)
    del copy.graph.value_info[:]
    return copy


def _moved(name: str) -> str:
    return _INNER + name if name.startswith(_INNER) else name


def _check_size(model: onnx.ModelProto) -> None:
    size_bytes = model.ByteSize()
    if size_bytes > MAX_FILE_BYTES:
        raise GraphError(
            f"the model and its weights take {size_bytes / 1e9:.1f} GB, and one ONNX"
            f" message holds {MAX_FILE_BYTES / 1e9:.1f} GB at most: differentiate a part of"
            " it (onnx.utils.extract_model), or train it with `edgetrain train`"
        )
