"""Which rule each ONNX operator has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.rules import (
    activation,
    columns,
    convolution,
    criterion,
    dropout,
    einsum,
    elementwise,
    indexing,
    layout,
    linear,
    linear_units,
    normalization,
    norms,
    padding,
    pooling,
    quantization,
    recurrent_gru,
    recurrent_lstm,
    recurrent_rnn,
    reduction,
    resize,
    response,
    sampling,
    scatter,
    selection,
    sequence,
    standardization,
    trigonometry,
)
from edgetrain.compiler.rules.base import (
    MultiRule,
    OpRule,
    Saves,
    linear_rule,
    symmetric_rule,
)
from edgetrain.compiler.rules.recurrent import recurrent_rule
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

_scatter: Final = OpRule(scatter.scatter_vjp, scatter.scatter_jvp, _INPUTS | _OUTPUT)

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
    "Mod": OpRule(
        elementwise.mod_vjp, elementwise.mod_jvp, _INPUTS | _OUTPUT, broadcasts=True
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
    "DequantizeLinear": OpRule(
        quantization.dequantize_vjp, quantization.dequantize_jvp, _INPUTS
    ),
    # Trigonometry
    "Tan": symmetric_rule(trigonometry.tan, _OUTPUT),
    "Asin": symmetric_rule(trigonometry.asin, _FIRST),
    "Acos": symmetric_rule(trigonometry.acos, _FIRST),
    "Atan": symmetric_rule(trigonometry.atan, _FIRST),
    "Sinh": symmetric_rule(trigonometry.sinh, _FIRST),
    "Cosh": symmetric_rule(trigonometry.cosh, _FIRST),
    "Asinh": symmetric_rule(trigonometry.asinh, _FIRST),
    "Acosh": symmetric_rule(trigonometry.acosh, _FIRST),
    "Atanh": symmetric_rule(trigonometry.atanh, _FIRST),
    # Activations
    "Relu": symmetric_rule(activation.relu, _OUTPUT),
    "LeakyRelu": symmetric_rule(activation.leaky_relu, _OUTPUT),
    "PRelu": OpRule(activation.prelu_vjp, activation.prelu_jvp, _INPUTS, broadcasts=True),
    "Elu": symmetric_rule(activation.elu, _OUTPUT),
    "Selu": symmetric_rule(linear_units.selu, _OUTPUT),
    "Celu": symmetric_rule(linear_units.celu, _OUTPUT),
    "ThresholdedRelu": symmetric_rule(linear_units.thresholded_relu, _FIRST),
    "Shrink": symmetric_rule(linear_units.shrink, _FIRST),
    "Softsign": symmetric_rule(linear_units.softsign, _FIRST),
    "Mish": symmetric_rule(linear_units.mish, _FIRST),
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
    "Dropout": symmetric_rule(dropout.dropout, _REST | _EXTRA),
    # Products
    "MatMul": OpRule(linear.matmul_vjp, linear.matmul_jvp, _INPUTS),
    "Gemm": OpRule(linear.gemm_vjp, linear.gemm_jvp, _INPUTS),
    "Einsum": OpRule(einsum.einsum_vjp, einsum.einsum_jvp, _INPUTS),
    "Conv": OpRule(convolution.conv_vjp, convolution.conv_jvp, _INPUTS),
    "ConvTranspose": OpRule(convolution.conv_transpose_vjp, convolution.conv_jvp, _INPUTS),
    # Pooling
    "MaxPool": OpRule(pooling.max_pool_vjp, pooling.max_pool_jvp, _FIRST | _OUTPUT),
    "GlobalMaxPool": OpRule(
        pooling.global_max_pool_vjp, pooling.global_max_pool_jvp, _FIRST
    ),
    "AveragePool": linear_rule(pooling.average_pool_vjp),
    "GlobalAveragePool": linear_rule(pooling.global_average_pool_vjp),
    "LpPool": OpRule(norms.lp_pool_vjp, norms.lp_pool_jvp, _FIRST | _OUTPUT),
    "GlobalLpPool": OpRule(
        norms.global_lp_pool_vjp, norms.global_lp_pool_jvp, _FIRST | _OUTPUT
    ),
    "MaxUnpool": linear_rule(scatter.max_unpool_vjp, _REST),
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
    "GroupNormalization": OpRule(
        standardization.group_norm_vjp, standardization.group_norm_jvp, _INPUTS
    ),
    "MeanVarianceNormalization": symmetric_rule(standardization.mean_variance_norm, _FIRST),
    "LpNormalization": OpRule(norms.lp_norm_vjp, norms.lp_norm_jvp, _FIRST | _OUTPUT),
    "LRN": OpRule(response.lrn_vjp, response.lrn_jvp, _FIRST | _OUTPUT),
    # Losses
    "NegativeLogLikelihoodLoss": OpRule(
        criterion.nll_vjp, criterion.nll_jvp, _INPUTS | _OUTPUT
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
    "ReduceLogSum": OpRule(reduction.slope_vjp, reduction.slope_jvp, _OUTPUT),
    "ReduceProd": OpRule(reduction.slope_vjp, reduction.slope_jvp, _FIRST),
    # Layout and selection
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Transpose": linear_rule(layout.transpose_vjp),
    "Concat": OpRule(layout.concat_vjp, layout.concat_jvp, _NOTHING),
    "Expand": OpRule(layout.expand_vjp, layout.expand_jvp, _NOTHING),
    "Tile": linear_rule(layout.tile_vjp),
    "Pad": OpRule(padding.pad_vjp, padding.pad_jvp, _NOTHING),
    "DepthToSpace": linear_rule(layout.depth_to_space_vjp),
    "SpaceToDepth": linear_rule(layout.space_to_depth_vjp),
    "Col2Im": linear_rule(columns.col2im_vjp),
    "Trilu": linear_rule(sequence.self_transposed_vjp, _REST),
    "ReverseSequence": linear_rule(sequence.self_transposed_vjp, _REST),
    "CumSum": linear_rule(sequence.cumsum_vjp, _REST),
    "Range": OpRule(sequence.range_vjp, sequence.range_jvp, _NOTHING),
    "Slice": linear_rule(indexing.slice_vjp),
    "Gather": linear_rule(indexing.gather_vjp, _REST),
    "GatherElements": linear_rule(selection.gather_elements_vjp, _REST),
    "GatherND": linear_rule(selection.gather_nd_vjp, _REST),
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "TopK": OpRule(selection.top_k_vjp, selection.top_k_jvp, _EXTRA),
    "Compress": linear_rule(selection.compress_vjp),
    "OneHot": OpRule(selection.one_hot_vjp, selection.one_hot_jvp, _INPUTS),
    "GridSample": OpRule(sampling.grid_sample_vjp, sampling.grid_sample_jvp, _INPUTS),
    "Resize": OpRule(resize.resize_vjp, resize.resize_jvp, _NOTHING),
}

MULTI_RULES: Final[Mapping[str, MultiRule]] = {
    "GRU": recurrent_rule(recurrent_gru.GRU),
    "LSTM": recurrent_rule(recurrent_lstm.LSTM),
    "RNN": recurrent_rule(recurrent_rnn.RNN),
    "Split": MultiRule(layout.split_vjp, layout.split_jvp, _NOTHING),
    "SoftmaxCrossEntropyLoss": MultiRule(
        criterion.cross_entropy_vjp, criterion.cross_entropy_jvp, _INPUTS | _OUTPUT
    ),
}

# Ops of floats whose derivative is zero wherever it exists; no cotangent passes them.
# Ops that yield integers or booleans need no entry.
CONSTANT: Final = frozenset(
    {"Ceil", "ConstantOfShape", "EyeLike", "Floor", "Hardmax", "Round", "Sign"}
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
