from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.data import fit_run_data, label_spec, read_run_data
from edgetrain.config import DataConfig, ModelConfig
from edgetrain.errors import DataError
from edgetrain.sample_check import LabelSpec, check
from edgetrain.sample_files import load
from edgetrain.samples import BatchOrder, Samples, evaluation_rows, order
from edgetrain.tensors import TensorSpec

IMAGE = TensorSpec("image", "float32", (1, 1, 2, 2))
TOKENS = TensorSpec("tokens", "int64", (1, 3))
CLASSES = LabelSpec(TensorSpec("labels", "int64", (1,)), low=0, high=2)
VALUES = LabelSpec(TensorSpec("labels", "float32", (1, 1)))


def images(count=4, dtype=np.float32):
    return np.arange(count * 4).reshape(count, 1, 2, 2).astype(dtype)


def samples(labels=(0, 1, 2, 0), **arrays):
    return Samples(arrays or {"image": images()}, np.array(labels), "digits.npz")


# The order of a run


@given(st.integers(0, 200), st.integers(0, 2**63), st.integers(0, 10**6), st.booleans())
def test_an_order_is_a_permutation(count, seed, epoch, shuffle):
    rows = order(count, epoch=epoch, seed=seed, shuffle=shuffle)
    np.testing.assert_array_equal(np.sort(rows), np.arange(count))
    assert not rows.flags.writeable


def test_the_order_is_the_same_everywhere():
    golden = [4, 5, 3, 0, 2, 7, 1, 6]
    assert order(8, epoch=1, seed=42, shuffle=True).tolist() == golden


def test_seed_and_epoch_change_the_order_and_no_shuffle_keeps_it():
    first = order(100, epoch=0, seed=1, shuffle=True)
    assert not np.array_equal(first, order(100, epoch=1, seed=1, shuffle=True))
    assert not np.array_equal(first, order(100, epoch=0, seed=2, shuffle=True))
    np.testing.assert_array_equal(order(9, epoch=5, seed=1, shuffle=False), np.arange(9))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_an_epoch_takes_each_sample_at_most_once(size, microbatches, spare, shuffle):
    batch = size * microbatches
    plan = BatchOrder(batch + spare, batch, microbatches, seed=3, shuffle=shuffle)
    first = 2 * plan.steps_per_epoch
    steps = range(first, first + plan.steps_per_epoch)
    rows = [plan.rows(step, m) for step in steps for m in range(microbatches)]
    assert {len(part) for part in rows} == {size}
    assert {plan.epoch(step) for step in steps} == {2}
    taken = np.concatenate(rows)
    assert len(set(taken.tolist())) == len(taken) == plan.samples // batch * batch
    assert taken.max() < plan.samples


def test_a_batch_order_survives_the_wire():
    plan = BatchOrder(100, 12, 3, seed=7, shuffle=True)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=BatchOrder)
    np.testing.assert_array_equal(again.rows(17, 2), plan.rows(17, 2))


def test_fewer_samples_than_a_batch_are_refused():
    with pytest.raises(DataError, match="7 samples do not fill one batch of 8"):
        BatchOrder(7, 8, 2, seed=0, shuffle=True)


@given(st.integers(0, 50), st.integers(1, 12))
def test_evaluation_counts_every_sample_once_at_a_static_size(count, microbatch):
    seen = []
    for rows, valid in evaluation_rows(count, microbatch):
        assert len(rows) == microbatch
        assert rows.max() < count
        seen += rows[:valid].tolist()
    assert seen == list(range(count))


def test_take_picks_rows_of_all_arrays():
    part = samples().take(np.array([2, 0]))
    assert part.labels.tolist() == [2, 0]
    np.testing.assert_array_equal(part.inputs["image"], images()[[2, 0]])
    assert len(part) == 2


# Fitting a model


def test_samples_that_fit_go_through_unchanged():
    given_ = samples()
    fitted = check(given_, [IMAGE], CLASSES)
    assert fitted.inputs["image"] is given_.inputs["image"]
    assert fitted.labels.dtype == np.int64
    assert fitted.remarks == ()


def test_a_lone_array_needs_no_name_and_an_extent_of_one_no_mention():
    fitted = check(samples(x=images().reshape(4, 2, 2)), [IMAGE], CLASSES)
    np.testing.assert_array_equal(fitted.inputs["image"], images())


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint8, np.int8])
def test_casts_that_lose_nothing_are_made(dtype):
    fitted = check(samples(image=images(dtype=dtype)), [IMAGE], CLASSES)
    assert fitted.inputs["image"].dtype == np.float32
    np.testing.assert_array_equal(fitted.inputs["image"], images())
    assert bool(fitted.remarks) == (np.dtype(dtype).kind in "iu")


def test_several_inputs_come_in_the_models_order():
    tokens = np.ones((4, 3), np.int32)
    fitted = check(samples(tokens=tokens, image=images()), [IMAGE, TOKENS], CLASSES)
    assert list(fitted.inputs) == ["image", "tokens"]
    assert fitted.inputs["tokens"].dtype == np.int64


@pytest.mark.parametrize("labels", [[0.5, 1, 2, 3], [[0.5], [1], [2], [3]]])
def test_values_may_come_flat_or_as_a_column(labels):
    fitted = check(samples(labels), [IMAGE], VALUES)
    assert fitted.labels.shape == (4, 1)
    assert fitted.labels.dtype == np.float32


def test_whole_numbers_are_fine_as_values():
    assert check(samples(), [IMAGE], VALUES).labels.dtype == np.float32


def test_labels_that_are_not_needed_are_dropped():
    assert check(samples(), [IMAGE], None).labels is None


def spoiled(value):
    array = images()
    array[2, 0, 1, 1] = value
    return array


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (samples(image=spoiled(np.nan)), ["'image'", "NaN", "sample 2"]),
        (samples(image=spoiled(-np.inf)), ["'image'", "sample 2"]),
        (samples(image=images(dtype=np.float64) * 1e300), ["'image'", "sample 0"]),
        (samples(image=images(dtype=np.int64)), ["int64", "float32", ".astype("]),
        (samples(image=images().astype(str)), ["<U", "float32"]),
        (samples(image=images().reshape(4, 4)), ["[4, 4]", "reshape(-1, 1, 2, 2)"]),
        (samples(image=np.zeros((4, 1, 3, 3), np.float32)), ["[samples, 1, 2, 2]"]),
        (samples(image=np.float32(3)), ["shape []"]),
        (samples(image=images(), y=images()), ["has y", "(image)", "'labels'"]),
        (samples(image=images(5)), ["image 5", "labels 4"]),
        (samples([], image=images(0)), ["0 samples", "at least 2"]),
        (samples([0], image=images(1)), ["1 samples", "at least 2"]),
        (samples([0, 1, 3, 0]), ["sample 2 is 3", "0 to 2", "count from 0"]),
        (samples([0, 1, -1, 0]), ["sample 2 is -1"]),
        (samples([0.0, 1.0, 1.0, 0.0]), ["'labels'", "float64", "int64"]),
        (samples(np.eye(4, 3, dtype=int)), ["one-hot", "argmax"]),
        (samples(np.zeros((4, 2), int)), ["'labels'", "[4, 2]", "[samples]"]),
        (Samples({"image": images()}, None, "digits.npz"), ["no labels"]),
    ],
)
def test_what_does_not_fit_is_named(given_, words):
    with pytest.raises(DataError) as caught:
        check(given_, [IMAGE], CLASSES, at_least=2)
    for word in ["digits.npz", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0.5, 1, np.nan, 0]), ["'labels'", "sample 2"]),
        (np.array([2**24 + 1, 0, 0, 0]), ["do not fit into float32"]),
    ],
)
def test_values_that_cannot_be_labels_are_named(labels, words):
    with pytest.raises(DataError) as caught:
        check(samples(labels), [IMAGE], VALUES)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_input_is_named():
    with pytest.raises(DataError, match=r"lacks tokens.*\(image, tokens\)"):
        check(samples(), [IMAGE, TOKENS], CLASSES)


def test_the_first_bad_sample_is_found_beyond_the_first_chunk():
    array = np.zeros((3000, 2000), np.float32)
    array[2500, 7] = np.inf
    spec = TensorSpec("x", "float32", (1, 2000))
    with pytest.raises(DataError, match="sample 2500"):
        check(Samples({"x": array}), [spec], None)


# Files


def test_npz_keeps_names_and_types(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, image=images(dtype=np.uint8), labels=np.arange(4))
    read = load(path)
    assert list(read.inputs) == ["image"]
    assert read.inputs["image"].dtype == np.uint8
    np.testing.assert_array_equal(read.labels, np.arange(4))
    assert read.source == str(path)


def test_npy_takes_its_labels_from_the_file_beside_it(tmp_path):
    np.save(tmp_path / "d.npy", images())
    with pytest.raises(DataError, match=r"d\.labels\.npy"):
        load(tmp_path / "d.npy")
    np.save(tmp_path / "d.labels.npy", np.arange(4))
    read = load(tmp_path / "d.npy", input_name="image")
    np.testing.assert_array_equal(read.inputs["image"], images())
    np.testing.assert_array_equal(read.labels, np.arange(4))


@pytest.mark.parametrize(
    ("text", "labels", "dtype"),
    [
        ("a,b,kind\n1,2,0\n3,4,1\n", [0, 1], np.int64),
        ("a, Label ,b\r\n1,0,2\r\n3,1,4\r\n", [0, 1], np.int64),
        ("\ufefflabels,a,b\n0.5,1,2\n\n1e0,3,4", [0.5, 1], np.float32),
    ],
)
def test_csv_has_a_header_and_a_label_column(tmp_path, text, labels, dtype):
    path = tmp_path / "d.csv"
    path.write_text(text, encoding="utf-8")
    read = load(path, input_name="x")
    np.testing.assert_array_equal(read.inputs["x"], np.array([[1, 2], [3, 4]], np.float32))
    assert read.labels.dtype == dtype
    assert read.labels.tolist() == labels


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3\n", ["line 3 has 1 columns", "has 2"]),
        ("a,b\n1,2\n3,cat\n", ["line 3", "'b'", "'cat'"]),
        ("a,b\n", ["at least one sample"]),
        ("", ["header row"]),
        ("a\n1\n", ["two columns"]),
    ],
)
def test_a_csv_that_is_no_table_of_numbers_is_refused(tmp_path, text, words):
    path = tmp_path / "d.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        load(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_unreadable_files_are_one_clear_error(tmp_path):
    good = tmp_path / "good.npz"
    np.savez_compressed(good, image=np.random.default_rng(0).normal(size=(50, 50)))
    data = good.read_bytes()
    middle = len(data) // 2
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    np.savez(tmp_path / "labels.npz", labels=np.arange(3))
    np.savez(tmp_path / "named.npz", x=np.zeros(2, [("a", "f4")]))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "cut.npz").write_bytes(data[:middle])
    (tmp_path / "flip.npz").write_bytes(
        data[:middle] + b"\0\xff\0\xff" + data[middle + 4 :]
    )
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "noise.npy").write_bytes(b"\x93NUMPY noise")
    (tmp_path / "noise.labels.npy").write_bytes(b"")
    (tmp_path / "d.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.parquet").write_bytes(b"")
    (tmp_path / "folder.npz").mkdir()
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    names = "objects labels named array cut flip empty none folder text"
    for name in [*(f"{n}.npz" for n in names.split()), "noise.npy", "d.csv", "d.parquet"]:
        with pytest.raises(DataError) as caught:
            load(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def small_files():
    archive, array = io.BytesIO(), io.BytesIO()
    np.savez_compressed(archive, x=np.arange(6).reshape(3, 2), labels=np.arange(3))
    np.save(array, np.arange(3))
    return {".npz": archive.getvalue(), ".npy": array.getvalue(), ".csv": b"a,b\n1,2\n"}


@pytest.mark.filterwarnings("ignore")  # numpy warns of odd headers before it refuses them
@given(
    st.sampled_from(sorted(small_files().items())),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=8),
    st.integers(0, 600),
)
def test_bytes_that_were_changed_are_read_or_refused(
    tmp_path_factory, file, changes, length
):
    suffix, good = file
    data = bytearray(good[:length])
    for place, value in changes:
        if data:
            data[place % len(data)] = value
    path = tmp_path_factory.getbasetemp() / f"changed{suffix}"
    path.write_bytes(data)
    path.with_suffix(".labels.npy").write_bytes(small_files()[".npy"])
    with contextlib.suppress(DataError):
        assert isinstance(load(path), Samples)


# What the coordinator reads for a run


@pytest.mark.parametrize(
    ("loss", "dtype", "bounds"),
    [
        ("softmax_cross_entropy", "int64", (0, 2)),
        ("bce_with_logits", "float32", (0, 1)),
        ("mse", "float32", (None, None)),
    ],
)
def test_the_loss_sets_what_labels_may_be(loss, dtype, bounds):
    output = TensorSpec("y", "float32", (1, 3))
    config = ModelConfig(Path("m.onnx"), loss)
    spec = label_spec(config, TensorSpec("labels", dtype, (1,)), output)
    assert (spec.low, spec.high) == bounds


def run_data(config, batch_size):
    raw = read_run_data(config, input_name=IMAGE.name)
    return fit_run_data(raw, [IMAGE], CLASSES, batch_size=batch_size)


def test_a_run_reads_and_checks_both_files(tmp_path):
    train, held_out = tmp_path / "train.npz", tmp_path / "eval.npz"
    np.savez(train, image=images(dtype=np.uint8), labels=np.arange(4) % 3)
    np.savez(held_out, image=images(1), labels=[1])
    config = DataConfig(train=train, eval=held_out)
    data = run_data(config, batch_size=4)
    assert (len(data.train), len(data.eval)) == (4, 1)
    assert len(data.remarks) == 1
    with pytest.raises(DataError, match=r"train\.npz.*at least 5"):
        run_data(config, batch_size=5)


def test_data_that_stays_on_a_device_is_not_read():
    config = DataConfig(device="pi", dataset="walks")
    data = run_data(config, batch_size=4)
    assert (data.train, data.eval, data.remarks) == (None, None, ())
