"""``python -m eval.identity``: a sparse server that leaves nothing out must equal a dense one.

Its decode method's budget covers the context (``active_ratio: 1``), its prefill method's threshold keeps every key
(``"theta": 1e9, "dense_tail": 0``), and ``dense_fallback: never`` keeps both from running dense. The counters must say
that they ran sparse and left nothing out: every row of every sparse layer in decode, and in prefill every prompt token
that was not cached, behind those for which the method has all keys in any case.

Or it decodes losslessly (``--speculative-algorithm SPARSE_SELF``), at any budget, and the counters say that some of its
drafts were right and some were not; ``"crossover_tokens": 0, "min_seq_len": 0`` has it draft for every prompt.

Passed is: greedy text equal at concurrency 1, mean KL(dense, sparse) below .003. A different token is
excused only where the dense server's two best tokens lie closer than the noise. That is measured: the largest change
of their distance between two dense servers with different kernels (``--noise-url``); without one nothing is excused.
What two kernels make of float8 KV differs far more, and excuses nothing: there the noise is that of bfloat16, as
another run's file has it (``--noise-from``). A stock server reads the scales of ``--quantization-param-path`` wrongly.
The dense server may be one with methods, too, asked for ``--compare-custom-params '{"sparse": false}'``, whose counters
must say that it ran dense; so it must not have ``dense_fallback: never``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx

from eval.live.client import FAILURES, LiveServer, generate, positive
from eval.live.counters import EvaluationError, moved, require_dense
from eval.live.record import Record, read_finished
from eval.scores.stats import TOP, gap_change, is_same, kl
from eval.texts.text import FORMS, Haystack, hide, prompt_text, random_key, random_number, read_books

FLOAT8 = "fp8"
DENSE = """--compare-custom-params '{"sparse": false}'"""
LENGTHS = (100, 300, 1000, 3000, 8000)


def make_prompts(count: int, seed: int) -> list[str]:
    """Needle questions about stretches of the shipped book, the lengths of ``LENGTHS`` in turn (rough tokens)."""
    rng = random.Random(seed)
    (book,) = read_books(Path(__file__).parent / "data").values()
    haystack, form, prompts = Haystack(book), FORMS["needle"], []
    for i in range(count):
        key, drawn = random_key(rng), haystack.draw(rng, LENGTHS[i % len(LENGTHS)])
        text = hide(drawn, [form.record(key, value=random_number(rng))], [rng.random()])
        prompts.append(prompt_text(form, text, form.question(key)))
    return prompts


def request_of(text: str, tokens: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Greedy decode with the ``TOP`` best log-probabilities of every output position; `params` are custom ones."""
    sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    sampling |= {"custom_params": params} if params else {}
    return {"text": text, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": TOP}


def compare(dense: dict[str, Any], sparse: dict[str, Any]) -> dict[str, Any]:
    """Compare two answers up to and including the first position where they differ."""
    ids = dense["output_ids"], sparse["output_ids"]
    differing = [i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b]
    compared = differing[0] + 1 if differing else len(ids[0])
    top = dense["meta_info"]["output_top_logprobs"], sparse["meta_info"]["output_top_logprobs"]
    row: dict[str, Any] = {
        "prompt_tokens": dense["meta_info"]["prompt_tokens"],
        "cached_tokens": sparse["meta_info"]["cached_tokens"],
        "equal": not differing,
        "kl": [kl(top[0][i], top[1][i]) for i in range(compared)],
        "gap_change": max(gap_change(top[0][i], top[1][i]) for i in range(compared)),
    }
    if differing:
        best, second = top[0][differing[0]][:2]
        row["first_difference"] = differing[0]
        row["dense_gap"] = best[0] - second[0]
    return row


def noise_of(path: Path) -> float:
    """The noise in nats of a complete run of this command with bfloat16 KV; other files are refused."""
    header, *rows = read_finished(path)
    if header.get("command") != "eval.identity" or not rows[-1].get("noise"):
        raise EvaluationError(f"{path} has no noise: allowed is a file of eval.identity with --noise-url")
    if header["servers"]["dense"]["kv_cache_dtype"].startswith(FLOAT8):
        raise EvaluationError(f"{path} has the noise of float8 KV: allowed is a run with bfloat16")
    return rows[-1]["noise"]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the servers, write the file, and return the summary."""
    noise = noise_of(args.noise_from) if args.noise_from else 0.0
    with contextlib.ExitStack() as stack:
        urls = args.base_url, args.compare_url, args.noise_url or args.compare_url
        sparse, dense, other = servers = [stack.enter_context(LiveServer(url, timeout=600)) for url in urls]
        facts = dict(zip(("sparse", "dense", "noise"), [server.facts() for server in servers], strict=True))
        before = facts["sparse"]["sparse"]
        if before is None:
            raise EvaluationError(f"{args.base_url} does not run a sparse method")
        params = args.compare_custom_params
        given = {"compare_custom_params": params}
        record = stack.enter_context(Record(args.out, "eval.identity", args.revision, servers=facts, arguments=given))
        texts = make_prompts(args.prompts, args.seed)
        plain = [request_of(text, args.tokens) for text in texts]
        answers = dense.each(generate, [request_of(text, args.tokens, params) for text in texts], "dense")
        if args.noise_url:
            others = other.each(generate, plain, "noise")
            noise = max(compare(*pair)["gap_change"] for pair in zip(answers, others, strict=True))
        if facts["dense"]["sparse"] is not None:
            require_dense_kernels(moved(facts["dense"]["sparse"], dense.facts()["sparse"]))

        async def work(client: httpx.AsyncClient, asked: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
            row = compare(asked[1], await generate(client, asked[0]))
            record.add("prompt", **row)
            return row

        rows = sparse.each(work, list(zip(plain, answers, strict=True)), "sparse")
        summary = summarise(rows, before, sparse.facts()["sparse"], noise)
        record.add("summary", prompts=args.prompts, tokens=args.tokens, noise=noise, **summary)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="eval.identity", description=__doc__)
    parser.add_argument("--base-url", required=True, help="the sparse server, see above")
    parser.add_argument("--compare-url", required=True, help="the dense server")
    parser.add_argument("--compare-custom-params", type=json.loads, metavar="JSON", help="of requests to that one")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--prompts", type=positive, default=100)
    parser.add_argument("--tokens", type=positive, default=64)
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument("--noise-url", help="a second dense server, with another attention backend")
    noise.add_argument("--noise-from", type=Path, metavar="FILE", help="another run's file, which measured the noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--revision", help="of this code, where its git history is not at hand")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; exit status 0 when the gate holds."""
    args = parse(arguments)
    try:
        summary = run(args)
    except FAILURES as error:
        print(f"eval.identity: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0 if summary["passed"] else 1


def require_dense_kernels(counts: dict[str, int]) -> None:
    """Refuse counts of dense answers that sparse kernels had a part in, though these left nothing out."""
    if rows := counts["sparse_layer_rows"]:
        raise EvaluationError(
            f"the dense answers were not dense: { {'sparse_layer_rows': rows} }; allowed: a server without methods, or "
            f"{DENSE} with one whose dense_fallback is not never"
        )
    require_dense("the dense answers", counts)


def sparse_tokens(row: dict[str, Any], config: dict[str, Any]) -> int:
    """Tokens of a prompt that are to be prefilled sparse, by the prefill method's config as the server says it."""
    first = max(row["cached_tokens"], config["crossover_tokens"])
    return max(0, row["prompt_tokens"] - config["dense_tail"] - first)


def summarise(
    rows: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any], noise: float
) -> dict[str, Any]:
    """Judge the gate; without counters that prove that the sparse paths ran, the result is void.

    Args:
        rows: of `compare`, one a prompt.
        before: what the sparse server said of its methods at first, see `LiveServer.sparse_state`.
        after: the same at the end.
        noise: largest difference of two best log-probabilities that excuses another token.
    """
    divergences = [value for row in rows for value in row["kl"]]
    unequal = [row for row in rows if not row["equal"]]
    counts = moved(before, after)
    proofs = []
    if counts.get("drafted_tokens"):
        proofs.append(0 < counts["accepted_tokens"] < counts["drafted_tokens"])
    elif after["method"] is not None:
        wanted = counts["decode_rows"] * after["sparse_layers"]
        proofs.append(counts["sparse_layer_rows"] == wanted > 0 and counts["dense_fallback_rows"] == 0)
    if after.get("prefill"):
        proofs.append(counts["prefill_pairs_attended"] == counts["prefill_pairs_causal"])
        wanted = sum(sparse_tokens(row, after["prefill"]["config"]) for row in rows)
        proofs.append(counts["prefill_sparse_tokens"] == wanted > 0)
    proven = bool(proofs) and all(proofs)
    mean_kl = sum(divergences) / len(divergences)
    return {
        "equal": len(rows) - len(unequal),
        "mean_kl": mean_kl,
        "max_kl": max(divergences),
        **counts,
        "sparse_path_proven": proven,
        "passed": proven and is_same(mean_kl, [row["dense_gap"] for row in unequal], noise),
    }


if __name__ == "__main__":
    sys.exit(main())
