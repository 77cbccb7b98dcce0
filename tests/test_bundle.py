"""A bundle comes back as it was sent, and nothing damaged gets through."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.bundle import Bundle, sha256
from edgetrain.compiler.layout import lay_out
from edgetrain.errors import BundleError
from edgetrain.manifest import ALIGNMENT, CARRYING, DECOUPLED, Mode, WeightSpec, view
from tests.stage_runs import compiled, finder

FUZZ = settings(max_examples=150)


def bundle(name: str = "residual", mode: Mode = Mode.VJP) -> Bundle:
    """Of the middle of three stages: statistics, stash, both kinds of cotangent."""
    cuts = finder(name).valid()[:2]
    modes = [Mode.FROZEN, mode, mode] if mode in CARRYING else [Mode.VJP, mode, Mode.VJP]
    modes[0] = mode if mode in DECOUPLED else modes[0]
    return compiled(name, cuts, modes=modes)[1]


ENCODED = bundle().encode()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", ["residual", "encoder", "tokens"])
def test_round_trip(name, mode):
    made = bundle(name, mode)
    found = Bundle.decode(made.encode())
    assert found.manifest == made.manifest
    assert found.graphs == made.graphs
    assert found.weights.tobytes() == made.weights.tobytes()
    assert found.encode() == made.encode()


def test_the_decoded_weights_are_the_bundles_own():
    found = Bundle.decode(ENCODED)
    assert found.weights.flags.owndata
    assert found.weights.flags.writeable


def accepted(data: bytes) -> bool:
    """Whether it decodes; then every view that the manifest promises must exist."""
    try:
        found = Bundle.decode(data)
    except BundleError:
        return False
    for spec in found.manifest.weights:
        assert view(found.weights, spec).shape == spec.shape
    for name, graph in found.graphs.items():
        assert found.manifest.graphs[name].sha256 == sha256(graph)
    return True


def test_every_flipped_byte_is_refused_or_changes_no_structure():
    """What decoding alone cannot see, such as a weight, the announced hash shows."""
    rng = np.random.default_rng(0)
    places = [*range(200), *rng.integers(0, len(ENCODED), 600).tolist()]
    refused = 0
    for place in places:
        damaged = bytearray(ENCODED)
        damaged[place] ^= 1 << int(rng.integers(8))
        refused += not accepted(bytes(damaged))
        assert sha256(bytes(damaged)) != sha256(ENCODED)
    assert refused > len(places) // 3


def test_every_flipped_byte_of_a_graph_is_refused():
    data = next(iter(bundle().graphs.values()))
    start = ENCODED.index(data)
    for place in range(start, start + len(data), 7):
        damaged = bytearray(ENCODED)
        damaged[place] ^= 0xFF
        with pytest.raises(BundleError, match="does not match its hash"):
            Bundle.decode(bytes(damaged))


def test_options_out_of_range_are_refused():
    """They check themselves as they are read, with errors of their own."""
    data = msgspec.msgpack.decode(ENCODED)
    data["manifest"]["loss_options"]["label_smoothing"] = 2.0
    with pytest.raises(BundleError, match="label_smoothing"):
        Bundle.decode(msgspec.msgpack.encode(data))


def test_a_name_that_is_no_text_is_refused():
    place = ENCODED.index(b"n1.y")
    damaged = ENCODED[:place] + b"\xff" + ENCODED[place + 1 :]
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.decode(damaged)


def test_a_truncated_bundle_is_refused():
    for length in range(0, len(ENCODED), 97):
        with pytest.raises(BundleError):
            Bundle.decode(ENCODED[:length])


@FUZZ
@given(st.binary(max_size=300))
def test_any_bytes_are_a_bundle_error(data):
    assert not accepted(data)


@FUZZ
@given(st.data())
def test_any_piece_replaced_is_a_bundle_error_or_harmless(data):
    start = data.draw(st.integers(0, len(ENCODED)))
    stop = data.draw(st.integers(start, min(len(ENCODED), start + 40)))
    accepted(ENCODED[:start] + data.draw(st.binary(max_size=40)) + ENCODED[stop:])


def altered(**changes: object) -> bytes:
    made = bundle()
    manifest = msgspec.structs.replace(made.manifest, **changes)
    return Bundle(manifest, made.graphs, made.weights).encode()


def test_another_format_says_to_update():
    with pytest.raises(BundleError, match="format 2, this agent reads 1"):
        Bundle.decode(altered(format=2))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (WeightSpec("w", (4,), 1 << 40, trainable=False), "outside"),
        (WeightSpec("w", (1 << 62, 4), 0, trainable=False), "outside"),
        (WeightSpec("w", (1 << 32, 1 << 32), 0, trainable=False), "outside"),
        (WeightSpec("w", (-1,), 0, trainable=False), "negative"),
        (WeightSpec("w", (1,), -4, trainable=False), "negative"),
    ],
)
def test_a_weight_outside_the_buffer_is_refused(spec, words):
    with pytest.raises(BundleError, match=words):
        Bundle.decode(altered(weights=(spec,)))


def test_a_trainable_weight_lies_in_the_trainable_part():
    made = bundle().manifest
    last = max(made.weights, key=lambda spec: spec.offset)
    assert not last.trainable
    wrong = msgspec.structs.replace(last, trainable=True)
    with pytest.raises(BundleError, match="outside"):
        Bundle.decode(altered(weights=(wrong,)))


def test_weights_of_another_length_are_refused():
    with pytest.raises(BundleError, match="B of weights for"):
        Bundle.decode(altered(elements=bundle().manifest.elements + 1))


def test_graphs_and_manifest_name_the_same():
    made = bundle()
    graphs = {**made.graphs, "more": b"x"}
    with pytest.raises(BundleError, match="more"):
        Bundle.decode(Bundle(made.manifest, graphs, made.weights).encode())


SHAPES = st.dictionaries(
    st.text(min_size=1, max_size=3),
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    max_size=8,
)


@FUZZ
@given(SHAPES, st.data())
def test_layout(shapes, data):
    """Aligned, trainable first, no two overlap, nothing beyond the end."""
    trainable = frozenset(name for name in shapes if data.draw(st.booleans()))
    layout, trainable_elements, elements = lay_out(
        shapes, trainable, dict.fromkeys(shapes, 0)
    )
    assert {spec.name: spec.shape for spec in layout} == shapes
    end = 0
    for spec in layout:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= end
        end = spec.offset + spec.elements
        assert spec.trainable == (spec.name in trainable)
        limit = trainable_elements if spec.trainable else elements
        assert end <= limit
        assert spec.trainable or spec.offset >= trainable_elements
    flags = [spec.trainable for spec in layout]
    assert flags == sorted(flags, reverse=True)
    assert elements % ALIGNMENT == 0


def test_views_share_the_buffer_and_not_each_other():
    shapes = {"a": (2, 3), "b": (), "c": (5,)}
    layout, _, elements = lay_out(shapes, frozenset({"c"}), dict.fromkeys(shapes, 0))
    buffer = np.zeros(elements, np.float32)
    for number, spec in enumerate(layout, 1):
        view(buffer, spec)[...] = number
    for number, spec in enumerate(layout, 1):
        assert (view(buffer, spec) == number).all()
    assert np.count_nonzero(buffer) == sum(spec.elements for spec in layout)
