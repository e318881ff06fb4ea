"""Vision-language models that are served for text alone: tiny ones against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import by_transformers
from httpx import HTTPStatusError
from media_checkpoints import random_vision_language
from server_requests import assert_agrees, assert_exact, assert_nothing_leaked, random_prompts, sparse_state

PAGE, INTERVAL = 16, 16
FLAGS = ("--chunked-prefill-size", "256", "--dtype", "float32")
RESA = {"active_ratio": 0.1, "min_pages": 2, "rectify_interval": INTERVAL, "dense_fallback": "never"}
TEXT = ("--json-model-override-args", json.dumps({"language_model_only": True}))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("family", "flags", "layers"),
    [
        ("Qwen3VL", TEXT, "all"),
        pytest.param("Gemma3", (), "2,5", marks=pytest.mark.long),
        pytest.param("Qwen3_5", (*TEXT, "--mamba-track-interval", "64"), "3", marks=pytest.mark.long),
    ],
)
def test_text_agrees_with_transformers_and_images_are_refused(
    serve, tmp_path: Path, family: str, flags: tuple[str, ...], layers: str
) -> None:
    likely = by_transformers(random_vision_language(tmp_path, family))
    (prompt,), (tokens,) = random_prompts(6, [300], 900), random_prompts(7, [90], 900)
    # A prefix without its state cannot be computed again; what is shared ends at the last state.
    checks, lost = (True, INTERVAL + PAGE) if family != "Qwen3_5" else (False, 64 + 1)
    with serve(tmp_path, *FLAGS, *flags, config={**RESA, "check_exactness": checks}) as server:
        assert sparse_state(server)["config"]["layers"] == layers
        assert_agrees(server, likely, prompt, tokens, lost)
        assert_status_400(server, "/generate", {"input_ids": prompt, "image_data": IMAGE["image_url"]["url"]})
        batch = {"input_ids": [prompt, prompt], "sampling_params": {"max_new_tokens": 2}}
        assert_status_400(server, "/generate", {**batch, "video_data": [None, IMAGE["image_url"]["url"]]})
        assert len(server.client.post("/generate", json={**batch, "image_data": [None, None]}).json()) == 2
        message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}
        assert_status_400(server, "/v1/chat/completions", {"model": "default", "messages": [message]})
        if checks:
            assert_exact(server)
        assert_nothing_leaked(server)


def assert_status_400(server: Any, path: str, asked: dict[str, Any]) -> None:
    with pytest.raises(HTTPStatusError) as caught:
        server.client.post(path, json=asked).raise_for_status()
    assert caught.value.response.status_code == 400
