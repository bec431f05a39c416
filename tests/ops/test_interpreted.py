"""Triton kernels without a GPU, in Triton's interpreter.

The interpreter is chosen before Triton is imported, so test files run again in other processes, several in each,
because a process takes seconds to start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

FILES = [
    [
        *("test_attend_coded.py", "test_attend_latents.py", "test_sample_tokens.py", "test_empty_inputs.py"),
        *("test_prefill_blocks.py", "test_expert_ops.py", "test_grouped_matmul.py", "test_pooled_scores.py"),
    ],
    [
        *("test_dense_attention.py", "test_rebuild_rows.py", "test_triton_attend_selected.py"),
        *("test_triton_ops.py", "test_triton_paged_attention.py", "test_triton_storing.py", "test_window_ops.py"),
        *("test_causal_convolution.py", "test_linear_attention.py", "test_gated_delta_rule.py", "test_ssd.py"),
    ],
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them")
@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_everything(files: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [str(Path(__file__).with_name(name)) for name in files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
