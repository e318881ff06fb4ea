"""The legs of identity: servers that differ by a method which leaves nothing out."""

from pathlib import Path

import torch

from eval.lab.legs.leg import LEGS
from sglang_sparse.config.files import read_config
from sglang_sparse.config.settings import build
from sglang_sparse.methods.anchor import ALL_KEYS, Anchor


def _leaves_nothing_out(option: str, name: str, text: str) -> None:
    config = read_config(text)
    if option == "--sparse-prefill-method":
        prefill = build(None, {}, name, config).prefill
        assert prefill is not None and prefill.config.dense_fallback == "never" and prefill.config.layers == "all"
        if isinstance(prefill, Anchor):
            assert prefill.config.theta == ALL_KEYS
            return
        given = prefill.config.model_dump()["threshold_scale_factor"]
    else:
        assert option == "--sparse-method"
        settings = build(name, config)
        assert settings.config.dense_fallback == "never" and settings.method.sparse_layers(4) == (0, 1, 2, 3)
        if name != "skip_softmax":
            selected = settings.method.n_select(torch.tensor([500])).tolist()
            assert selected == [500] or (name == "rocketkv" and selected[0] >= 500)
            return
        given = settings.config.model_dump()["threshold_scale_factor"]
    # None at all would leave the rows dense.
    factors = given.values() if isinstance(given, dict) else [given]
    assert factors and all(0 < factor < 1e-20 for factor in factors)


def test_identities_are_of_servers_that_differ_by_the_method_alone() -> None:
    legs = [leg for leg in LEGS if leg.name.startswith("identity-")]
    for leg in legs:
        assert leg.server is not None
        ((command,)) = leg.commands
        dense, *noise = leg.beside
        assert all(dense.model == one.model == leg.server.model and one.flags != dense.flags for one in noise)
        urls = ["http://a", "http://b", "http://c"]
        given = dict(zip(*[iter(command.line(Path("results"), urls)[1:])] * 2, strict=True))
        assert [given["--base-url"], given["--compare-url"]] == urls[:2]
        # Stock SGLang reads scales of a file wrongly: there the dense server has methods, which it is asked not to use.
        scaled = "--quantization-param-path" in leg.server.flags
        assert given.get("--compare-custom-params") == ('{"sparse": false}' if scaled else None)
        if "--kv-cache-dtype" in leg.server.flags:
            # bfloat16's noise, of the same backend.
            assert given["--noise-from"] == f"results/{leg.name.removesuffix('-fp8')}.jsonl" and not noise
            (other,) = [one.server for one in legs if one.name == leg.name.removesuffix("-fp8")]
            assert other is not None and other.flags[:4] == leg.server.flags[:4]
        else:
            assert given["--noise-url"] == urls[2]
        flags = list(leg.server.flags)
        while flags[0].startswith("--sparse"):
            option, name, _, config = (flags.pop(0) for _ in range(4))
            _leaves_nothing_out(option, name, config)
        assert tuple(flags) == dense.flags[-len(flags) :]
        names = [part for part in dense.flags[: -len(flags)] if not part.startswith("--")]
        assert names == [*map(str, list(leg.server.flags[1 : -len(flags) : 4]))] if scaled else not names
    backends = {flag for leg in legs if leg.server for flag in leg.server.flags[4:]}
    assert {"flashmla", "flashinfer", "fa3", "triton"} <= backends
    # One over latents of each method that decodes them.
    latent = {leg.server.flags[1] for leg in legs if leg.server and leg.server.model.endswith("tiny-mla")}
    assert latent == {"robsa", "skip_softmax"}
