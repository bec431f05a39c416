"""What kernels can be tested with here: a GPU, or a CPU, where Triton may run in its interpreter."""

import os

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_RUNS = ON_GPU or INTERPRETED
