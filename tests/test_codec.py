"""Laws of the codecs: what they may lose, and what they make of hostile bytes."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgetrain.codec_spec import NAMES, CodecSpec
from edgetrain.errors import WireError
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec import CODECS, decode, encode, most_bytes
from edgetrain.wire.codec_rows import rows_of
from edgetrain.wire.dither import Dither
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.frame import LAST_CODEC, Address, Kind, frames, parse
from edgetrain.wire.reassembly import Reassembler

HERE = Address(Kind.ACTIVATION, run=1, epoch=2, stage=3, step=4, microbatch=5, tensor=6)
untimed = settings(deadline=None, derandomize=True)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
floats = st.sampled_from(["<f2", "<f4", "<f8"])
arrays = st.tuples(floats, shapes).flatmap(lambda t: hnp.arrays(t[0], t[1]))
LEVELS = {"int8": 127, "int4": 7}


def spec_of(array: np.ndarray) -> TensorSpec:
    return TensorSpec("t", array.dtype.name, array.shape)


def body_of(name: str, array: np.ndarray, share: float = 1.0, seed: int = 0):
    """The codec's own body, also where it is longer than the tensor."""
    return CODECS[name].encode(array, share, Dither(seed, HERE))


def back(name: str, array: np.ndarray, share: float = 1.0, seed: int = 0) -> np.ndarray:
    body = body_of(name, array, share, seed)
    if body is None:
        return array
    return CODECS[name].decode(body.data, spec_of(array))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def narrowed(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


@pytest.mark.parametrize("name", list(CODECS))
@untimed
@given(array=arrays, share=st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_any_array_comes_back_as_such_and_within_its_size(name, array, share):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = back(name, array, share)
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    body = body_of(name, array, share)
    if body is not None:
        assert body.nbytes <= CODECS[name].most_bytes(spec_of(array), share)


@untimed
@given(arrays)
def test_sparse_loses_no_bit(array):
    assert same_bits(back("sparse", array), array)


@untimed
@given(arrays)
def test_bf16_is_within_its_bound(array):
    with np.errstate(all="ignore"):
        x, y = array.astype(np.float64), back("bf16", array).astype(np.float64)
        if array.dtype == np.float16:  # float16 rounds again
            x, y = x[np.abs(y) > 1e-4], y[np.abs(y) > 1e-4]
        finite = np.isfinite(x) & (np.abs(x) < 3.38e38)
        assert np.array_equal(np.isnan(x), np.isnan(y))
        error = np.abs(x - y)[finite]
        assert (error <= 2.0**-8 * np.abs(x[finite]) * (1 + 2.0**-9) + 2.0**-133).all()
        assert np.array_equal(y[np.isinf(x)], x[np.isinf(x)])


@pytest.mark.parametrize("name", list(LEVELS))
@untimed
@given(array=arrays.filter(lambda a: a.dtype != np.float16), seed=st.integers(0, 2**64 - 1))
def test_rows_are_within_a_step(name, array, seed):
    rows, columns = rows_of(array.shape)
    x = narrowed(array).reshape(rows, columns)
    y = narrowed(back(name, array, seed=seed)).reshape(rows, columns)
    for before, after in zip(x, y, strict=True):
        if not np.isfinite(before).all():
            assert np.isnan(after).all()
            continue
        largest = np.abs(before.astype(np.float64)).max()
        step = max(largest / LEVELS[name], 2.0**-118)
        assert (np.abs(before.astype(np.float64) - after) <= step).all()
        assert (after[before == 0] == 0).all()
        if largest == 0:
            assert (after == 0).all()


@pytest.mark.parametrize("name", list(LEVELS))
def test_rounding_is_right_on_average(name):
    x = np.random.default_rng(0).standard_normal((4, 80)).astype(np.float32)
    count = 4000
    mean = sum(back(name, x, seed=seed).astype(np.float64) for seed in range(count)) / count
    step = np.abs(x).max(axis=1, keepdims=True) / LEVELS[name]
    # a deviation of the mean of at most half a step over the root of the count
    assert (np.abs(mean - x) <= step * (1 / 500 + 5 * 0.5 / count**0.5)).all()


@untimed
@given(arrays.filter(lambda a: a.dtype != np.float16), st.sampled_from([0.01, 0.1, 0.3, 1]))
def test_topk_sends_the_largest_exactly_and_the_mean_of_the_rest(array, share):
    x, y = narrowed(array), narrowed(back("topk", array, share))
    rows, columns = rows_of(x.shape)
    size = np.where(np.isnan(x), np.inf, np.abs(x)).reshape(-1)
    count = min(int(np.ceil(share * x.size)), np.count_nonzero(x))
    order = np.argsort(-size, kind="stable")
    if np.isnan(x).any():  # NaN and infinity are told apart
        return
    sent = np.zeros(x.size, bool)
    sent[order[:count]] = True
    assert np.array_equal(x.reshape(-1)[sent], y.reshape(-1)[sent])
    sent = sent.reshape(rows, columns)
    for before, after, kept in zip(
        x.reshape(rows, columns), y.reshape(rows, columns), sent, strict=True
    ):
        left = before[~kept].astype(np.float64)
        if left.size:
            with np.errstate(all="ignore"):
                assert (after[~kept] == after[~kept][0]).all() or np.isnan(left.mean())
                np.testing.assert_allclose(
                    after[~kept], narrowed(left.mean()), rtol=1e-5, atol=1e-30
                )


def test_topk_makes_a_nan_spread_over_its_row():
    x = np.ones((2, 100), np.float32)
    x[1, 3:90] = np.nan
    y = back("topk", x, 0.1)
    assert (y[0] == 1).all()
    assert np.isnan(y[1]).all()


@pytest.mark.parametrize(("name", "share"), [("topk", 0.1), ("topk8", 0.1), ("topk", 0.01)])
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_topk_keeps_most_of_the_energy_and_the_sums(name, share, shift):
    x = np.random.default_rng(0).standard_normal((32, 400)).astype(np.float32) + shift
    y = back(name, x, share)
    slack = 1.001 if name == "topk" else 1.01
    assert np.square(x - y).sum() <= slack * (1 - share) * np.square(x).sum()
    if name == "topk":
        np.testing.assert_allclose(x.sum(1), y.sum(1), rtol=1e-4, atol=1e-3)


@untimed
@given(arrays.filter(lambda a: a.dtype != np.float16), st.sampled_from([0.1, 1.0]))
def test_topk8_is_within_a_step_of_topk(array, share):
    a, b = narrowed(back("topk", array, share)), narrowed(back("topk8", array, share))
    if not np.isfinite(narrowed(array)).all():
        return
    step = max(np.abs(narrowed(array)).max(initial=0).astype(np.float64) / 127, 2.0**-118)
    assert (np.abs(a.astype(np.float64) - b) <= step).all()


@pytest.mark.parametrize("name", ["int8", "int4", "topk8"])
def test_the_same_tensor_gives_the_same_bytes_and_another_does_not(name):
    x = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    body = body_of(name, x, 0.5).tobytes()
    assert body == body_of(name, x, 0.5).tobytes()
    assert body != body_of(name, x, 0.5, seed=1).tobytes()
    for changed in (
        {"step": 9},
        {"microbatch": 9},
        {"tensor": 9},
        {"stage": 9},
        {"kind": Kind.COTANGENT},
        {"evaluation": True},
    ):
        fields = {n: getattr(HERE, n) for n in Address.__dataclass_fields__}
        there = Dither(0, Address(**{**fields, **changed}))
        assert body != CODECS[name].encode(x, 0.5, there).tobytes()
    moved = Dither(0, Address(Kind.ACTIVATION, 77, 78, 3, 4, 5, 6))
    assert body == CODECS[name].encode(x, 0.5, moved).tobytes()


@pytest.mark.parametrize("lay", [lambda a: a.T, lambda a: a[::2, 1::3], lambda a: a[::-1]])
@pytest.mark.parametrize("name", list(CODECS))
def test_layout_does_not_matter_and_nothing_is_written_into(name, lay):
    base = np.random.default_rng(0).standard_normal((70, 90)).astype(np.float32)
    base[3, 3] = np.nan
    array = lay(base.copy())
    array.setflags(write=False)
    straight = np.ascontiguousarray(array)
    a, b = body_of(name, array, 0.2), body_of(name, straight, 0.2)
    assert (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((25, 400), (25, 400)),
        ((25, 10), (25, 10)),
        ((25, 6, 14, 14), (150, 196)),
        ((25, 16, 4, 4), (25, 256)),
        ((2, 128, 768), (256, 768)),
        ((0, 7), (0, 0)),
    ],
)
def test_a_row_is_long_enough_and_of_one_sample(shape, rows):
    assert rows_of(shape) == rows


@untimed
@given(st.data())
def test_hostile_bodies_raise_only_wire_errors(data):
    """Random bytes, and good bodies cut, extended and changed."""
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from(["float32", "float16", "int64", "float64"]))
    tensor = TensorSpec("t", dtype, shape)
    code = data.draw(st.integers(0, LAST_CODEC + 2))
    body = bytearray(data.draw(st.binary(max_size=200)))
    if 1 <= code <= LAST_CODEC and data.draw(st.booleans()):
        name = next(n for n, codec in CODECS.items() if codec.code == code)
        array = np.random.default_rng(0).standard_normal(shape).astype("f4").round()
        made = body_of(name, array.astype(dtype), 0.3)
        body = bytearray(made.tobytes() if made is not None else body)
        for _ in range(data.draw(st.integers(0, 3))):
            if body:
                body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(
                    st.integers(1, 255)
                )
    try:
        result = decode(code, memoryview(body), tensor)
    except WireError:
        return
    assert (result.shape, result.dtype.name) == (shape, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "uint8", ml_dtypes.bfloat16])
def test_what_is_no_float_travels_plainly(name, dtype):
    array = np.arange(4096).astype(dtype)
    spec = CodecSpec(name)
    assert encode(spec, array, Dither(0, HERE)) is array
    assert most_bytes(spec, spec_of(array)) == array.nbytes


@pytest.mark.parametrize("name", list(CODECS))
def test_a_tensor_that_would_be_no_shorter_travels_plainly(name):
    array = np.ones((3, 1), np.float16)
    result = encode(CodecSpec(name), array, Dither(0, HERE))
    assert result is array or result.nbytes < array.nbytes


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
def test_encoded_tensors_cross_the_wire(name, chunk_bytes):
    rng = np.random.default_rng(0)
    array = np.maximum(rng.standard_normal((8, 130)), 0.5).astype(np.float32) - 0.5
    sent = encode(CodecSpec(name), array, Dither(0, HERE))
    assert isinstance(sent, Encoded)
    reassembler = Reassembler(1 << 20)
    messages = [
        reassembler.feed(parse(frame, max_body_bytes=1 << 20))
        for frame in frames(HERE, sent, chunk_bytes=chunk_bytes)
    ]
    message = messages[-1]
    assert message is not None
    assert message.codec == CODECS[name].code
    expected = CODECS[name].decode(sent.body.data, spec_of(array))
    np.testing.assert_array_equal(message.array(array.shape), expected)


def test_codes_keep_their_meaning():
    assert {name: codec.code for name, codec in CODECS.items()} == {
        "bf16": 1,
        "int8": 2,
        "int4": 3,
        "topk": 4,
        "topk8": 5,
        "sparse": 6,
    }
    assert max(codec.code for codec in CODECS.values()) == LAST_CODEC


@pytest.mark.parametrize("text", ["raw", "int8", "topk:0.05", "topk8:0.25", "adaptive"])
def test_specs_are_written_as_they_are_read(text):
    assert str(CodecSpec.parse(text)) == text


@pytest.mark.parametrize("text", ["", "zip", "topk:0", "topk:2", "topk:x", "int8:0.5"])
def test_other_specs_are_refused(text):
    with pytest.raises(ValueError, match="codec"):
        CodecSpec.parse(text)


@pytest.mark.parametrize("kind", [k for k in Kind if k not in (1, 2)])
def test_only_what_crosses_cuts_is_taken_encoded(kind):
    address = Address(kind, run=1, epoch=0, stage=0)
    body = Encoded("float32", CODECS["bf16"].code, np.zeros(4, np.uint8))
    (frame,) = frames(address, body, chunk_bytes=100)
    with pytest.raises(WireError, match="codec"):
        parse(frame, max_body_bytes=100)


@pytest.mark.parametrize(
    ("dtype", "codec"), [("float32", LAST_CODEC + 1), ("float32", 255)]
)
def test_unknown_codecs_are_refused(dtype, codec):
    (frame,) = frames(HERE, Encoded(dtype, codec, np.zeros(4, np.uint8)), chunk_bytes=100)
    with pytest.raises(WireError, match="codec"):
        parse(frame, max_body_bytes=100)


def test_frames_of_one_tensor_in_two_codecs_are_refused():
    reassembler = Reassembler(1 << 20)
    both = [
        list(frames(HERE, Encoded("float32", code, np.zeros(40, np.uint8)), chunk_bytes=20))
        for code in (1, 2)
    ]
    reassembler.feed(parse(both[0][0], max_body_bytes=100))
    with pytest.raises(WireError, match="disagree"):
        reassembler.feed(parse(both[1][1], max_body_bytes=100))
