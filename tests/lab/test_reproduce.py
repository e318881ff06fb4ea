"""The legs of everything at once: what commands and goals want of them; how they run is in test_reproduce_run."""

import argparse
import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated_stubs
import pytest

from eval import identity, infinitebench, niah, ppl_prefill, ppl_rectify
from eval.lab import (
    agree_dsa,
    bench_decode,
    bench_deployments,
    bench_dsa,
    bench_framework,
    bench_goodput,
    bench_kernels,
    bench_mla,
    bench_prefill,
    bench_throughput,
    profile_decode,
    reproduce,
)
from eval.lab.kernels.kernel_inputs import Shape
from eval.lab.legs.leg import LEGS, URL, URLS_BESIDE, Command, Leg
from eval.lab.servers.model_shapes import SHAPES
from eval.lab.tables.goals import Goal, read_goals
from eval.live.record import command_name
from eval.live.runner import parser_of
from eval.ppl_prefill import BOUND
from eval.texts.lengths import short_length
from eval.texts.windows import read_tokens
from sglang_sparse import tune
from sglang_sparse.config.files import read_config
from sglang_sparse.config.request_options import parse_options
from sglang_sparse.config.settings import build

# Fields of a goal's row that no argument decides.
OUTCOMES = {"command", "task", "arm", "implementation", "sparse_layers", "dense_decode_graphs", "dense_prefill_graphs"}
PARSERS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "eval.lab.agree_dsa": agree_dsa.parse,
    "eval.lab.bench_decode": bench_decode.parse,
    "eval.lab.bench_dsa": bench_dsa.parse,
    "eval.lab.bench_framework": bench_framework.parse,
    "eval.lab.bench_deployments": bench_deployments.parse,
    "eval.lab.bench_goodput": bench_goodput.parse,
    "eval.lab.bench_kernels": bench_kernels.parse,
    "eval.lab.bench_mla": bench_mla.parse,
    "eval.lab.bench_prefill": bench_prefill.parse,
    "eval.lab.bench_serving": generated_stubs.parse,
    "eval.lab.bench_throughput": bench_throughput.parse,
    "eval.identity": identity.parse,
    "eval.infinitebench": lambda arguments: parser_of(infinitebench.InfiniteBenchSuite).parse_args(arguments),
    "eval.ppl_prefill": ppl_prefill.parse,
    "eval.ppl_rectify": ppl_rectify.parse,
    "eval.niah": lambda arguments: parser_of(niah.NeedleSuite).parse_args(arguments),
    "eval.lab.profile_decode": profile_decode.parse,
    "sglang_sparse.tune": lambda arguments: tune.parser().parse_args(arguments),
}
# Legs on trained tiny models.
TINY = ("needles-", "ppl-", "identity-", "stock-")
COMMANDS = [(leg, command) for leg in LEGS for command in leg.commands]
README = Path(reproduce.__file__).parent / "README.md"


def parsed(command: Command, folder: Path) -> argparse.Namespace:
    """The arguments as the command's own parser reads them, with the inputs that it looks into."""
    arguments = {"seed": 0, "active": "paper", "recipe": {}}
    header = {"kind": "header", "command": "eval.lab.bench_mla", "base_recipe": {}, "arguments": arguments}
    row = {"kind": "summary", "op": "mass+topp+attend", "implementation": "rope", "stripe_ratio": 0.003}
    (folder / "mla-v2-lite.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, row)))
    module, *rest = command.line(folder, ["http://here"] * 3, "r1")
    return PARSERS[module](rest)


def asked(leg: Leg, command: Command, folder: Path) -> dict[str, list[Any]]:
    """Return the values that a command's rows will have, by field; commands that it takes inputs from add theirs."""
    args, module = parsed(command, folder), command.module
    found = {name: value if isinstance(value, list) else [value] for name, value in vars(args).items()}
    if module == "eval.lab.bench_kernels":
        shapes = bench_kernels.shapes(args)
        found |= {"shape": [shape.name for shape in shapes], "op": args.ops}
        found |= {name: [getattr(shape, name) for shape in shapes] for name in ("q_heads", "kv_heads", "dim")}
    elif module == "eval.lab.bench_framework":
        found |= {"shape": args.shapes, "op": args.ops, "target_sparsity": [args.skipped]}
        found |= {name: [getattr(Shape(1, 1), name)] for name in ("q_heads", "kv_heads", "dim")}
    elif module == "eval.lab.bench_dsa":
        found |= {"shape": [*args.shapes, *args.prefill], "op": args.ops, "chunk": [0, args.chunk]}
    elif module == "eval.lab.bench_mla":
        shares = [shape.target_share for shape in bench_mla.shapes(args)]
        found |= {"shape": args.shapes, "op": args.ops, "target_sparsity": [1 - share for share in shares if share]}
    elif module == "eval.lab.bench_prefill":
        found |= {
            "shape": [f"1x{short_length(tokens)}" for tokens in args.lengths],
            "target_sparsity": [*args.sparsity.values()],
        }
        found |= {name: [heads] for name, heads in zip(("q_heads", "kv_heads", "dim"), args.heads, strict=True)}
    elif module == "eval.lab.bench_goodput":
        found |= {"arm": list(dict(args.server))}
    elif module == "eval.lab.bench_throughput":
        named = args.server_args.split()
        found |= {
            "arm": list(dict(args.server)),
            "dense_served_page_size": [int(named[named.index("--page-size") + 1])],
        }
        found |= {"dense_served_attention_backend": [named[named.index("--attention-backend") + 1]]}
    elif module == "eval.lab.bench_serving":
        flags = shlex.split(args.server_args)
        # Without the flag the server takes FA3, on the GPUs that have it.
        named = [*flags, "--attention-backend", "fa3"]
        backend = named[named.index("--attention-backend") + 1]
        found |= {"context": args.contexts, "dense_page_size": [int(flags[flags.index("--page-size") + 1])]}
        found |= {"dense_decode_backend": [backend], "dense_attention_backend": [backend]}
        found |= {"target_sparsity": [*args.sparsity.values()]} if args.sparsity else {}
    for other in leg.commands:
        if command.needs(other):
            found = asked(leg, other, folder) | found
    return found


@pytest.mark.parametrize(("leg", "command"), COMMANDS, ids=lambda one: getattr(one, "file", ""))
def test_command_lines_are_what_their_commands_take(leg: Leg, command: Command, tmp_path: Path) -> None:
    args = parsed(command, tmp_path)
    assert args.out == tmp_path / command.file
    assert getattr(args, "revision", "none") == ("r1" if command.module.startswith("eval.") else "none")
    asks = not {URL, *URLS_BESIDE}.isdisjoint(command.arguments)
    assert asks == (leg.server is not None)
    assert getattr(args, "base_url", "http://here") == "http://here"
    if hasattr(args, "recall_from") and args.recall_from:
        assert args.recall_from.name in [other.file for other in leg.commands if command.needs(other)]


@pytest.mark.parametrize("goal", read_goals(), ids=lambda goal: f"{goal.id}-{goal.part}")
def test_every_goal_has_its_leg(goal: Goal, tmp_path: Path) -> None:
    claimed = [(leg, command) for leg, command in COMMANDS if command.claims(goal)]
    assert len(claimed) == 1, f"{goal.id}, {goal.part}: give it a leg in eval/lab/legs/legs.toml"
    ((leg, command),) = claimed
    assert command_name(command.module) == goal.row["command"]
    given = asked(leg, command, tmp_path)
    if goal.row.get("task") == "prefix_hit":
        given["context"] = given["prefix"]
    for name in goal.row.keys() - OUTCOMES:
        assert goal.row[name] in given[name], name


def test_claims_are_goals_and_files_are_distinct() -> None:
    goals = read_goals()
    names = {goal.id for goal in goals} | {f"{goal.id}: {goal.part}" for goal in goals}
    assert {claim for _, command in COMMANDS for claim in command.goals} <= names
    files = [command.file for _, command in COMMANDS]
    assert len(set(files)) == len(files) and len({leg.name for leg in LEGS}) == len(LEGS)


def test_servers_hold_what_is_asked_of_them(tmp_path: Path) -> None:
    for leg in LEGS:
        if leg.server is None or leg.name.startswith(TINY):
            continue
        assert leg.server.model in SHAPES and "--load-format" in leg.server.arguments()
        flags = leg.server.flags
        names = ("--max-total-tokens", "--context-length", "--max-running-requests")
        limit = {name: int(flags[flags.index(name) + 1]) for name in names}
        facts = {"page_size": 16, "max_total_num_tokens": limit["--max-total-tokens"], "disable_radix_cache": False}
        assert flags[flags.index("--page-size") + 1] == "16"
        needed = []
        config = json.loads(flags[flags.index("--sparse-config") + 1]) if "--sparse-config" in flags else {}
        for command in leg.commands:
            args = parsed(command, tmp_path)
            short = getattr(args, "short", 0)
            bench_decode.require_capacity(facts, args.batch, args.context, short, args.tokens)
            needed.append(bench_decode.kv_tokens(args.batch, args.context, short, args.tokens, 16))
            assert args.context + args.tokens < limit["--context-length"]
            assert args.batch <= limit["--max-running-requests"]
            if command.module == "eval.lab.bench_decode":
                # A name says what is measured, and goals go by it.
                assert f"-{args.batch}x{short_length(args.context // 1024 * 1024)}" in args.shape
                assert args.shape.startswith(leg.server.model)
                assert ("fp8-r.05" in args.shape) == (config.get("active_ratio") == 0.05)
                assert config.get("rectify_interval", 32) == args.interval
                assert args.dense_only == ("--sparse-method" not in flags)
        assert limit["--max-total-tokens"] < max(needed) + 16, "a page less and the largest batch is refused"


@pytest.mark.parametrize("leg", [leg for leg in LEGS if leg.name.startswith("needles-")], ids=lambda leg: leg.name)
def test_needles_are_asked_of_a_model_of_ours_by_fields_of_the_method(
    leg: Leg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in leg.server.environment if leg.server else ():
        if name == "PYTHONPATH":
            monkeypatch.syspath_prepend(str(README.parents[2] / value))
    assert leg.server is not None and "--load-format" not in leg.server.arguments()
    assert (Path(reproduce.__file__).parents[2] / leg.server.model / "config.json").is_file()
    option, name, _, config = leg.server.flags[:4]
    config, prefill = read_config(config), option == "--sparse-prefill-method"
    settings = build(None, {}, name, config) if prefill else build(name, config)
    for command in leg.commands:
        # Texts that are not asked for anything know the two arms of a server by themselves.
        if command.module == "eval.ppl_prefill":
            continue
        args = parsed(command, tmp_path)
        if settings.method.selects_in_model:
            assert args.compare_url is None and args.expect == name and not args.custom_params
            continue
        assert args.base_url == args.compare_url and args.compare_custom_params == {"sparse": False}
        parse_options(settings, args.custom_params)
        assert set(args.custom_params) <= set((settings.prefill or settings.method).config.request_fields)


def test_controls_of_anchor_differ_by_what_they_select(tmp_path: Path) -> None:
    """All stripes are found by one threshold; of the method's selection the dense tail is a part."""
    (perplexity,) = [leg for leg in LEGS if leg.name == "ppl-prefill-anchor"]
    legs = {leg.name.removeprefix("needles-"): leg for leg in LEGS}
    servers = {name: legs[name].server for name in ("anchor-few", "random_stripes", "newest_stripes")}
    found, *others = [*servers.values(), *perplexity.servers]
    assert found is not None and found == perplexity.server
    for server in others:
        assert server is not None
        config = json.loads(server.flags[3])
        assert config.pop("dense_tail", None) == (None if server == found else 0)
        assert config == json.loads(found.flags[3]) and server.flags[4:] == found.flags[4:]
    assert [server.flags[1] for server in perplexity.servers] == ["anchor", "anchor", "random_stripes"]
    for command in perplexity.commands:
        args = parsed(command, tmp_path)
        assert args.kind == ["records"] and f"-{args.length // 1024}k-" in command.file
        judged = command.file.endswith("k-anchor.jsonl")
        assert (args.bound == BOUND) == (args.windows == 200) == judged


def test_files_of_other_legs_are_made_before(tmp_path: Path) -> None:
    made: dict[str, argparse.Namespace] = {}
    for leg in LEGS:
        for command in leg.commands:
            args = parsed(command, tmp_path)
            assert set(command.reads()) <= made.keys()
            if command.module == "eval.lab.bench_decode" and not args.dense_only:
                (peer,) = [made[path.name] for path in args.peer]
                assert peer.dense_only and (peer.batch, peer.context) == (args.batch, args.context)
                assert args.shape.removesuffix("-fp8-r.05") == peer.shape
            made[command.file] = args


def test_dense_peers_are_stock_servers() -> None:
    legs = {leg.name: leg for leg in LEGS}
    for name, model in (("dense-8b", "qwen3-8b"), ("dense-1.7b", "qwen3-1.7b")):
        server = legs[name].server
        assert server is not None and server.model == model
        assert server.flags[:4] == ("--attention-backend", "flashinfer", "--page-size", "16")
        assert not any("sparse" in flag for flag in server.flags)


def test_batches_that_the_serving_benchmark_cannot_measure_are_not_asked_for(tmp_path: Path) -> None:
    (serving,) = [command for _, command in COMMANDS if command.file == "serving-qwen3-1.7b.jsonl"]
    assert parsed(serving, tmp_path).batch == [1]


def test_the_commands_of_the_readme_are_the_same() -> None:
    blocks = re.findall(r"```\n(.*?)```", README.read_text(), re.S)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]
    bench = ("eval.lab.bench_decode", "eval.lab.bench_mla", "eval.lab.bench_prefill", "eval.lab.bench_serving")
    shown = [line[2:] for line in lines if line[:2] == ["python", "-m"] and line[2] in bench]
    known = [[part.removeprefix("./") for part in one.line(Path(), ["URL"])] for _, one in COMMANDS]
    assert len(shown) == 7
    for line in shown:
        assert line in known


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [leg.name for leg in LEGS]
    files = "bench-decode-qwen3-8b-6x128k-fp8-r.05.jsonl, profile-pass-qwen3-8b-6x128k.jsonl"
    assert f"| e3-8b | E3: Qwen3-8B, 6x128k | {files} | a server of qwen3-8b |" in lines
    files = "dense-flashinfer-qwen3-8b-6x128k.jsonl, dense-flashinfer-qwen3-8b-1x128k.jsonl"
    assert f"| dense-8b |  | {files} | a server of qwen3-8b |" in lines
    assert "| mla | K6: 8x64k; K6: 1x128k | bench_mla.jsonl | nothing |" in lines


def test_a_leg_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["--list", "--only", "1x256k", "dense-1.7b", "e1", "e2"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    # Nothing is left of e2.
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["dense-1.7b", "e1"]
    assert "| E1: 1x256k | bench-decode-qwen3-1.7b-1x256k.jsonl, profile-qwen3-1.7b-1x256k.jsonl |" in lines[1]
    assert reproduce.main(["--dry-run", "--only", "decode-qwen3-1.7b-1x256k", "e1"]) == 0
    shown = capsys.readouterr().out
    assert "eval.lab.bench_decode" in shown and "eval.lab.profile_decode" not in shown and "4x256k" not in shown
    assert reproduce.main(["--list", "--only", "2x", "dense-1.7b"]) == 1
    assert "--only '2x': no file of these legs is called like that: there are dense-flash" in capsys.readouterr().err


def test_the_books_of_the_legs_are_five() -> None:
    (asked,) = [one.arguments for _, one in COMMANDS if one.file == "ppl-rectify-mla.jsonl"]
    given = [Path(word) for before, word in itertools.pairwise(asked) if before == "--book"]
    books = read_tokens(given, lambda text: [len(text)])
    assert len(books) == 5 and all(size > 10**5 for (size,) in books.values())
