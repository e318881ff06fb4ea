"""Record what the tiny models' servers answer and count, to compare two states of this code.

    python tests/lab/recorded_answers.py --out before.json              # in a checkout of the state before
    python tests/lab/recorded_answers.py --out after.json --against before.json

Each method serves a tiny model on the CPU and is asked the same requests, one after another: prompts that share a
prefix and a second turn, so that the radix cache, chunked prefill and rectification have their part. What is recorded
are the tokens, how many of a prompt came from the cache, the sparse section of /server_info and the project's lines of
/metrics, without what is measured in time. The exit status is 1 where one differs. Nothing but ``launch/server.py`` is
used, so that the file can be copied into an older checkout.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from launch.server import ServerProcess

# Not absolute: metrics are labelled with it.
MODELS = Path("eval", "models")
ANCHOR = ("--sparse-prefill-method", "anchor", "--sparse-prefill-config", str(MODELS / "tiny-gqa" / "anchor.json"))
_SKIP = json.dumps({"threshold_scale_factor": 500, "crossover_tokens": 0})
_EVERY = {"crossover_tokens": 0, "min_seq_len": 256}
_PAPER = {**_EVERY, "summary": "minmax", "group": "mean_query"}


def decode(method: str, config: dict[str, Any] | str) -> tuple[str, ...]:
    """Flags of a decode method, with fields or with a file of them."""
    given = config if isinstance(config, str) else json.dumps(config)
    return ("--sparse-method", method, "--sparse-config", given)


# Name, model, flags.
SERVERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("resa", "tiny-gqa", decode("resa", _EVERY)),
    ("resa as in the paper", "tiny-gqa", decode("resa", _PAPER)),
    ("resa in some layers", "tiny-gqa", decode("resa", {**_EVERY, "layers": "2-"})),
    ("resa and anchor", "tiny-gqa", (*decode("resa", _EVERY), *ANCHOR)),
    ("rocketkv", "tiny-gqa", decode("rocketkv", {"eviction": "visibility", "crossover_tokens": 0})),
    ("skip_softmax", "tiny-gqa", decode("skip_softmax", json.loads(_SKIP))),
    (
        "skip_softmax in prefill",
        "tiny-gqa",
        ("--sparse-prefill-method", "skip_softmax", "--sparse-prefill-config", _SKIP),
    ),
    ("robsa", "tiny-mla", decode("robsa", str(MODELS / "tiny-mla" / "robsa.json"))),
    ("dsa", "tiny-dsa", (*decode("dsa", {}), "--page-size", "64")),
)
FLAGS = ("--page-size", "16", "--chunked-prefill-size", "2048", "--enable-metrics", "--random-seed", "0")


def prompts() -> list[list[int]]:
    """Long ones of which the second shares most of the first, and a short one."""
    pick = random.Random(0)
    first = [pick.randrange(10, 250) for _ in range(2500)]
    return [first, first[:1800] + first[200:700], first[:90], first]


def timed(name: str) -> bool:
    """Whether a counter is of seconds, bytes of a machine, or of speed."""
    return bool(re.search(r"second|_ms|time|throughput|speed|memory|_us\b", name))


def plain(value: Any) -> Any:
    """A section of /server_info without what is timed."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not timed(key)}
    return value


def record(name: str, model: str, flags: tuple[str, ...], logs: Path) -> dict[str, Any]:
    """Start a server and ask it; return its answers and counters."""
    params = {"max_new_tokens": 48, "temperature": 0.0, "ignore_eos": True}
    with ServerProcess(MODELS / model, *FLAGS, *flags, log_path=logs / f"{name}.log".replace(" ", "-")) as server:
        found: list[dict[str, Any]] = []
        for prompt in prompts():
            # The last one is a second turn of the first.
            asked = [*prompt, *found[0]["tokens"], *prompt[:40]] if len(found) == 3 else prompt
            answer = server.generate(input_ids=asked, sampling_params=params)
            found.append({"tokens": answer["output_ids"], "cached": answer["meta_info"]["cached_tokens"]})
        state = server.server_info()["internal_states"][0].get("sparse")
        lines = server.client.get("/metrics").text.splitlines()
    metrics = sorted(line for line in lines if "sparse" in line and not line.startswith("#") and not timed(line))
    # The port and the process are of this run.
    metrics = [re.sub(r'(pid|port|instance)="[^"]*"', r'\1=""', line) for line in metrics]
    return {"answers": found, "server_info": plain(state), "metrics": metrics}


def differences(before: Any, after: Any, at: str) -> list[str]:
    """Return the differences between two records, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{at}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{at}[{i}]")]
    return [] if before == after else [f"{at}: {before} before, {after} after"]


def main() -> int:
    """Record, and compare if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="one written before")
    parser.add_argument("--only", help="of these names, with commas")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [name for name, *_ in SERVERS]
    found: dict[str, Any] = {}
    for name, model, flags in SERVERS:
        if name in wanted:
            found[name] = record(name, model, flags, args.out.parent)
            print(f"{name}: recorded", flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.against is None:
        return 0
    before = json.loads(args.against.read_text())
    lines = [line for name in wanted for line in differences(before[name], found[name], name)]
    print("\n".join(lines) or f"{len(wanted)} servers answer and count as before")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
