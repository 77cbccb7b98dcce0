"""Gradients of files that PyTorch exported are the gradients that PyTorch computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from export_models import EXPORTS, build, export  # noqa: E402 - needs torch

from edgetrain.compiler import reference  # noqa: E402
from edgetrain.compiler.normalise import normalise  # noqa: E402
from edgetrain.compiler.stage import Recipe, compile_stages  # noqa: E402
from edgetrain.manifest import GraphName, Mode, Role  # noqa: E402

pytestmark = pytest.mark.oracle

# Where the exporter folds BatchNormalization, no weight is the module's own any more.
FOLDED = ("mbv2_dyn", "resnet_dyn", "dyn_train")
NAMES = [
    name
    for name, wanted in EXPORTS.items()
    if wanted.dtype == torch.float32 and not name.startswith("minilm")
    if not name.endswith(FOLDED)
]


def distinct(module: torch.nn.Module) -> None:
    """Exporters merge parameters of equal value, as those of fresh layers are."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_name(name: str) -> None:
    wanted = EXPORTS[name]
    module, sample = build(wanted)
    distinct(module)
    model = onnx.load_from_string(export(wanted, module, sample))
    program = normalise(model, batch=2, tie=True)
    module.eval()
    y = module(*sample)
    labels = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    ((y - labels) ** 2).mean().backward()
    parameters = dict(module.named_parameters())

    recipe = Recipe(frozenset(program.weights), "mse", (Mode.VJP,), batch_statistics=False)
    (bundle,) = compile_stages(program, [], recipe)
    feeds = {"x": sample[0].numpy(), "labels": labels.numpy(), **program.weights}
    values = reference.run(onnx.load_from_string(bundle.graphs[GraphName.LOSS]), feeds)
    ports = bundle.manifest.graphs[GraphName.LOSS].ports(Role.GRADIENT)
    found = {port.key: values[port.name] for port in ports}
    got = reference.run(program.model, feeds)["y"]
    np.testing.assert_allclose(got, y.detach().numpy(), atol=1e-4)
    kept = [n for n, p in parameters.items() if _same(p, program.weights.get(n))]
    assert kept
    for key in kept:
        expected = parameters[key].grad.numpy()
        tolerance = 1e-4 * np.abs(expected).max() + 1e-7
        np.testing.assert_allclose(
            found[key], expected, rtol=0, atol=tolerance, err_msg=key
        )


def _same(parameter, weight: np.ndarray | None) -> bool:
    """Exporters may fold a BatchNormalization into a weight that keeps its name."""
    return weight is not None and np.array_equal(parameter.detach().numpy(), weight)
