"""How each real model is fed when it is tried: batch, open shapes, fixed inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trial import Setting

_LIGHT: Final = Setting(batch=1, fresh=True)
_MOS: Final = Setting(batch=1, shapes={"input": (3, 64, 160)}, fixed={"h0": 0})
_SILERO: Final = Setting(shapes={"input": (512,)}, fixed={"sr": 16000, "state": 0})
_TEXT: Final = (16,)

# Files that are not here are fed two samples in the shapes they fix.
SETTINGS: Final[Mapping[str, Setting]] = {
    "light_bvlc_alexnet": _LIGHT,
    "light_densenet121": _LIGHT,
    "light_inception_v1": _LIGHT,
    "light_inception_v2": _LIGHT,
    "light_resnet50": _LIGHT,
    "light_shufflenet": _LIGHT,
    "light_squeezenet": _LIGHT,
    "light_vgg19": _LIGHT,
    "light_zfnet512": _LIGHT,
    "text_direction": Setting(shapes={"x": (3, 48, 192)}),
    "text_detection": Setting(shapes={"x": (3, 96, 96)}),
    "text_recognition": Setting(shapes={"x": (3, 48, 160)}),
    "livekit_melspectrogram": Setting(shapes={"input": (5120,)}),
    "oww_hey_jarvis": Setting(batch=1),
    "oww_silero_vad": Setting(
        shapes={"input": (512,)}, fixed={"sr": 16000, "h": 0, "c": 0}
    ),
    "silero_vad": _SILERO,
    "silero_vad_16k_op15": _SILERO,
    "silero_vad_16k_sequence": Setting(fixed={"h": 0, "c": 0}),
    "silero_vad_half": Setting(shapes={"input": (512,)}, fixed={"state": 0}),
    "silero_vad_op18_ifless": _SILERO,
    "silero_vad_openvino_16k": Setting(batch=1, fixed={"state": 0}),
    "aecmos_1": _MOS,
    "aecmos_2": _MOS,
    "aecmos_3": _MOS,
    "dnsmos_bak_ovr": Setting(batch=1),
    "dnsmos_model_v8": Setting(batch=1),
    "dnsmos_sig": Setting(batch=1),
    "dnsmos_sig_bak_ovr": Setting(batch=1),
    "open_nsfw": Setting(batch=1),
    "plcmos": Setting(shapes={"degraded_audio": (1, 64, 257)}),
    "nudenet_320n": Setting(shapes={"images": (3, 160, 160)}),
    "ddddocr_common": Setting(batch=1, shapes={"input1": (1, 64, 96)}),
    "ddddocr_common_det": Setting(batch=1),
    "ddddocr_common_old": Setting(batch=1, shapes={"input1": (1, 64, 96)}),
    "minilm_int8": Setting(
        shapes={"input_ids": _TEXT, "attention_mask": _TEXT, "token_type_ids": _TEXT}
    ),
}
