"""SGLang's flags for its own DSA, one by one and combined: accepted or refused, and resolved, as without the method."""

from pathlib import Path

import pytest
import torch
from sglang.srt.plugins import load_plugins
from stock_flags import Case, Outcome, from_the_parser, outcomes

load_plugins()

from sglang_sparse.methods.support import KINDS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is pretended")

SECONDS = 240.0
V3_2 = KINDS["DSA"]
# As GLM-5: another RoPE of the indexer, whose selection layers share.
GLM = {
    **V3_2,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "indexer_rope_interleave": True,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}
# Flags with a value that SGLang accepts and the method refuses, and why.
OTHER_BACKEND = "SGLang would attend to everything and not say so: nothing of DSA would run"
REFUSED = {
    "attention_backend": OTHER_BACKEND,
    "decode_attention_backend": OTHER_BACKEND,
    "prefill_attention_backend": OTHER_BACKEND,
    "enable_deterministic_inference": OTHER_BACKEND,
    "rl_on_policy_target": OTHER_BACKEND,
}
# A local model, which no part of a resolution looks into.
DRAFT = Path(__file__).parents[2] / "eval" / "models" / "tiny-gqa"
DP = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
MTP = {"speculative_algorithm": "EAGLE"}
HICACHE = {"enable_hierarchical_cache": True}
PREFILL, DECODE = {"disaggregation_mode": "prefill"}, {"disaggregation_mode": "decode"}
DEPLOYED: list[dict[str, object]] = [
    DP,
    {**DP, **MTP},
    {**DP, **MTP, "speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2},
    {**DP, **HICACHE},
    {**HICACHE, "hicache_storage_backend": "file"},
    {**PREFILL, **DP},
    {**DECODE, **DP, **MTP},
    {**PREFILL, "pp_size": 2, "tp_size": 4},
    {"tp_size": 8, "kv_cache_dtype": "fp8_e4m3"},
    {"tp_size": 8, "dcp_size": 2},
    {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(DRAFT)},
    {"tp_size": 8, "attn_cp_size": 8, "enable_prefill_cp": True, "cp_strategy": "interleave"},
    {"enable_lora": True, "lora_paths": ["name=path"]},
    {"enable_return_indexer_topk": True, "enable_return_routed_experts": True},
    {"dtype": "float16"},
    {"dsa_prefill_backend": "tilelang", "dsa_decode_backend": "tilelang", "dsa_topk_backend": "torch"},
]
JUDGED: list[dict[str, object]] = [
    {"enable_hisparse": True},
    {**DP, "enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"},
    {"enable_hisparse": True, "disable_radix_cache": True},
    {"enable_hisparse": True, "disable_radix_cache": True, **DECODE},
    {**PREFILL, **DP, "enable_dsa_cache_layer_split": True},
    {"tp_size": 8, "dp_size": 3, "enable_dp_attention": True},
    {"tp_size": 3},
    {"speculative_algorithm": "NGRAM"},
    {"speculative_algorithm": "DFLASH"},
    {**MTP, "speculative_eagle_topk": 4, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8},
    {"dsa_decode_backend": "tilelang", "kv_cache_dtype": "fp8_e4m3"},
    {"page_size": 32},
    {"enable_kv_cache_sharding": True, "tp_size": 8},
]

COMBINED = [Case(model, fields) for model in (V3_2, GLM) for fields in (*DEPLOYED, *JUDGED)]
# What "auto" leaves to SGLang: flags that this project's selection does not serve, and GLM-5's indexer.
AUTO = {"sparse_method": "dsa"}
GIVES_WAY = [*(Case(V3_2, fields, AUTO) for fields in DEPLOYED[:8]), Case(GLM, {}, AUTO), Case(GLM, DP, AUTO)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, Outcome, Outcome]]:
    """All cases, those of single flags first, with what SGLang makes of each without the method and with it."""
    cases = [*(Case(V3_2, fields) for fields in from_the_parser()), *COMBINED, *GIVES_WAY]
    resolved = outcomes(cases, tmp_path_factory.mktemp("models"), SECONDS)
    return [(case, *both) for case, both in zip(cases, resolved, strict=True)]


def test_each_flag_of_sglang(found: list[tuple[Case, Outcome, Outcome]]) -> None:
    alone = [(case.fields, stock, ours) for case, stock, ours in found[: -len(COMBINED) - len(GIVES_WAY)]]
    different = [(fields, ours) for fields, stock, ours in alone if stock != ours]
    own = [fields for fields, ours in different if str(ours.refused).startswith("SparseArgumentError: ")]
    assert [fields for fields, _ in different] == own, different
    assert {name for fields in own for name in fields} == REFUSED.keys()
    refused = [fields for fields, stock, _ in alone if stock.refused]
    assert len(refused) > 50 and len(alone) - len(refused) > 500, "SGLang judged something else"


def test_deployments(found: list[tuple[Case, Outcome, Outcome]]) -> None:
    together = found[-len(COMBINED) - len(GIVES_WAY) : -len(GIVES_WAY)]
    assert [each for each in together if each[1] != each[2]] == []
    refused = [(case.fields, stock.refused) for case, stock, _ in together if stock.refused]
    assert refused and not [each for each in refused if each[0] in DEPLOYED], refused


def test_auto_gives_way(found: list[tuple[Case, Outcome, Outcome]]) -> None:
    given = found[-len(GIVES_WAY) :]
    assert [each for each in given if each[1] != each[2] or each[1].refused] == []
