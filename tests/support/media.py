"""Images and a video of a tiny processor's sizes, and a server that is sent them with its prompts."""

import base64
import io
from typing import Any

from checkpoints import IMAGE, VIDEO, VISION_END, VISION_START
from gif_videos import make_gif
from PIL import Image

# Of 4 x 3 tokens, which M-RoPE counts as 4.
FIRST = Image.radial_gradient("L").resize((128, 96)).convert("RGB")
SECOND = FIRST.transpose(Image.Transpose.ROTATE_180).point(lambda value: value // 2)
MORE = 4 * 3 - 1
# Of 2 x 3 tokens.
THIRD = SECOND.resize((64, 96))
# Of four pairs of frames.
VIDEO_FILE = make_gif([FIRST.convert("L").resize((336, 308)).rotate(45 * turn) for turn in range(8)])


def as_png(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


class Showing:
    """A server that is sent as many images as a prompt has tokens for, and the video if it has a token for that."""

    def __init__(self, server: Any, *images: Image.Image) -> None:
        self.server = server
        self.images = [base64.b64encode(as_png(image)).decode() for image in images or (FIRST, SECOND)]
        self.video = base64.b64encode(VIDEO_FILE).decode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def generate(self, **asked: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if count := asked["input_ids"].count(IMAGE):
            shown["image_data"] = self.images[:count]
        if VIDEO in asked["input_ids"]:
            shown["video_data"] = self.video
        return self.server.generate(**asked, **shown)


def with_image(prompt: list[int], at: int = 100, media: int = IMAGE) -> list[int]:
    return [*prompt[:at], VISION_START, media, VISION_END, *prompt[at:]]
