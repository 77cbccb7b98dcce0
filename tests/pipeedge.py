"""PipeEdge's published profiles of two boards, as planning problems and profile files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

MINNOW = "Minnowboard-E3845"
RCC = "RCC-VE-C2000"
BASE = "vit-base"
LARGE = "vit-large"
ELEMENT_BYTES = 4


@cache
def published():
    path = Path(__file__).parent / "data" / "pipeedge_profiles.json"
    return json.loads(path.read_text())


def profile(model, *boards, link_bytes_per_s=None):
    """A profile file's content; boards are (name, how many, how much slower)."""
    data = published()
    facts = data["models"][model]
    batch = data["batch_size"]
    return {
        "batch_size": batch,
        "layers": [
            {"memory_bytes": memory, "output_bytes": elements * batch * ELEMENT_BYTES}
            for memory, elements in zip(
                facts["memory_bytes"], facts["output_elements"], strict=True
            )
        ],
        "devices": [
            {
                "name": name if slower == 1 else f"{name}-slow",
                "count": count,
                "forward_s": [
                    slower * t for t in data["devices"][name]["forward_s"][model]
                ],
                "memory_bytes": data["devices"][name]["memory_bytes"],
                "link_bytes_per_s": link_bytes_per_s
                or data["devices"][name]["link_bytes_per_s"],
            }
            for name, count, slower in boards
        ],
    }
