r"""``python -m eval.lab.servers.eight_gpus``: launches as large models have them on eight GPUs, dense and sparse.

    python -m eval.lab.servers.eight_gpus --out measured

Each of `RUNS` is a command of `eval.lab.bench_deployments` with all GPUs: 64 prompts of 32k tokens at once, or four a
GPU of Llama 70B. Weights are dummies of a public model's widths, and all but Llama have a few of its layers.

The dense server of the V3.2 shape runs SGLang's own DSA with the same flags; ``same_as_dense`` of the summary says how
long answers are the same as its. ``--gpus`` makes the same of fewer, ``--only`` some of the runs. The V3.2 shape has
the layer that drafts (MTP), which this project's own kernels do not run on GPUs: that run is without drafts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.lab import bench_deployments
from eval.lab.servers.deployments import DP
from eval.live.client import command_line, list_of, positive

COMMAND = "eval.lab.servers.eight_gpus"
REQUESTS = 64
# Of the model whose layers are all there, for each GPU.
DENSE_ROWS = 4
_MTP = "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1"
_MTP += " --speculative-num-draft-tokens 2"
# By name: a deployment, a shape, the sparse server's flags, and flags of both servers; {gpus} is their number.
RUNS = {
    "dsa-native": (DP, "v32-slice", "--sparse-method dsa", f"--ep-size {{gpus}} {_MTP}"),
    "dsa-portable": (
        DP,
        "v32-slice",
        """--sparse-method dsa --sparse-config '{"implementation": "portable"}'""",
        "--ep-size {gpus}",
    ),
    "robsa": (
        DP,
        "kimi-k2-slice",
        """--sparse-method robsa --sparse-config '{"allow_uncalibrated": true, "page_size": 64}'""",
        "--ep-size {gpus} --attention-backend flashmla --page-size 64",
    ),
    "resa": ("tp", "llama-3.1-70b", "--sparse-method resa", "--page-size 16"),
}


def line(name: str, gpus: int, folder: Path, revision: str | None, more: str = "") -> list[str]:
    """The arguments of a run's command.

    Args:
        name: of `RUNS`.
        gpus: how many the servers share.
        folder: where its file goes.
        revision: of the code, None to ask git.
        more: further arguments of all servers.
    """
    deployment, shape, sparse, flags = RUNS[name]
    batch = REQUESTS // gpus if deployment == DP else DENSE_ROWS * gpus
    found = ["--shape", shape, "--deployments", deployment, "--gpus", str(gpus), "--batch", str(batch)]
    found += ["--input-length", "32k", "--output-length", "512", "--runs", "2", "--sparse", sparse]
    found += ["--server-args", f"{flags.format(gpus=gpus)} {more}".strip()]
    found += ["--out", str(folder / f"{name}-{shape}-{deployment}-{gpus}.jsonl")]
    return found + (["--revision", revision] if revision else [])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_line(COMMAND, __doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for a file of each run")
    parser.add_argument("--gpus", type=positive, default=8, help="of this machine")
    parser.add_argument("--only", type=list_of(str, tuple(RUNS)), default=",".join(RUNS), help="these runs")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, as one string")
    args = parser.parse_args(arguments)
    if REQUESTS % args.gpus:
        parser.error(f"--gpus must divide {REQUESTS} requests, got {args.gpus}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the commands; exit status 1 where one of them has not measured everything."""
    args = parse(arguments)
    status = 0
    for name in args.only:
        command = line(name, args.gpus, args.out, args.revision, args.server_args)
        print(shlex.join(["python", "-m", "eval.lab.bench_deployments", *command]), flush=True)
        status |= bench_deployments.main(command)
    return status


if __name__ == "__main__":
    sys.exit(main())
