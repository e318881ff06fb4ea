"""Stand-ins around where prompts end: a request, what cuts it into chunks, and the passes of a layer over it."""

from types import SimpleNamespace
from typing import Any

import torch
from plain_rocketkv import DIM, GROUP, HEADS, MODEL, PAGE, SCALE, SMALL, rocketkv
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.attention import prompt_selection
from sglang_sparse.attention.counters import RectifyCounts
from sglang_sparse.config.settings import Settings
from sglang_sparse.methods.aux_buffers import AuxBuffers
from sglang_sparse.scheduler import prefill_chunks, prompt_windows, request_state


def request(prompt: int, generated: int = 0, cached: int = 0, known: Settings | None = None, **options: Any) -> Any:
    """A stand-in for SGLang's ``Req``; with ``known`` one that has run on such a server."""
    found = SimpleNamespace(
        origin_input_ids=[0] * prompt,
        full_untruncated_fill_ids=[0] * (prompt + generated),
        prefix_len=cached,
        host_hit_length=0,
        sampling_params=SimpleNamespace(custom_params=options or None),
        custom_logit_processor=None,
        multimodal_inputs=None,
    )
    if known is not None:
        request_state.ensure_state(known, RectifyCounts(), found)
    return found


def chunks(one: Any, budgets: list[int], memory: int, size: int) -> list[int]:
    """Return where a request's chunks end by SGLang's rules, if it has each pass's budget to itself.

    They end early where it has to wait for more.
    """

    def take(adder: Any, request: Any, *_: Any) -> int:
        start, total = request.prefix_len, len(request.full_untruncated_fill_ids)
        allowed = min(adder.rem_chunk_tokens, memory)
        return total if -(-(total - start) // size) * size <= allowed else start + allowed // size * size

    ends: list[int] = []
    for budget in budgets:
        adder = SimpleNamespace(
            rem_chunk_tokens=budget,
            running_batch=None,
            can_run_list=[],
            page_size=size,
            rem_total_tokens=memory,
            chunked_req_limit=None,
        )
        end = (
            prefill_chunks.add_chunk(take, adder, one)
            if ends
            else prefill_chunks.add_request(take, adder, one, False, None)
        )
        if end is AddReqResult.OTHER:
            return ends
        ends.append(end)
        one.prefix_len = end
        if end == len(one.full_untruncated_fill_ids):
            return ends
    return ends


class Pass:
    """A pass over rows, each ``(request, prefix, tokens, place in the request pool)``, of one sparse layer."""

    PLACES = 6

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.method = method = rocketkv(**SMALL)
        self.aux = AuxBuffers(method.aux_specs(MODEL), (0,), 200, PAGE, "cpu")
        table = (torch.randperm(199)[:120] + 1).view(self.PLACES, 20, 1) * PAGE + torch.arange(PAGE)
        self.keys = torch.randn(200 * PAGE, HEADS, DIM)
        pool = SimpleNamespace(get_key_buffer=lambda layer: self.keys)
        rows = table.flatten(1).int()
        runner: Any = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=rows), token_to_kv_pool=pool)
        runner.kv_index_translator = KVIndexTranslator(
            req_to_token=rows, token_to_kv_pool_allocator=None, token_to_kv_pool=pool, page_size=PAGE, device="cpu"
        )
        (path,) = prompt_selection.make_paths([method], self.aux, runner, MODEL)
        self.path, self.kept, self.runner = path, self.aux.require_kept(0), runner
        # What each place's request asks at each of its positions.
        self.queries = torch.randn(self.PLACES, 320, HEADS * GROUP * DIM)

    def begin(self, rows: list[tuple[Any, int, int, int]], mode: str = "extend", dense: bool = False) -> None:
        batch = SimpleNamespace(
            forward_mode=ForwardMode[mode.upper()],
            reqs=[row[0] for row in rows],
            prefix_lens=[row[1] for row in rows],
            extend_lens=[row[2] for row in rows],
            decoding_reqs=[row[0] for row in rows if row[2] == 1],
            dense_pass=dense,
        )
        places = torch.tensor([row[3] for row in rows])
        prompt_windows.begin(SimpleNamespace(keeps=(self.path,)), SimpleNamespace(req_pool_indices=places), batch)

    def run(self, rows: list[tuple[Any, int, int, int]], padding: int = 0, **kwargs: Any) -> None:
        """Begin the pass and run its layer; ``padding`` tokens follow, as in a graph."""
        self.begin(rows, **kwargs)
        queries = [self.queries[place, start : start + tokens] for _, start, tokens, place in rows]
        self.layer(torch.cat([*queries, torch.full((padding, HEADS * GROUP * DIM), float("nan"))]))

    def layer(self, query: torch.Tensor) -> None:
        names = {"layer_id": 0, "tp_q_head_num": HEADS * GROUP, "qk_head_dim": DIM, "scaling": SCALE}
        self.path.keep(query, SimpleNamespace(**names, k_scale_float=None))

    def window(self, place: int, prompt: int) -> torch.Tensor:
        """Queries of a prompt's window, ``[W, q_heads, dim]``."""
        return self.queries[place, prompt - self.method.window_tokens : prompt].unflatten(1, (-1, DIM))

    def keys_of(self, place: int, prompt: int) -> torch.Tensor:
        """Keys of a prompt, ``[tokens, kv_heads, dim]``."""
        return self.keys[self.runner.req_to_token_pool.req_to_token[place, :prompt].long()]

    def of(self, place: int) -> tuple[int, int, list[list[int]]]:
        count = int(self.kept.counts[place])
        return count, int(self.kept.first_visible[place]), self.kept.blocks[0][place, :, :count].tolist()
