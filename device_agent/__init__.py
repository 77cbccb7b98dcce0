"""The device agent: runs one or more stages on a device."""

import os

# Before numpy is loaded: the threads of its matrix products would only spin beside the
# engine's, which are what a device is told to use.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
