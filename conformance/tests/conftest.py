"""Threads of the tests that run side by side."""

import os

import torch

# Kernels' threads that wait for cores which other tests' threads hold make everything many times slower. The variable
# is for the processes that tests start.
_THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))
torch.set_num_threads(_THREADS)
