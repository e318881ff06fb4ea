"""Whether two implementations of DSA agree: what is compared, and that what differs is seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dsa_passes import LAYERS, PAGE, PASSES, TOPK, Model, Rows, runner

from eval.lab import agree_dsa
from eval.lab.agree_dsa import SIZES, parse, require_gpu
from eval.lab.agreement import dsa_checkpoint
from eval.lab.agreement.agreement import COMMAND, NATIVE, OWN, PORTABLE, required, summarise
from eval.lab.agreement.dsa_servers import make_asked, server_flags, watched
from eval.lab.agreement.dsa_sets import compare, joined, positions_of, same_replays
from eval.lab.agreement.server import dsa_watch
from eval.lab.agreement.server.dsa_watch import Watch
from eval.lab.tables import files
from eval.live.client import EvaluationError
from eval.live.record import Record, read_rows
from sglang_sparse.methods.dsa.decode import STAGES

TINY = {**SIZES, "vocab_size": 300, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
TINY |= {"q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "index_n_heads": 4, "index_topk": 16}
TINY |= {"num_hidden_layers": 2}
LEAVES_OUT = [name for name, given in PASSES.items() if max(given["lengths"]) > TOPK]


def row(*positions: int) -> torch.Tensor:
    return torch.tensor([positions], dtype=torch.int32)


def test_sets_are_compared_whatever_their_order() -> None:
    logits = torch.tensor([[8.0, 2.0, 4.0, 2.001, 9.0, torch.nan]])
    lengths = torch.tensor([5])
    same = compare(row(4, 0, 2), row(0, 2, 4), logits, lengths)
    assert (same.overlap.item(), same.gap.item(), same.differing.item()) == (1, 0, 0)
    # The last of the others is at 2; one has in its place what is a thousandth of that away.
    found = compare(row(4, 0, 3, -1), row(0, 1, 4, -1), logits, lengths)
    assert found.overlap.item() == pytest.approx(2 / 3) and found.differing.item() == 2
    assert found.gap.item() == pytest.approx(5e-4, rel=1e-3)
    figures = joined([same, found]).figures()
    assert figures["queries"] == 2 and figures["below"] == 1 and figures["overlap"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("given", "reason"),
    [((0, 0, 2), "twice"), ((0, 2, 5), "do not see"), ((0, 2, -1), "more tokens")],
)
def test_what_is_no_selection_is_refused(given: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compare(row(*given), row(0, 2, 4), torch.zeros(1, 6), torch.tensor([5]))


def test_slots_are_found_again_in_their_rows() -> None:
    # Behind its one page the first row has what another one held.
    table = torch.tensor([[3, 1, 1 << 30], [1, 2, 0]], dtype=torch.int32)
    slots = torch.tensor([[3 * 4 + 1, -1], [2 * 4 + 3, 1 * 4]], dtype=torch.int32)
    rows, lengths = torch.tensor([0, 1]), torch.tensor([3, 8])
    assert positions_of(slots, table, rows, lengths, 4, 4).tolist() == [[1, -1], [7, 0]]
    for wrong in (2 * 4, 1 << 20):
        with pytest.raises(ValueError, match="not its request's"):
            positions_of(torch.tensor([[wrong], [4]], dtype=torch.int32), table, rows, lengths, 4, 4)


def test_replays_that_choose_others_or_nothing_are_counted() -> None:
    chosen, calls = torch.zeros(2, 3, dtype=torch.int32), []

    def again() -> None:
        calls.append(len(calls))
        if calls[-1] != 3:
            chosen.fill_(7 if calls[-1] == 1 else 5)

    assert same_replays(again, chosen, 5) == 3


class Steady(Model):
    """One that makes the same of the same hidden states, as both indexers are asked."""

    made: Any = None

    def _get_q_k_bf16(self, q_lora: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        if self.made is None or self.made[0] is not x:
            self.made = (x, super()._get_q_k_bf16(q_lora, x, *rest))
        return self.made[1]


def watching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], change: Any = None) -> list[Any]:
    """The lines that a server writes for a pass of all layers, whose own selections are changed on their way."""
    watch, rows = Watch(tmp_path / "watch.jsonl", 3), Rows(**given)
    choose, refused = watch._choose, dsa_watch._refuse

    def changed(original: Any, *inputs: Any) -> Any:
        selected = choose(original, *inputs)
        # The server's own call is the one that has not the stand-in for SGLang's function.
        return change(selected.clone()) if change and original is not refused else selected

    monkeypatch.setattr(watch, "_choose", changed)
    monkeypatch.setattr("dsa_passes.indexer.choose", watch.choose)
    layer, backend, model = runner(monkeypatch), rows.backend(), Steady(rows)
    for layer_id in LAYERS:
        # Earlier passes have stored the same keys in both.
        watch._caches[layer_id], before = rows.pool[layer_id].clone(), rows.pool[layer_id].clone()
        layer(rows, backend, model, layer_id)
        assert not torch.equal(before, rows.pool[layer_id])
        assert torch.equal(watch._caches[layer_id], rows.pool[layer_id])
    path = tmp_path / "watch.jsonl"
    return read_rows(path) if path.exists() else []


@pytest.mark.parametrize("name", LEAVES_OUT)
def test_a_server_that_chooses_as_we_do_agrees(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = watching(monkeypatch, tmp_path, PASSES[name])
    phase = "prefill" if "new" in PASSES[name] else "decode"
    assert {(one["layer"], one["phase"]) for one in found} == {(layer, phase) for layer in LAYERS}
    selections = [one for one in found if one["kind"] == "selection"]
    assert [one["keys"] for one in selections] == [NATIVE, OWN] * len(LAYERS)
    rows = Rows(**PASSES[name])
    for one in selections:
        assert one["queries"] == sum(seen > TOPK for seen in rows.seen)
        assert one["overlap"] == one["overlap_least"] == 1 and one["differing"] == one["worst_relative_gap"] == 0
        assert one["other_keys"] == 0
    replays = [one for one in found if one["kind"] == "replays"]
    assert [(one["n"], one["same"], one["graph"]) for one in replays] == [(3, 3, False)] * len(LAYERS)


@pytest.mark.parametrize("name", ["dense decode", "prefill of short prompts"])
def test_where_nothing_is_left_out_nothing_is_said(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert watching(monkeypatch, tmp_path, PASSES[name]) == []


def test_a_token_in_the_place_of_another_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def swap(selected: torch.Tensor) -> torch.Tensor:
        spare = next(token for token in range(200) if token not in selected[0].tolist())
        selected[0, 5] = spare
        return selected

    found = watching(monkeypatch, tmp_path, PASSES["decode"], swap)
    for one in (one for one in found if one.get("keys") == NATIVE):
        assert one["differing"] == 2 and one["below"] == 1 and one["worst_relative_gap"] > 0
        assert one["overlap_least"] == pytest.approx(1 - 1 / TOPK)
    summary = summarise(found)
    assert not any(one["agrees"] for one in summary if one["of"] == "selection")
    assert all(one["agrees"] for one in summary if one["of"] == "replays")


def test_a_token_twice_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def twice(selected: torch.Tensor) -> torch.Tensor:
        selected[0, 1] = selected[0, 0]
        return selected

    found = watching(monkeypatch, tmp_path, PASSES["decode"], twice)
    assert {one["kind"] for one in found} == {"wrong", "replays"}
    with pytest.raises(EvaluationError, match=r"cannot be compared.*twice"):
        watched(tmp_path / "watch.jsonl", len(LAYERS))
    with pytest.raises(EvaluationError, match="nothing was said"):
        watched(tmp_path / "none.jsonl", 1)


def test_what_is_required() -> None:
    place = {"phase": "decode", "layer": 0}
    selection = {"kind": "selection", **place, "queries": 4, "overlap": 0.9999, "overlap_least": 0.9995, "below": 0}
    selection |= {"differing": 2, "worst_relative_gap": 2e-4, "other_keys": 0}
    rows = [{**selection, "keys": keys} for keys in (NATIVE, OWN)]
    rows += [{**rows[0], "overlap_least": 1.0, "overlap": 1.0, "worst_relative_gap": 0.0}]
    rows += [{"kind": "replays", **place, "graph": True, "n": 100, "same": 99, "queries": 8}]
    shared = {"kind": "distribution", "against": NATIVE, "kl": [0.001, 0.006], "same_best": 0.5}
    rows += [{**shared, "arm": arm} for arm in (NATIVE, PORTABLE)]
    summary = summarise(rows)
    assert [(one["of"], one.get("arm"), one["agrees"], required(one)) for one in summary] == [
        ("distribution", NATIVE, False, False),
        ("distribution", PORTABLE, False, True),
        ("replays", None, False, True),
        ("selection", None, False, True),
        ("selection", None, False, True),
    ]
    (native,) = [one for one in summary if one.get("keys") == NATIVE]
    assert native["queries"] == 8 and native["overlap"] == pytest.approx(0.99995) and native["overlap_least"] == 0.9995


def test_the_table(tmp_path: Path) -> None:
    rows = [{"kind": "replays", "phase": "decode", "layer": 1, "graph": True, "n": 100, "same": 100, "queries": 8}]
    with Record(tmp_path / "file.jsonl", COMMAND, "r1") as record:
        for one in summarise(rows):
            record.add("summary", **one)
    (line,) = files.any_table(tmp_path / "file.jsonl").splitlines()[2:]
    assert line == "| replays | same inputs, in one server | decode | 1 | 8 | yes | 100 of 100 | yes |"


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert agree_dsa.main(["--out", str(tmp_path / "out.jsonl")]) == 1
    assert "eval.lab.agree_dsa: needs a CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(EvaluationError, match=r"9\.x or 10\.x.*got 8\.x"):
        require_gpu()


@pytest.mark.parametrize("wrong", [["--length", "2k"], ["--replays", "1"], ["--prompts", "0"]])
def test_arguments_that_compare_nothing_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", "x", *wrong])


def test_prompts_and_room_for_them() -> None:
    args = parse(["--out", "x", "--server-args", "--random-seed 3"])
    asked = make_asked(args, SIZES["vocab_size"])
    assert [len(prompt) for prompt in asked.prompts] == [8192] * 8 and {len(row) for row in asked.forced} == {16}
    assert len({tuple(prompt[:PAGE]) for prompt in asked.prompts}) == 8
    assert asked == make_asked(args, SIZES["vocab_size"])
    flags = server_flags(args, "native")
    config = json.loads(flags[flags.index("--sparse-config") + 1])
    assert set(agree_dsa.ARMS.values()) < set(STAGES)
    assert config["implementation"] == "native" and flags[-2:] == ["--random-seed", "3"]
    assert int(flags[flags.index("--max-total-tokens") + 1]) >= 8 * (8192 + 16 + 64)
    assert int(flags[flags.index("--context-length") + 1]) > 8192 + 16


def test_the_checkpoint_is_what_transformers_calls_so(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM

    folder = dsa_checkpoint.write(tmp_path / "one", TINY, 0)
    weights = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(AutoConfig.from_pretrained(folder))
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert len(AutoTokenizer.from_pretrained(folder)) == 300
    again = load_file(dsa_checkpoint.write(tmp_path / "two", TINY, 0) / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = load_file(dsa_checkpoint.write(tmp_path / "three", TINY, 1) / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_gates_are_positive(tmp_path: Path) -> None:
    """On the embeddings of a model of the size that is measured; the first layer's input."""
    weights = dict(dsa_checkpoint._weights({**SIZES, "num_hidden_layers": 1}, 0))
    x = weights["model.embed_tokens.weight"]
    x = x * x.square().mean(1, keepdim=True).rsqrt()
    gates = x @ weights["model.layers.0.self_attn.indexer.weights_proj.weight"].T
    assert (gates > 0).float().mean() > 0.99 and 0.5 < gates.mean() < 1.5 and gates.std() > 0.2


def test_without_variables_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dsa_watch.portable.choose
    dsa_watch.register()
    assert dsa_watch.portable.choose is before
    monkeypatch.setattr(dsa_watch.portable, "choose", before)
    monkeypatch.setenv("DSA_WATCH", "file")
    dsa_watch.register()
    assert isinstance(getattr(dsa_watch.portable.choose, "__self__", None), Watch)
