"""What `edgetrain inspect` says of a model."""

import json
from pathlib import Path

import onnx
import pytest
from small_models import convnet, mlp
from small_task import determinant, two_layers

from coordinator.demo_model import digits_model
from coordinator.inspect_command import inspect, show
from edgetrain.errors import ConfigError


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_a_chain_can_be_cut_between_its_layers(tmp_path):
    facts = inspect(saved(digits_model(), tmp_path), 4, None)
    assert facts.obstacle == ""
    assert {"softmax_cross_entropy", "mse"} <= set(facts.losses)
    assert [cut.name for cut in facts.cuts] == ["relu1", "flat", "relu3"]
    assert [cut.bytes_a_sample for cut in facts.cuts] == [4 * 1024, 4 * 512, 4 * 64]
    shares = [cut.flop_share for cut in facts.cuts]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    assert facts.inputs[0].shape == (4, 1, 8, 8)


def test_bytes_and_arithmetic_a_sample_do_not_depend_on_the_batch(tmp_path):
    path = saved(digits_model(), tmp_path)
    one, many = inspect(path, 1, None), inspect(path, 16, None)
    assert one.cuts[0].bytes_a_sample == many.cuts[0].bytes_a_sample
    assert one.flop_a_sample == many.flop_a_sample


def test_weights_are_counted_and_named(tmp_path):
    facts = inspect(saved(two_layers(), tmp_path), 1, None)
    assert facts.parameters == 4 * 16 + 16 + 16 * 3 + 3
    assert sorted(facts.trainable) == ["b1", "b2", "w1", "w2"]


def test_running_statistics_do_not_train(tmp_path):
    facts = inspect(saved(convnet(), tmp_path), 2, "softmax_cross_entropy")
    assert not {"bn.mean", "bn.var"} & set(facts.trainable)
    assert {"bn.scale", "bn.bias"} <= set(facts.trainable)


def test_only_the_losses_that_fit_are_offered(tmp_path):
    path = saved(mlp(), tmp_path)
    losses = inspect(path, 1, None).losses
    assert "mse" in losses
    assert "softmax_cross_entropy" not in losses
    facts = inspect(path, 1, "softmax_cross_entropy")
    assert facts.losses == ()
    assert "two classes or more" in facts.obstacle


def test_an_op_without_a_rule_is_the_obstacle(tmp_path):
    facts = inspect(saved(determinant(), tmp_path), 1, None)
    assert facts.without_rules == ("Det",)
    assert "'Det' (node 'volume')" in facts.obstacle


def test_a_loss_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="allowed: "):
        inspect(saved(mlp(), tmp_path), 1, "hinge")


@pytest.mark.parametrize(
    ("model", "words"), [(determinant(), "not possible"), (mlp(), "possible, with loss")]
)
def test_people_get_the_same_in_words(capsys, tmp_path, model, words):
    facts = inspect(saved(model, tmp_path), 1, None)
    show(facts, as_json=False)
    text = capsys.readouterr().out
    assert words in text
    assert all(cut.name in text for cut in facts.cuts)
    show(facts, as_json=True)
    assert json.loads(capsys.readouterr().out)["parameters"] == facts.parameters
