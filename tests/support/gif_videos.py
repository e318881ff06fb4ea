"""Videos on a machine without FFmpeg, which SGLang needs to decode any: animated GIFs, which Pillow decodes.

What SGLang does with decoded frames is its own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from server_requests import plugin
from sglang.srt.utils.video_decoder import VideoDecoderWrapper

FRAMES_A_SECOND = 2.0


class GifVideo(VideoDecoderWrapper):
    """Stand-in for a video that SGLang has opened; ``source`` are the bytes of a GIF."""

    def __init__(self, source: bytes, *_: Any, **__: Any) -> None:
        frames = ImageSequence.Iterator(Image.open(io.BytesIO(source)))
        self.frames = np.stack([np.array(frame.convert("RGB")) for frame in frames])

    def __len__(self) -> int:
        return len(self.frames)

    avg_fps = FRAMES_A_SECOND

    def get_frames_as_tensor(self, indices: list[int]) -> torch.Tensor:
        """``[frames, height, width, 3]`` uint8."""
        return torch.from_numpy(self.frames[indices])


def install() -> None:
    """Decode by Pillow in this process."""
    for name in ("__init__", "__len__", "avg_fps", "get_frames_as_tensor"):
        setattr(VideoDecoderWrapper, name, vars(GifVideo)[name])
    # SGLang pins frames, which needs a driver.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def decoding(folder: Path) -> dict[str, str]:
    """Write a plugin in ``folder``; returns the variables that have a server decode by Pillow."""
    found = f"import sys; sys.path.append({str(Path(__file__).parent)!r})"
    return plugin(folder, "gifs", found, "import gif_videos", "gif_videos.install()")


def make_gif(frames: Sequence[Image.Image]) -> bytes:
    """An animated GIF."""
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def sampled(video: bytes) -> tuple[torch.Tensor, dict[str, Any]]:
    """The frames of a GIF and what is known of them, as SGLang gives both to the processor of Qwen3-VL.

    SGLang takes two frames a second, all of them here, and makes each 28 · n pixels high and wide and at least 100,352
    pixels large, which frames of such sizes are.
    """
    found = GifVideo(video)
    count = len(found)
    about = {"fps": FRAMES_A_SECOND, "total_num_frames": count, "frames_indices": [*range(count)]}
    return found.get_frames_as_tensor([*range(count)]).permute(0, 3, 1, 2), about
