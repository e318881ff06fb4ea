"""Triton's interpreter for the kernel tests, where there is no GPU.

Triton decides at import whether its functions are interpreted, so this is imported before any test is. The variable is
set for that moment and for the kernel tests alone: a server that another test starts must not inherit it.
"""

import importlib
import os
import sys

import torch

OPERATIONS = (
    "page_summary",
    "page_score",
    "page_topk",
    "page_table",
    "sparse_decode",
    "anchor_prefill",
    "skip_softmax_prefill",
    "block_mass",
    "block_topp",
    "sparse_mla_decode",
    "index_keys",
    "index_logits",
    "latent_rows",
    "kt_select",
    "window_score",
    "skip_softmax_decode",
    "skip_softmax_mla_decode",
)
HAS_GPU = torch.cuda.is_available()
INTERPRETED = not HAS_GPU and "triton" not in sys.modules

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    for operation in OPERATIONS:
        importlib.import_module(f"sglang_sparse_kernels.{operation}.triton")
    del os.environ["TRITON_INTERPRET"]
