"""Settings for the whole suite."""

import os
import tempfile

# Tiny models gain nothing from a second thread, and on a busy machine they wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Stacks of tests leave the user's measured profiles alone, and start as on a new machine.
os.environ.setdefault(
    "MILLRACE_ENGINE__PROFILE_CACHE",
    os.path.join(tempfile.gettempdir(), f"millrace-test-profiles-{os.getpid()}"),
)
