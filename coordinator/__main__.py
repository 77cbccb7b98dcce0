"""What `edgetrain` and `python -m coordinator` start."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

NEEDED: Final = ("typer", "rich", "onnx", "onnxscript", "tomli_w", "cryptography")


def main() -> int:
    """Run the command line, or say what is missing where only an agent is installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"edgetrain: error: {', '.join(missing)} not installed. The coordinator needs"
            " more than a device: pip install 'edgetrain[coordinator]'\n"
        )
        return 2
    from coordinator.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
