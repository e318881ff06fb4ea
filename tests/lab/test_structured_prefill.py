"""Tests of the parts of a model that a skipped prefill leaves out; for the rest see test_structured_server.py."""

from types import SimpleNamespace
from typing import Any

import torch

from eval.lab.structured.prefill import skip, write_alone


class Doubles(torch.nn.Module):
    """An MLP, told what batch it gets or not."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return 2 * x


class Layer(torch.nn.Module):
    """A decoder layer, as far as it has an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Doubles()

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return self.mlp(x, *others, **named)


def test_mlps_that_know_of_prefill_are_left_out_of_it() -> None:
    layer, backend = Layer(), SimpleNamespace(token_to_kv_pool=object())
    skip(backend, torch.nn.Sequential(layer))
    assert backend.forward_extend.func is write_alone
    x = torch.ones(3)
    prefill, decode = (SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda e=e: e)) for e in (True, False))
    assert torch.equal(layer(x, prefill, None), x) and torch.equal(layer(x, forward_batch=prefill), x)
    assert torch.equal(layer(x, decode, None), 2 * x) and torch.equal(layer(x), 2 * x)
