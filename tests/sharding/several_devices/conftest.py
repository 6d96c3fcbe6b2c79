"""These tests need several devices, which JAX makes of the CPU when it starts: `test_several_devices.py` runs them."""

import os

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") else ["test_*.py"]
