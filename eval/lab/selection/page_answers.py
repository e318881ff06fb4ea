"""Measure a checkpoint's answers with decode over the pages of one statistic or another, without a server or a GPU.

    python -m eval.lab.selection.page_answers --model-path Qwen/Qwen2.5-Coder-0.5B-Instruct --out FILE.jsonl

The questions are those of `eval.niah`. A prompt runs through the checkpoint with dense attention, which gives the first
token of the answer, as on a server; then, at every step, in every layer and for every KV head, a statistic of
`page_statistics` chooses as many pages as ReSA would, and the step attends to these. The KV that a step writes stays as
it is, as on a server that rectifies later.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, DynamicCache

from eval.lab.selection.captured_attention import load_model
from eval.lab.selection.page_statistics import LEAST, PAGE, STATISTICS, TRUE
from eval.live.client import list_of, percent, positive
from eval.live.counters import EvaluationError
from eval.live.record import Record
from eval.live.tokens import tokens
from eval.niah import TASKS, NeedleSuite
from eval.texts.lengths import length as parse_length
from sglang_sparse.methods.fingerprint import fingerprint

COMMAND = "eval.lab.selection.page_answers"
DENSE = "dense"
NEWEST = 2


class Chooser:
    """The attention of a model whose steps of one token attend to chosen pages.

    Attributes:
        statistic: that chooses; `DENSE` for all pages.
        ratio: share of the pages.
        kept: of each step and layer, the share of the attention mass on what was chosen.
    """

    def __init__(self, ratio: float) -> None:
        self.statistic, self.ratio, self.kept = DENSE, ratio, list[float]()

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: ``[1, heads, tokens, d]`` of queries, keys and values."""
        many, mask = query.shape[2] > 1, None
        if not many and self.statistic != DENSE:
            mask = self._chosen(query[0, :, 0], key[0].transpose(0, 1), scaling)
            mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 0)[None, :, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(query, key, value, attn_mask=mask, is_causal=many, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def _chosen(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Choose the tokens that a step attends to, ``[kv_heads, tokens]`` bool; ``query`` is ``[q_heads, d]``."""
        held, heads = key.shape[:2]
        whole, count = held // PAGE, -(-held // PAGE)
        products = torch.einsum("hgd,thd->hgt", query.unflatten(0, (heads, -1)) * scale, key)
        mass = products.softmax(-1).mean(1)
        if self.statistic == TRUE:
            scores = mass[:, : whole * PAGE].unflatten(1, (whole, PAGE)).sum(-1)
        else:
            pages = key[: whole * PAGE].unflatten(0, (whole, PAGE))
            scores = STATISTICS[self.statistic][1](pages, query[None], scale)[0]
        scores = torch.nn.functional.pad(scores, (0, count - whole))
        scores[:, count - NEWEST :] = torch.inf
        wanted = min(count, max(LEAST, math.ceil(self.ratio * count - 1e-9)))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(wanted).indices, True)
        mask = chosen.repeat_interleave(PAGE, 1)[:, :held]
        self.kept.append(float((mass * mask).sum(1).mean()))
        return mask


def answer(model: Any, cache: DynamicCache, first: int, ends: set[int], room: int) -> list[int]:
    """The greedy answer that begins with a token, behind the prompt in the cache, which is left as it was."""
    before, written = cache.get_seq_length(), [first]
    while len(written) < room and written[-1] not in ends:
        logits = model(torch.tensor([written[-1:]]), past_key_values=cache, use_cache=True).logits
        written.append(int(logits[0, -1].argmax()))
    if len(written) > 1:
        cache.crop(before - cache.get_seq_length())
    return [token for token in written if token not in ends]


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean score of each statistic, and what its pages held of the attention."""
    items = [row for row in rows if row["kind"] == "item"]
    found = []
    for name in dict.fromkeys(row["statistic"] for row in items):
        mine = [row for row in items if row["statistic"] == name]
        kept = None if name == DENSE else round(fmean(row["mass"] for row in mine), 4)
        found.append({"statistic": name, "n": len(mine), "score": fmean(row["score"] for row in mine), "mass": kept})
    return found


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask everything and write the file.

    Raises:
        EvaluationError: the checkpoint cannot be loaded, or see `NeedleSuite.cases`.
    """
    tokenizer, chooser = tokens(args.model_path), Chooser(args.ratio)
    suite = NeedleSuite(argparse.Namespace(**vars(args), book=[], haystack="books", form="chat"), tokenizer)
    cases = suite.cases()
    model = load_model(args.model_path, "cpu", torch.float32)
    AttentionInterface.register("chosen_pages", chooser.attend)
    model.set_attn_implementation("chosen_pages")
    end = model.generation_config.eos_token_id
    ends = {*(end if isinstance(end, list) else [end])}
    arguments = {
        name: getattr(args, name) for name in ("tasks", "lengths", "n", "depths", "ratio", "statistics", "seed")
    }
    facts = {"name": args.name or args.model_path, "weights": fingerprint(args.model_path)}
    with Record(args.out, COMMAND, args.revision, resume=True, arguments=arguments, model=facts) as record:
        rows = list(record.earlier)
        done = {(row["id"], row["statistic"]) for row in rows if row["kind"] == "item"}
        for case in tqdm(cases, desc=COMMAND):
            wanted = [name for name in args.statistics if (case.id, name) not in done]
            if not wanted:
                continue
            prompt, cache = suite.build(case), DynamicCache()
            with torch.inference_mode():
                given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
                first = int(model(torch.tensor([prompt.tokens]), **given).logits[0, -1].argmax())
                for name in wanted:
                    chooser.statistic, chooser.kept = name, []
                    output = tokenizer.decode(answer(model, cache, first, ends, prompt.max_new_tokens))
                    chooser.statistic, kept = DENSE, chooser.kept
                    row: dict[str, Any] = {
                        "id": case.id,
                        "statistic": name,
                        "output": output,
                        "answers": prompt.answers,
                    }
                    row |= {"score": suite.score(case, prompt, output)["score"], "mass": fmean(kept) if kept else None}
                    rows.append({"kind": "item", **row})
                    record.add("item", **row)
        summary = summarise(rows)
        for row in summary:
            record.add("summary", **row)
    return summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        EvaluationError: names the argument, what it was and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [DENSE, TRUE, *STATISTICS]
    parser.add_argument("--model-path", required=True, help="folder or name of a checkpoint that transformers loads")
    parser.add_argument("--tasks", type=list_of(str, TASKS), default=["multikey_hard"], help=f"of {', '.join(TASKS)}")
    lengths, depths = list_of(parse_length, some=True), list_of(percent, some=True)
    parser.add_argument("--lengths", type=lengths, default=[8192], help="tokens of prompt and answer")
    parser.add_argument("--n", type=positive, default=2, help="questions of each task, length and depth")
    parser.add_argument("--depths", type=depths, default=[0, 25, 50, 75, 100], help="in percent")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of the pages")
    parser.add_argument("--statistics", action="append", help=f"repeatable, of {'; '.join(known)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; a run that was interrupted goes on")
    parser.add_argument("--name", help="of the model, for the file's header; the folder's or the hub's by default")
    parser.add_argument("--revision", help="of this code, outside of a git checkout")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    args = parser.parse_args(arguments)
    args.answer_tokens, args.statistics = None, args.statistics or known
    if unknown := [name for name in args.statistics if name not in known]:
        raise EvaluationError(f"--statistics {unknown[0]}: allowed are {'; '.join(known)}")
    if not 0 < args.ratio < 1:
        raise EvaluationError(f"--ratio {args.ratio}: allowed are numbers between 0 and 1")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 1 when its figures would not show what they say."""
    try:
        summary = run(parse(arguments))
    except (EvaluationError, ValueError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    print(pd.DataFrame(summary).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
