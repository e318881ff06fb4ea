"""Tests of refusals of speculative decoding that no table has: who may draft, what may verify, and how many drafts."""

from pathlib import Path
from typing import Any

import pytest
from model_configs import write_config
from refusals import refused
from sglang.srt.plugins import load_plugins

load_plugins()

from resolved import ServerArgs

from sglang_sparse.config.arguments import CHAINS, DRAFTERS
from sglang_sparse.config.settings import settings_of
from sglang_sparse.tools import dry_run

DRAFTS = {"sparse_method": "resa", "speculative_algorithm": "SPARSE_SELF"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--attention-backend", "torch_native"], "cannot verify with torch_native"),
        (["--attention-backend", "triton", "--kv-cache-dtype", "fp8_e4m3"], "cannot verify with triton"),
        (["--attention-backend", "triton"], None),
        (["--attention-backend", "fa3", "--kv-cache-dtype", "fp8_e4m3"], None),
    ],
)
def test_backends_that_would_not_verify_are_refused(flags: list[str], reason: str | None) -> None:
    asked = ["--model-path", "MODEL", "--sparse-method", "resa", "--speculative-algorithm", "SPARSE_SELF", *flags]
    said = dry_run.refusal(asked, "MHA/GQA", (9, 0))
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize("algorithm", CHAINS)
def test_chains_of_sglangs_drafts_run_beside_resa(algorithm: str) -> None:
    """Other methods name those that verify."""
    asked = ["--model-path", "MODEL", "--speculative-algorithm", algorithm, "--attention-backend", "fa3"]
    resa = [*asked, "--sparse-method", "resa"]
    assert dry_run.refusal(resa, "MHA/GQA", (9, 0)) is None
    said = dry_run.refusal([*resa, "--speculative-num-draft-tokens", "17"], "MHA/GQA", (9, 0))
    assert said is not None and "--speculative-num-draft-tokens: got 17" in said and "page size of 16" in said
    one_page = '{"local_pages": 1, "min_pages": 4}'
    said = dry_run.refusal(
        [*resa, "--speculative-num-draft-tokens", "4", "--sparse-config", one_page], "MHA/GQA", (9, 0)
    )
    assert (
        said is not None and f"local_pages: got 1, allowed with --speculative-algorithm {algorithm}: at least 2" in said
    )
    said = dry_run.refusal([*asked, "--sparse-method", "rocketkv"], "MHA/GQA", (9, 0))
    assert said is not None and "one token a row" in said and "--sparse-method resa" in said


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"])
@pytest.mark.parametrize("method", [{"sparse_method": "resa"}, {"sparse_prefill_method": "anchor"}])
def test_algorithms_that_no_method_serves_are_refused_by_name(
    algorithm: str, method: dict[str, str], tmp_path: Path
) -> None:
    with refused("other speculative algorithms", algorithm) as caught:
        ServerArgs(model_path=write_config(tmp_path, "qwen3"), speculative_algorithm=algorithm, **method)
    assert all(name in str(caught.value) for name in DRAFTERS)


@pytest.mark.parametrize("algorithm", DRAFTERS)
@pytest.mark.parametrize("method", ["anchor", "skip_softmax"])
def test_algorithms_of_sglang_run_beside_a_prefill_method_alone(algorithm: str, method: str) -> None:
    asked = ["--model-path", "MODEL", "--sparse-prefill-method", method, "--speculative-algorithm", algorithm]
    assert dry_run.refusal([*asked, "--attention-backend", "fa3"], "MHA/GQA", (9, 0)) is None
    said = dry_run.refusal([*asked, "--attention-backend", "torch_native"], "MHA/GQA", (9, 0))
    assert said is not None and f"{algorithm} cannot verify with torch_native" in said
    said = dry_run.refusal([*asked, "--sparse-method", "rocketkv"], "MHA/GQA", (9, 0))
    assert said is not None and "--sparse-prefill-method without --sparse-method" in said


def test_a_model_with_a_penalty_of_its_own_is_refused(tmp_path: Path) -> None:
    """Else each request in OpenAI's form would be, that leaves the penalty out."""
    model = write_config(tmp_path, "qwen3")
    (Path(model) / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    with refused("--sampling-defaults", "model") as caught:
        ServerArgs(model_path=model, **DRAFTS)
    assert "sets 1.05" in str(caught.value) and "openai" in str(caught.value)
    assert settings_of(ServerArgs(model_path=model, **DRAFTS, sampling_defaults="openai")) is not None
    assert settings_of(ServerArgs(model_path=model, sparse_method="resa")) is not None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "needs --sparse-method"),
        ({"sparse_prefill_method": "anchor"}, "needs --sparse-method"),
        ({"sparse_method": "dsa", "page_size": 64}, "trained to attend sparsely"),
        ({"sparse_method": "rocketkv", "sparse_config": {"eviction": "compact"}}, "compaction frees KV"),
    ],
)
def test_what_cannot_draft_is_refused(asked: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, "own_sparse_attention" if asked.get("sparse_method") == "dsa" else "qwen3")
    with refused("--speculative-algorithm", "SPARSE_SELF") as caught:
        ServerArgs(model_path=model, speculative_algorithm="SPARSE_SELF", **asked)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 6), ({"speculative_num_steps": 1}, 1), ({"speculative_num_steps": 16}, 16)]
)
def test_numbers_of_drafts_are_completed(given: dict[str, Any], steps: int, tmp_path: Path) -> None:
    args = ServerArgs(model_path=write_config(tmp_path, "qwen3"), **DRAFTS, **given)
    found = args.speculative_num_steps, args.speculative_num_draft_tokens, args.speculative_eagle_topk
    assert found == (steps, steps + 1, 1)
    config = settings_of(args).config
    assert config.rectify_interval == 0, "a verification rectifies"
