"""An agent that ends when its standard input does, so it never outlives its fleet.

`python -m edgetrain.sim.agent_process run ...` takes what `edgetrain-agent` takes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from device_agent.cli import main


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main())
