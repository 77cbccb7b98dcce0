"""Which rule each ONNX operator has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.rules import (
    activation,
    convolution,
    elementwise,
    indexing,
    layout,
    linear,
    normalization,
    pooling,
    reduction,
    resize,
)
from edgetrain.compiler.rules.base import (
    MultiRule,
    OpRule,
    Saves,
    linear_rule,
    symmetric_rule,
)
from edgetrain.errors import UnsupportedOpError

_NOTHING, _FIRST, _REST = Saves.NOTHING, Saves.FIRST, Saves.REST
_INPUTS, _OUTPUT, _EXTRA = Saves.INPUTS, Saves.OUTPUT, Saves.EXTRA

_reshape: Final = OpRule(layout.reshape_vjp, layout.reshape_jvp, _NOTHING)
_add: Final = OpRule(elementwise.add_vjp, elementwise.add_jvp, _NOTHING, broadcasts=True)
_extremum: Final = OpRule(
    elementwise.extremum_vjp, elementwise.extremum_jvp, _INPUTS | _OUTPUT, broadcasts=True
)
_reduce_extremum: Final = OpRule(
    reduction.extremum_vjp, reduction.extremum_jvp, _FIRST | _OUTPUT
)

RULES: Final[Mapping[str, OpRule]] = {
    # Arithmetic
    "Add": _add,
    "Sum": _add,
    "Sub": OpRule(elementwise.sub_vjp, elementwise.sub_jvp, _NOTHING, broadcasts=True),
    "Mul": OpRule(elementwise.mul_vjp, elementwise.mul_jvp, _INPUTS, broadcasts=True),
    "Div": OpRule(
        elementwise.div_vjp, elementwise.div_jvp, _REST | _OUTPUT, broadcasts=True
    ),
    "Pow": OpRule(
        elementwise.pow_vjp, elementwise.pow_jvp, _INPUTS | _OUTPUT, broadcasts=True
    ),
    "Mean": OpRule(elementwise.mean_vjp, elementwise.mean_jvp, _NOTHING, broadcasts=True),
    "Max": _extremum,
    "Min": _extremum,
    "Where": OpRule(elementwise.where_vjp, elementwise.where_jvp, _FIRST, broadcasts=True),
    "Neg": symmetric_rule(elementwise.neg),
    "Abs": symmetric_rule(elementwise.absolute, _FIRST),
    "Sqrt": symmetric_rule(elementwise.sqrt, _OUTPUT),
    "Reciprocal": symmetric_rule(elementwise.reciprocal, _OUTPUT),
    "Exp": symmetric_rule(elementwise.exp, _OUTPUT),
    "Log": symmetric_rule(elementwise.log, _FIRST),
    "Erf": symmetric_rule(elementwise.erf, _FIRST),
    "Sin": symmetric_rule(elementwise.sin, _FIRST),
    "Cos": symmetric_rule(elementwise.cos, _FIRST),
    "Identity": symmetric_rule(elementwise.identity),
    "Cast": linear_rule(elementwise.cast_vjp),
    # Activations
    "Relu": symmetric_rule(activation.relu, _OUTPUT),
    "LeakyRelu": symmetric_rule(activation.leaky_relu, _OUTPUT),
    "PRelu": OpRule(activation.prelu_vjp, activation.prelu_jvp, _INPUTS, broadcasts=True),
    "Elu": symmetric_rule(activation.elu, _OUTPUT),
    "Clip": OpRule(
        activation.clip_vjp, activation.clip_jvp, _REST | _OUTPUT, broadcasts=True
    ),
    "Tanh": symmetric_rule(activation.tanh, _OUTPUT),
    "Sigmoid": symmetric_rule(activation.sigmoid, _OUTPUT),
    "HardSigmoid": symmetric_rule(activation.hard_sigmoid, _OUTPUT),
    "HardSwish": symmetric_rule(activation.hard_swish, _FIRST),
    "Softplus": symmetric_rule(activation.softplus, _FIRST),
    "Gelu": symmetric_rule(activation.gelu, _FIRST),
    "Softmax": symmetric_rule(activation.softmax, _OUTPUT),
    "LogSoftmax": OpRule(activation.log_softmax_vjp, activation.log_softmax_jvp, _OUTPUT),
    # Products
    "MatMul": OpRule(linear.matmul_vjp, linear.matmul_jvp, _INPUTS),
    "Gemm": OpRule(linear.gemm_vjp, linear.gemm_jvp, _INPUTS),
    "Einsum": OpRule(linear.einsum_vjp, linear.einsum_jvp, _INPUTS),
    "Conv": OpRule(convolution.conv_vjp, convolution.conv_jvp, _INPUTS),
    "ConvTranspose": OpRule(convolution.conv_transpose_vjp, convolution.conv_jvp, _INPUTS),
    # Pooling
    "MaxPool": OpRule(pooling.max_pool_vjp, pooling.max_pool_jvp, _FIRST | _OUTPUT),
    "GlobalMaxPool": OpRule(
        pooling.global_max_pool_vjp, pooling.global_max_pool_jvp, _FIRST
    ),
    "AveragePool": linear_rule(pooling.average_pool_vjp),
    "GlobalAveragePool": linear_rule(pooling.global_average_pool_vjp),
    # Normalisation
    "BatchNormalization": OpRule(
        normalization.batch_norm_vjp, normalization.batch_norm_jvp, _INPUTS | _EXTRA
    ),
    "LayerNormalization": OpRule(
        normalization.layer_norm_vjp, normalization.layer_norm_jvp, _INPUTS | _EXTRA
    ),
    "InstanceNormalization": OpRule(
        normalization.instance_norm_vjp, normalization.instance_norm_jvp, _INPUTS
    ),
    # Reductions
    "ReduceSum": linear_rule(reduction.sum_vjp),
    "ReduceMean": linear_rule(reduction.mean_vjp),
    "ReduceMax": _reduce_extremum,
    "ReduceMin": _reduce_extremum,
    "ReduceL1": OpRule(reduction.slope_vjp, reduction.slope_jvp, _FIRST),
    "ReduceL2": OpRule(reduction.slope_vjp, reduction.slope_jvp, _FIRST | _OUTPUT),
    "ReduceSumSquare": OpRule(reduction.slope_vjp, reduction.slope_jvp, _FIRST),
    "ReduceLogSumExp": OpRule(reduction.slope_vjp, reduction.slope_jvp, _FIRST | _OUTPUT),
    # Layout and selection
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Transpose": linear_rule(layout.transpose_vjp),
    "Concat": OpRule(layout.concat_vjp, layout.concat_jvp, _NOTHING),
    "Expand": OpRule(layout.expand_vjp, layout.expand_jvp, _NOTHING),
    "Tile": linear_rule(layout.tile_vjp),
    "Pad": OpRule(layout.pad_vjp, layout.pad_jvp, _NOTHING),
    "DepthToSpace": linear_rule(layout.depth_to_space_vjp),
    "SpaceToDepth": linear_rule(layout.space_to_depth_vjp),
    "Slice": linear_rule(indexing.slice_vjp),
    "Gather": linear_rule(indexing.gather_vjp, _REST),
    "Resize": linear_rule(resize.resize_vjp),
}

MULTI_RULES: Final[Mapping[str, MultiRule]] = {
    "Split": MultiRule(layout.split_vjp, layout.split_jvp, _NOTHING),
}

# Ops of floats whose derivative is zero wherever it exists; no cotangent passes them.
# Ops that yield integers or booleans need no entry.
CONSTANT: Final = frozenset(
    {"Ceil", "ConstantOfShape", "EyeLike", "Floor", "OneHot", "Range", "Round", "Sign"}
)


def rule_of(node: Node) -> OpRule | MultiRule:
    """The rule of a node.

    Raises:
        UnsupportedOpError: there is none.
    """
    rule = RULES.get(node.op_type) or MULTI_RULES.get(node.op_type)
    if rule is None:
        raise UnsupportedOpError(
            node.op_type,
            node.name,
            "freeze the weights before it, so that no gradient has to pass, or replace it",
        )
    return rule
