"""Partitions that are known without a measurement of the checkpoint at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Layers that were found insensitive, without their similarities.

    Attributes:
        name: by which a config asks for it.
        architecture: class of the models that it is for.
        num_layers: layers of these.
        num_heads: attention heads of these.
        insensitive: ids of the layers whose RoPE part does not stand for the full score.
        warning: what a server says at its start.
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    insensitive: tuple[int, ...]
    warning: str

    def sensitive(self, theta2: float) -> tuple[int, ...]:
        """The other layers, whatever ``theta2`` is: see `RopeCalibration.sensitive`."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.insensitive)

    def refuse(self, hf_config: Any, num_layers: int) -> str | None:
        """Why it cannot be used for a model with such a config; None if it can."""
        architecture = (hf_config.architectures or ["unknown"])[0]
        # A wrapper, such as one for pictures, keeps them in the config of its language model.
        heads = getattr(getattr(hf_config, "text_config", hf_config), "num_attention_heads", "unknown")
        if (architecture, num_layers, heads) == (self.architecture, self.num_layers, self.num_heads):
            return None
        return (
            f"preset {self.name} is for {self.architecture} with {self.num_layers} layers and {self.num_heads} heads, "
            f"and this model is {architecture} with {num_layers} layers and {heads} heads: "
            "calibrate it with python -m sglang_sparse.calibrate --method robsa"
        )


PRESETS = {
    found.name: found
    for found in (
        # RoBSA, table 7, row "RULER": 20 prompts of about 15k tokens, "identified RoPE-insensitive layers".
        Preset(
            name="deepseek-v3-paper-ruler",
            architecture="DeepseekV3ForCausalLM",
            num_layers=61,
            # Kimi-K2 has the class and the layers too, and half the heads.
            num_heads=128,
            insensitive=(4, 17, *range(20, 44), 45, 46, 47, 50, 55, 60),
            warning=(
                "preset deepseek-v3-paper-ruler: the paper prints these 32 layers (table 7) to show how the choice of "
                "prompts biases a calibration; they are not the partition behind its accuracy, and they were found on "
                "DeepSeek-V3. For your own checkpoint run python -m sglang_sparse.calibrate --method robsa"
            ),
        ),
    )
}
