"""Write device_agent/assets/probe_graphs.bin: what `edgetrain-agent probe` times.

    python scripts/make_probe_graphs.py            write it
    python scripts/make_probe_graphs.py --check    or fail where it is not what is written

Each case is a chain of operators of one group between two others: three stages, of which
the middle one is kept, as the compiler makes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from device_agent.probe_set import FILE, ProbeCase, ProbeSet
from edgetrain.bundle import Bundle, sha256
from edgetrain.compiler.cut import CutFinder, Layer
from edgetrain.compiler.features import layer_features
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.manifest import GraphName, GraphSpec, Mode, Role
from edgetrain.op_groups import NONE, OpGroup

PATH = Path(__file__).resolve().parent.parent / "device_agent" / "assets" / FILE
BATCHES = (1, 8, 32)
COMPARED_BATCH = 8  # at which weights as inputs are compared with constants
BLOCKS = (8, 16)
BLOCKED = frozenset(
    (OpGroup.CONVOLUTION, OpGroup.POINTWISE, OpGroup.DEPTHWISE, OpGroup.DEPTHWISE_PLAIN)
)
START, END = "start", "end"

Tensors = dict[str, np.ndarray]
Op = Callable[[str, str, Tensors], onnx.NodeProto]


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators one after another.

    Attributes:
        shape: of what comes in, without the batch.
        ops: each makes a node from its input to its output, and the weights it takes.
        recurrent: the chain takes [steps, batch, features].
    """

    name: str
    group: OpGroup
    shape: tuple[int, ...]
    ops: tuple[Op, ...]
    recurrent: bool = False


def plain(op_type: str, **attributes: object) -> Op:
    return lambda x, y, _: helper.make_node(op_type, [x], [y], **attributes)


def doubled(op_type: str, **attributes: object) -> Op:
    """Of two inputs, both the same."""
    return lambda x, y, _: helper.make_node(op_type, [x, x], [y], **attributes)


def weighted(op_type: str, *shapes: tuple[int, ...], **attributes: object) -> Op:
    """With weights of these shapes after its first input."""

    def make(x: str, y: str, tensors: Tensors) -> onnx.NodeProto:
        names = [f"{y}.{n}" for n in range(len(shapes))]
        tensors.update(zip(names, (np.ones(s, np.float32) for s in shapes), strict=True))
        return helper.make_node(op_type, [x, *names], [y], **attributes)

    return make


def fixed(op_type: str, *values: Sequence[float | int], **attributes: object) -> Op:
    """With fixed values, not trained, after its first input."""

    def make(x: str, y: str, tensors: Tensors) -> onnx.NodeProto:
        names = [f"{y}.fixed{n}" for n in range(len(values))]
        for name, value in zip(names, values, strict=True):
            array = np.asarray(value)
            kind = np.int64 if array.dtype.kind == "i" else np.float32
            tensors[name] = array.astype(kind)
        return helper.make_node(op_type, [x, *names], [y], **attributes)

    return make


def conv(before: int, after: int, kernel: int, stride: int = 1, group: int = 1) -> Op:
    return weighted(
        "Conv",
        (after, before // group, kernel, kernel),
        pads=[kernel // 2] * 4,
        strides=[stride] * 2,
        group=group,
    )


def gate(op_type: str, gates: int, width: int, hidden: int) -> Op:
    """A recurrent layer, and what makes its result [steps, batch, hidden] again."""
    shapes = ((1, gates * hidden, width), (1, gates * hidden, hidden))
    extra = {"linear_before_reset": 1} if op_type == "GRU" else {}
    return weighted(op_type, *shapes, hidden_size=hidden, **extra)


CLIP: Op = fixed("Clip", 0.0, 6.0)
CHEAP = (plain("Relu"), doubled("Add"), CLIP, doubled("Mul"))
COSTLY = (plain("Tanh"), plain("Sigmoid"), plain("Erf"), plain("Softmax", axis=-1))
POOL = plain("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
MEAN = plain("AveragePool", kernel_shape=[2, 2], strides=[2, 2])
NORM = ("BatchNormalization", "LayerNormalization")
TURN = plain("Transpose", perm=[0, 2, 1])
HALF = fixed("Slice", [0], [64], [2])


def _dense(width: int, inner: int) -> Op:
    return weighted("Gemm", (inner, width), (inner,), transB=1)


def _channels(count: int) -> Op:
    return weighted(NORM[0], *[(count,)] * 4)


D, C, P, W = OpGroup.DENSE, OpGroup.CONVOLUTION, OpGroup.POINTWISE, OpGroup.DEPTHWISE
CP, WP = OpGroup.CONVOLUTION_PLAIN, OpGroup.DEPTHWISE_PLAIN
E, T, N = OpGroup.ELEMENTWISE, OpGroup.TRANSCENDENTAL, OpGroup.NORMALIZATION
CHAINS = (
    Chain("1 node", E, (4,), (plain("Relu"),)),
    Chain("33 nodes", E, (4,), (plain("Relu"), *(plain("Neg"), plain("Relu")) * 16)),
    Chain("gemm 64", D, (64,), (_dense(64, 64),) * 4),
    Chain("gemm 512", D, (512,), (_dense(512, 512),) * 2),
    Chain(
        "tokens 64x128",
        D,
        (64, 128),
        (weighted("MatMul", (128, 256)), weighted("MatMul", (256, 128))),
    ),
    Chain("conv5x5 6-16 14x14", CP, (6, 14, 14), (conv(6, 16, 5), conv(16, 6, 5))),
    Chain("conv3x3 3-16 32x32", CP, (3, 32, 32), (conv(3, 16, 3),)),
    Chain("conv5x5 1-8 28x28", CP, (1, 28, 28), (conv(1, 8, 5),)),
    Chain("conv3x3 16 32x32", C, (16, 32, 32), (conv(16, 16, 3),) * 2),
    Chain("conv3x3 64 8x8", C, (64, 8, 8), (conv(64, 64, 3),) * 2),
    Chain("conv3x3/2 32-64 16x16", C, (32, 16, 16), (conv(32, 64, 3, 2),)),
    Chain("conv1x1 16-96 32x32", P, (16, 32, 32), (conv(16, 96, 1), conv(96, 16, 1))),
    Chain("conv1x1 64-256 8x8", P, (64, 8, 8), (conv(64, 256, 1), conv(256, 64, 1))),
    Chain("depthwise 96 32x32", W, (96, 32, 32), (conv(96, 96, 3, 1, 96),)),
    Chain("depthwise 192 8x8", W, (192, 8, 8), (conv(192, 192, 3, 1, 192),) * 2),
    Chain("depthwise/2 32 16x16", WP, (32, 16, 16), (conv(32, 32, 3, 2, 32),)),
    Chain("depthwise/2 96 32x32", WP, (96, 32, 32), (conv(96, 96, 3, 2, 96),)),
    Chain("relu, add 16x32x32", E, (16, 32, 32), CHEAP),
    Chain("relu, add 64x64", E, (64, 64), CHEAP),
    Chain("tanh, erf 64x128", T, (64, 128), COSTLY),
    Chain("tanh, erf 64", T, (64,), COSTLY),
    Chain("batchnorm 16x32x32", N, (16, 32, 32), (_channels(16),) * 2),
    Chain("batchnorm 128x8x8", N, (128, 8, 8), (_channels(128),) * 2),
    Chain("layernorm 64x128", N, (64, 128), (weighted(NORM[1], (128,), (128,)),) * 2),
    Chain("maxpool 16x32x32", OpGroup.POOLING, (16, 32, 32), (POOL, POOL)),
    Chain("meanpool 64x16x16", OpGroup.POOLING, (64, 16, 16), (MEAN, MEAN)),
    Chain("maxpool 64x8x8", OpGroup.POOLING, (64, 8, 8), (POOL,)),
    Chain("pool 128x8x8", OpGroup.REDUCTION, (128, 8, 8), (plain("GlobalAveragePool"),)),
    Chain("mean 64x128", OpGroup.REDUCTION, (64, 128), (fixed("ReduceMean", [1]),)),
    Chain("transpose 64x256", OpGroup.LAYOUT, (64, 256), (TURN,)),
    Chain(
        "concat 64x64",
        OpGroup.LAYOUT,
        (64, 64),
        (doubled("Concat", axis=2), HALF, TURN),
    ),
    Chain(
        "lstm 32, 16 steps", OpGroup.RECURRENT, (16, 32), (gate("LSTM", 4, 32, 32),), True
    ),
    Chain("gru 64, 32 steps", OpGroup.RECURRENT, (32, 16), (gate("GRU", 3, 16, 64),), True),
)


def model(chain: Chain) -> onnx.ModelProto:
    """x [N, ...] -> times a trained number -> the chain -> its mean y [N, 1]."""
    tensors: Tensors = {"gain": np.ones(chain.shape[-1:], np.float32)}
    made = "scaled" if chain.recurrent else START
    nodes = [helper.make_node("Mul", ["x", "gain"], [made])]
    if chain.recurrent:
        nodes.append(helper.make_node("Transpose", [made], [START], perm=[1, 0, 2]))
    names = [START, *(f"value{n}" for n in range(1, len(chain.ops))), END]
    for op, x, y in zip(chain.ops, names[:-1], names[1:], strict=True):
        nodes.append(op(x, y, tensors))
    if chain.recurrent:
        nodes.append(helper.make_node("Transpose", [END], ["back"], perm=[2, 0, 1, 3]))
    last = "back" if chain.recurrent else END
    nodes.append(helper.make_node("Flatten", [last], ["flat"]))
    tensors["axis"] = np.asarray([1], np.int64)
    nodes.append(helper.make_node("ReduceMean", ["flat", "axis"], ["y"]))
    infos = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", ["N", *chain.shape]), ("y", None))
    ]
    graph = helper.make_graph(
        nodes,
        "probe",
        infos[:1],
        infos[1:],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def cases(chain: Chain, batch: int) -> tuple[ProbeCase, dict[str, bytes]]:
    """The case of a chain, and its graphs by hash."""
    program = normalise(model(chain), batch=batch)
    trainable = select_trainable(program, "all")
    finder = CutFinder(program, trainable)
    cuts = (finder.named(START), finder.named(END))
    bundles = {0: middle(program, cuts, trainable, 0)}
    if chain.group in BLOCKED:
        bundles |= {block: middle(program, cuts, trainable, block) for block in BLOCKS}
    layer = Layer(cuts[0].position, cuts[1].position, 0, 0, cuts[1])
    (features,) = layer_features(program, trainable, finder.nodes, (layer,))
    graphs = {sha256(data): data for b in bundles.values() for data in b.graphs.values()}
    spec = None
    if batch == COMPARED_BATCH and bundles[0].manifest.elements:
        data, spec = constant(bundles[0])
        graphs[spec.sha256] = data
    manifests = {block: bundle.manifest for block, bundle in bundles.items()}
    amount = features.forward.get(chain.group, NONE)
    return ProbeCase(chain.name, chain.group, batch, amount, manifests, spec), graphs


def middle(program: Program, cuts: tuple, trainable: frozenset[str], block: int) -> Bundle:
    recipe = Recipe(trainable, "mse", (Mode.VJP,) * 3, blocks=(block,) * 3 if block else ())
    return compile_stages(program, cuts, recipe)[1]


def constant(bundle: Bundle) -> tuple[bytes, GraphSpec]:
    """The bundle's forward as it is deployed, its weights made constants (zeros)."""
    spec = bundle.manifest.graphs[GraphName.EVALUATE]
    proto = onnx.load_from_string(bundle.graphs[GraphName.EVALUATE])
    held = {port.name: port for port in spec.inputs if port.role is Role.WEIGHT}
    kept = [info for info in proto.graph.input if info.name not in held]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.zeros(port.shape, np.float32), name)
        for name, port in held.items()
    )
    data = proto.SerializeToString(deterministic=True)
    inputs = tuple(port for port in spec.inputs if port.name not in held)
    return data, msgspec.structs.replace(spec, inputs=inputs, sha256=sha256(data))


def probe_set(
    chains: Sequence[Chain] = CHAINS, batches: Sequence[int] = BATCHES
) -> ProbeSet:
    """What the asset holds, or the part of it of some chains and batches."""
    made = list(_made(chains, batches))
    graphs: dict[str, bytes] = {}
    for _, more in made:
        graphs |= more
    return ProbeSet(tuple(case for case, _ in made), graphs)


def _made(
    chains: Sequence[Chain], batches: Sequence[int]
) -> Iterator[tuple[ProbeCase, dict[str, bytes]]]:
    for chain in chains:
        for batch in batches:
            yield cases(chain, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = probe_set()
    if options.check:
        if ProbeSet.decode(PATH.read_bytes()) != found:
            raise SystemExit(f"{PATH} is out of date: run this without --check")
        return
    PATH.write_bytes(found.encode())
    print(f"{PATH}: {len(found.cases)} cases, {PATH.stat().st_size} B")


if __name__ == "__main__":
    main()
