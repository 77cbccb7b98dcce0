"""What a stage sends, in the codecs of its two cuts; with what they left out last time."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from edgetrain.codec_spec import ADAPTIVE, CodecSpec, CutCodecs
from edgetrain.manifest import Manifest
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec import decode, encode
from edgetrain.wire.codec_adaptive import AdaptiveRate
from edgetrain.wire.dither import Dither
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.frame import Address, Kind
from edgetrain.wire.messages import Deploy

Array = npt.NDArray[Any]


class Packer:
    """Encodes what crosses a stage's cuts to another device.

    Codecs that send but a share of the entries leave a residual of each tensor of
    cotangents: it is added to that tensor's next microbatch. Activations have none: what
    is missing of one sample is nothing to the next. Evaluation travels without loss, as
    what it is about is the model that the user gets, which has no codecs.

    Args:
        deploy: says which codec each cut has, and the seed of what is random.
    """

    def __init__(self, deploy: Deploy) -> None:
        self._deploy = deploy
        self._residuals: dict[int, Array] = {}
        self._rate = AdaptiveRate(deploy.target_step_s)

    @property
    def nbytes(self) -> int:
        """Of all residuals."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def observe(self, step_s: float) -> None:
        """A step took so long, which ``adaptive`` heeds."""
        self._rate.observe(step_s)

    def pack(self, address: Address, array: Array) -> Array | Encoded:
        """What to send in place of a tensor; the tensor itself is left as it is."""
        codec = self._codec(address)
        dither = Dither(self._deploy.seed, address)
        if not codec.feedback or address.kind is not Kind.COTANGENT:
            return encode(codec, array, dither)
        slot = address.tensor
        if slot in self._residuals:
            array = array + self._residuals[slot]
        body = encode(codec, array, dither)
        if isinstance(body, Encoded):
            spec = TensorSpec("", array.dtype.name, array.shape)
            self._residuals[slot] = array - decode(body.codec, body.body.data, spec)
        return body

    def _codec(self, address: Address) -> CodecSpec:
        deploy = self._deploy
        down = address.kind is Kind.ACTIVATION
        cut = address.stage - 1 if down else address.stage
        neighbour, own = deploy.route.to(address.stage), deploy.route.to(deploy.stage)
        if cut >= len(deploy.codecs) or neighbour == own:
            return CodecSpec()
        codecs = deploy.codecs[cut]
        codec = codecs.activations if down else codecs.cotangents
        if address.evaluation and not codec.lossless:
            return CodecSpec()
        return self._rate.codec if codec.name == ADAPTIVE else codec


def residual_bytes(manifest: Manifest, codecs: tuple[CutCodecs, ...]) -> int:
    """Of all that a stage's codecs keep from one microbatch to the next."""
    stage = manifest.stage
    if not 0 < stage <= len(codecs) or not codecs[stage - 1].feedback:
        return 0
    out = set(manifest.cotangents_out)
    return sum(spec.nbytes for spec in manifest.receives if spec.name in out)
