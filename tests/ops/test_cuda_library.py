"""The CUDA operators load and register without a GPU, and without a torch that has CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.ops._load import CUDA_LIBRARY

OPS = (
    *("verify", "verify_deferred", "commit", "prefill", "verify_layer", "verify_layer_deferred"),
    *("conv_verify", "conv_verify_deferred", "conv_commit"),
)
# The one function of libtorch_cuda that the library needs.
STREAM = "int aoti_torch_get_current_cuda_stream(int device, void** stream) { return *stream = 0, 0; }"
REGISTERED = """
import sys, torch, specdec.ops
if torch.version.cuda is None:
    torch.ops.load_library(sys.argv[1])
for op in sys.argv[2:]:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{op}", "CUDA"), op
"""


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="the CUDA operators are not built: run `make cuda`")
def test_registration(tmp_path: Path) -> None:
    env = dict(os.environ)
    if torch.version.cuda is None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        stand_in = tmp_path / "stream.so"
        code = tmp_path / "stream.c"
        code.write_text(STREAM)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(stand_in), str(code)], check=True)
        env["LD_PRELOAD"] = str(stand_in)
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED, str(CUDA_LIBRARY), *OPS], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
