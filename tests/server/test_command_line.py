"""The real command line ends with one message and a non-zero status within a minute of work."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_server import Forked
from model_configs import CONFIGS, write_config


def cpu_seconds() -> float:
    """Of the commands that have ended; unlike the clock, no other process on the machine adds to it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forked(command: list[str], log: Path) -> tuple[int, str]:
    """Exit status and output of ``python`` with these arguments, but for the imports."""
    status = Forked(command, dict(os.environ), str(log)).wait(300.0)
    return status, log.read_text()


def launch(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    began = cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
    )
    assert cpu_seconds() - began < 60
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("qwen3"), "qwen3")


LINES = {
    "--sparse-method: got 'robs', allowed: dsa, resa, robsa, rocketkv, skip_softmax; did you mean 'robsa'?": [
        "--sparse-method",
        "robs",
    ],
    "active_ratio: got 2": ["--sparse-method", "resa", "--sparse-config", '{"active_ratio": 2}'],
    "the server's page size is 64 and the config's is 16": ["--sparse-method", "resa", "--page-size", "64"],
    "cannot rectify with mixed chunk": ["--sparse-method", "resa", "--enable-mixed-chunk", "--pp-size", "2"],
    "SPARSE_SELF needs --sparse-method, which was not given": ["--speculative-algorithm", "SPARSE_SELF"],
}
# By a model that only the method named in it serves.
MODELS = {
    "does not fit DeepseekV3ForCausalLM: resa needs an MHA or GQA model": ("mla", "resa"),
    "does not fit DeepseekV3ForCausalLM: robsa needs a calibration of this model": ("mla", "robsa"),
    "does not fit Qwen3ForCausalLM: robsa needs an MLA model": ("qwen3", "robsa"),
}


@pytest.fixture(scope="module")
def endings(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and output of every command line, by what it is expected to say."""
    folder, mla = tmp_path_factory.mktemp("errors"), write_config(tmp_path_factory.mktemp("mla"), "mla")
    paths = {"mla": mla, "qwen3": qwen3}
    lines = {said: ["--model-path", qwen3, *flags] for said, flags in LINES.items()}
    lines |= {said: ["--model-path", paths[model], "--sparse-method", name] for said, (model, name) in MODELS.items()}
    found = {}
    for number, (said, line) in enumerate(lines.items()):
        found[said] = forked(["-m", "sglang.launch_server", *line], folder / str(number))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's backend is asked for")
def test_a_layer_that_is_not_served_ends_the_start(tmp_path: Path) -> None:
    """Gemma 2's windows are those of every other layer, whatever ``layer_types`` says of them."""
    window = {"sliding_window": 64, "layer_types": ["full_attention"] * 4, "attn_logit_softcapping": 0.0}
    config = {**CONFIGS["soft_cap"], **window, "hidden_act": "gelu_pytorch_tanh"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu", "--attention-backend"]
    line = ["-m", "sglang.launch_server", "--model-path", str(tmp_path), *flags, "torch_native"]
    status, output = forked([*line, "--sparse-method", "resa"], tmp_path / "log")
    assert status != 0 and "layer 0 has a sliding window of 63 tokens (model.layers.0.self_attn.attn)" in output
    assert """--sparse-config '{"layers": [1, 3]}'""" in output


@pytest.mark.parametrize("expected", [*LINES, *MODELS])
def test_one_message(endings: dict[str, tuple[int, str]], expected: str) -> None:
    status, stderr = endings[expected]
    messages = [line for line in stderr.splitlines() if line.startswith("sglang_sparse: error: ")]
    assert status == 2
    assert len(messages) == 1 and expected in messages[0]
    assert "Traceback" not in stderr


def test_help_lists_the_flags(tmp_path: Path) -> None:
    status, output = forked(["-m", "sglang.launch_server", "--help"], tmp_path / "help")
    assert status == 0
    for flag in ("--sparse-method", "--sparse-prefill-method", "--sparse-config"):
        assert flag in output


def test_a_plugin_that_is_left_out_is_not_silently_dense(qwen3: str) -> None:
    status, stderr = launch("--model-path", qwen3, "--sparse-method", "resa", env={"SGLANG_PLUGINS": "torch_cpu"})
    assert status == 2
    assert "unrecognized arguments: --sparse-method resa" in stderr


def test_engine_takes_the_same_three(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import sglang\n"
        "if __name__ == '__main__':\n"
        f"    engine = sglang.Engine(model_path={str(checkpoint)!r}, sparse_method='resa',\n"
        "        sparse_prefill_method=None, sparse_config={'dense_fallback': 'never', 'min_pages': 2})\n"
        "    engine.generate(input_ids=[list(range(10, 210))], sampling_params={'max_new_tokens': 4})\n"
        "    state = engine.get_server_info()['internal_states'][0]['sparse']\n"
        "    print('attended', state['pages_attended'] / state['pages_held'], state['config']['min_pages'])\n"
        "    engine.shutdown()\n"
    )
    status, output = forked([str(script)], tmp_path / "output")
    assert status == 0, output[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("attended")]
    _, share, min_pages = line.split()
    assert float(share) < 0.2 and min_pages == "2"


def test_engine_raises_value_error(qwen3: str, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import sglang\n"
        "try:\n"
        f"    sglang.Engine(model_path={qwen3!r}, sparse_method='reza')\n"
        "except ValueError as error:\n"
        "    print('ValueError:', error)\n"
    )
    _, output = forked([str(script)], tmp_path / "output")
    allowed = "dsa, resa, robsa, rocketkv, skip_softmax"
    message = f"ValueError: --sparse-method: got 'reza', allowed: {allowed}; did you mean 'resa'?"
    assert message in output
