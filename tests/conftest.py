"""Settings for the whole suite."""

import os

# Tiny models gain nothing from a second thread, and on a busy machine they wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
