"""The legs of identity: servers that differ by a method which leaves nothing out."""

from pathlib import Path

import torch

from eval.parts.reproduce_legs import LEGS
from sglang_sparse.config import build, read_config
from sglang_sparse.methods.anchor import ALL_KEYS, Anchor


def test_identities_are_of_servers_that_differ_by_the_method_alone() -> None:
    legs = [leg for leg in LEGS if leg.name.startswith("identity-")]
    for leg in legs:
        assert leg.server is not None
        (dense, *noise), ((command,)) = leg.beside, leg.commands
        assert all(dense.model == one.model == leg.server.model and one.flags != dense.flags for one in noise)
        urls = ["http://a", "http://b", "http://c"]
        given = dict(zip(*[iter(command.line(Path("results"), urls)[1:])] * 2, strict=True))
        assert [given["--base-url"], given["--compare-url"]] == urls[:2]
        if "--kv-cache-dtype" in leg.server.flags:
            # bfloat16's noise, of the same backend.
            assert given["--noise-from"] == f"results/{leg.name.removesuffix('-fp8')}.jsonl" and not noise
            (other,) = [one.server for one in legs if one.name == leg.name.removesuffix("-fp8")]
            assert other is not None and other.flags[:4] == leg.server.flags[:4]
        else:
            assert given["--noise-url"] == urls[2]
        option, name, _, config, *flags = leg.server.flags
        assert tuple(flags) == dense.flags
        if option == "--sparse-prefill-method":
            prefill = build(None, {}, name, read_config(config)).prefill
            assert isinstance(prefill, Anchor) and prefill.config.dense_fallback == "never"
            assert prefill.config.layers == "all" and prefill.config.theta == ALL_KEYS
            continue
        assert option == "--sparse-method"
        settings = build(name, read_config(config))
        assert settings.config.dense_fallback == "never" and settings.method.sparse_layers(4) == (0, 1, 2, 3)
        if name == "skip_softmax":
            # None at all would leave the rows dense.
            factors = settings.config.model_dump()["threshold_scale_factor"].values()
            assert factors and all(0 < factor < 1e-20 for factor in factors)
        else:
            selected = settings.method.n_select(torch.tensor([500])).tolist()
            assert selected == [500] or (name == "rocketkv" and selected[0] >= 500)
    backends = {flag for leg in legs if leg.server for flag in leg.server.flags[4:]}
    assert {"flashmla", "flashinfer", "fa3", "triton"} <= backends
    # One over latents of each method that decodes them.
    latent = {leg.server.flags[1] for leg in legs if leg.server and leg.server.model.endswith("tiny-mla")}
    assert latent == {"robsa", "skip_softmax"}
