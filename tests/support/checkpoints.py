"""Tiny random checkpoints for the server tests, and what transformers answers with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def byte_tokenizer(path: Path, vocab_size: int, more: Sequence[str] = ()) -> Any:
    """Save a byte-level BPE tokenizer of ``vocab_size`` tokens (300 to 4096), with a chat template, to ``path``.

    The special tokens have the first ids: three, and ``more``. Returns the tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    syllables = [a + b for a in "bcdfghjklmnpqrstvwyz" for b in "aeiou"]
    bpe.train_from_iterator(["".join(f" {a}{b}" for b in syllables) for a in syllables], trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be 300 to 4096, got {vocab_size}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(path)
    return tokenizer


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def save(path: Path, model: Any, vocab_size: int, extra: dict[str, Any]) -> Path:
    """Write a model in float32, with more fields of its config and a `byte_tokenizer`, and return its folder."""
    model.float().save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **extra}, indent=2))
    byte_tokenizer(path, vocab_size)
    return path


def random_qwen3(path: str | Path, *, layers: int = 4, vocab_size: int = 1024, seed: int = 0, **config: Any) -> Path:
    """Random float32 Qwen3 checkpoint: hidden 256, 8 query and 2 KV heads of 64; ``config`` overrides."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {**fields(layers, vocab_size), "num_key_value_heads": 2, "head_dim": 64}
    return save(Path(path), Qwen3ForCausalLM(Qwen3Config(**{**sizes, **config})), vocab_size, {})


def random_mla(path: str | Path, *, layers: int = 4, vocab_size: int = 1024, seed: int = 0, **config: Any) -> Path:
    """Random float32 DeepSeek-V3 checkpoint with dense MLPs.

    Hidden 256, 8 heads, latent rank 512, head sizes 64 (no position), 64 (rotary) and 64 (value); ``config``
    overrides.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    sizes = _mla_sizes(layers, vocab_size)
    return save(Path(path), DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **config})), vocab_size, _UNWRITTEN)


def random_dsa(path: str | Path, *, layers: int = 4, vocab_size: int = 1024, seed: int = 0, **config: Any) -> Path:
    """Random float32 DeepSeek-V3.2 checkpoint: as `random_mla`, with an indexer of 32 heads that chooses 64 tokens."""
    import torch
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(seed)
    sizes = {**_mla_sizes(layers, vocab_size), "index_n_heads": 32, "index_head_dim": 128, "index_topk": 64}
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**{**sizes, **config}))
    for layer in model.model.layers:
        # SGLang keeps these in bfloat16, whatever the others are in.
        gates = layer.self_attn.indexer.weights_proj.weight.data
        gates.copy_(gates.bfloat16())
    return save(Path(path), model, vocab_size, _UNWRITTEN)


def random_hybrid(path: Path, family: str = "Qwen3Next", layers: int = 5, seed: int = 0, **config: Any) -> Path:
    """Random float32 checkpoint: every fourth layer attends, the others have a state of a gated delta net.

    Hidden 256; attention with 8 query and 2 KV heads of 32, states of 6 value and 2 key heads of 32: SGLang splits
    what is projected for 1, 2 or 4 value heads a key head by a kernel of Triton.

    Args:
        path: its folder.
        family: "Qwen3Next", with experts; "Qwen3_5" and "Qwen3_5Moe", whose rotary positions are those of images and
            text.
        layers: how many; the fifth is the first one whose state depends on what attention computes.
        seed: of the weights.
        **config: fields of its config.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    text = hybrid_sizes(family, layers)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**text, **config}))
    remember(model)
    return save(path, model, 1024, {"full_attention_interval": 4})


def hybrid_sizes(family: str, layers: int) -> dict[str, Any]:
    """Fields of the config of text that `random_hybrid` describes."""
    own: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
    own |= {"linear_num_value_heads": 6, "linear_num_key_heads": 2}
    own |= {"linear_value_head_dim": 32, "linear_key_head_dim": 32}
    if family != "Qwen3_5":
        own |= {**EXPERTS, "shared_expert_intermediate_size": 128}
    if family != "Qwen3Next":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        own["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {**fields(layers, 1024), **own}


def remember(model: Any) -> None:
    """Draw the decay of states anew: as transformers draws it one forgets a token at once, and any other would do."""
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):
            weights.data.uniform_(-6, -3)


# The ids of media and of the tokens before and behind them: the first ones behind the three of every tokenizer.
IMAGE, VIDEO, VISION_START, VISION_END = 3, 4, 5, 6


def by_transformers(
    folder: Path, *images: Any, video: Any = None, **config: Any
) -> Callable[[list[int], list[int]], list[float]]:
    """Return a function that gives tokens behind a prompt their log-probabilities, in one pass.

    ``config`` overrides the checkpoint's. ``images``, of Pillow, are shown at a prompt's tokens of images, and
    ``video``, frames with their metadata, at that of a video.
    """
    import torch
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"dtype": torch.float32, "attn_implementation": "eager", **config}
    model = getattr(transformers, name).from_pretrained(folder, **options).eval()

    @torch.inference_mode()
    def likely(prompt: list[int], tokens: list[int]) -> list[float]:
        shown: dict[str, Any] = {}
        if images or video is not None:
            prompt, shown = _with_media(folder, prompt, images, video)
            kinds = [{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in prompt + tokens]
            shown["mm_token_type_ids"] = torch.tensor([kinds])
        logits = model(input_ids=torch.tensor([prompt + tokens]), **shown).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return likely


def _with_media(folder: Path, prompt: list[int], images: Sequence[Any], video: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a prompt with those of its media, and these as its model takes them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    of_token, shown = {IMAGE: list[list[int]](), VIDEO: list[list[int]]()}, dict[str, Any]()
    if count := prompt.count(IMAGE):
        shown |= processor.image_processor(images=[*images[:count]], return_tensors="pt")
        sizes = shown["image_grid_thw"].prod(-1) // processor.image_processor.merge_size**2
        of_token[IMAGE] = [[IMAGE] * size for size in sizes.tolist()]
    if VIDEO in prompt:
        frames, about = video
        given = {"video_metadata": [about], "do_sample_frames": False, "return_metadata": True}
        found = processor.video_processor(videos=[frames], return_tensors="pt", **given)
        # Between timestamps.
        of_token[VIDEO] = [processor.tokenizer.encode(processor.replace_video_token(found, 0))]
        shown |= {name: found[name] for name in ("pixel_values_videos", "video_grid_thw")}
    return [each for token in prompt for each in (of_token[token].pop(0) if token in of_token else [token])], shown


def random_eagle3(path: Path, target: Path, seed: int = 0) -> Path:
    """Random float32 EAGLE3 head for a checkpoint of Qwen3 or gpt-oss, whose embedding and LM head it shares.

    It reads the outputs of all layers of the model but the last.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("vocab_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id")
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"hidden_act": "silu", "draft_vocab_size": None, "tie_word_embeddings": False, "torch_dtype": "float32"}
    layers = [*range(config["num_hidden_layers"] - 1)]
    own["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**{name: config[name] for name in kept}, **own}))
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = {"q": (query, 2 * hidden), "k": (key, 2 * hidden), "v": (key, 2 * hidden), "o": (hidden, query)}
    shapes = {"fc": (hidden, len(layers) * hidden)}
    shapes |= {f"midlayer.self_attn.{name}_proj": shape for name, shape in attention.items()}
    mlp = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    shapes |= {f"midlayer.mlp.{name}_proj": shape for name, shape in mlp.items()}
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    torch.manual_seed(seed)
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, path / "model.safetensors")
    return path


def random_adapter(path: Path, model: Path, seed: int, rank: int = 8, share: float = 0.5) -> Path:
    """Random float32 adapter in PEFT's format for the linear layers of a checkpoint.

    Args:
        share: how large what it adds to a layer's output is, of what the layer computes.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    random, tensors, targets = torch.Generator().manual_seed(seed), {}, set()
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in (name for name in weights.keys() if "_proj" in name):  # noqa: SIM118
            weight = weights.get_tensor(name).float()
            down, up = (torch.randn(size, generator=random) for size in ((rank, weight.shape[1]), (len(weight), rank)))
            up *= share * weight.norm() / (up @ down).norm()
            module = name.removesuffix(".weight")
            targets.add(module.rpartition(".")[2])
            tensors |= {f"base_model.model.{module}.lora_{part}.weight": of for part, of in (("A", down), ("B", up))}
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


# SGLang reads these from the config file, as `random_hybrid`'s interval; transformers 5 no longer writes them.
_UNWRITTEN = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _mla_sizes(layers: int, vocab_size: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": 192, "kv_lora_rank": 512}
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    return {
        **fields(layers, vocab_size),
        "num_key_value_heads": 8,
        "first_k_dense_replace": layers,
        **ranks,
        **heads,
    }


def fields(layers: int, vocab_size: int) -> dict[str, Any]:
    """Fields that all configs have: hidden 256, 8 query heads."""
    return dict(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=32768,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )


def untied(model: Path, folder: Path) -> Path:
    """Copy a model and give it a head of its own: SGLang's last pipeline stage has no embeddings to share."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / "untied"
    shutil.copytree(model, path)
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    embeddings, head, index = "model.embed_tokens.weight", "lm_head.weight", path / "model.safetensors.index.json"
    files = json.loads(index.read_text()) if index.exists() else {"weight_map": {embeddings: "model.safetensors"}}
    with safe_open(model / files["weight_map"][embeddings], "pt") as weights:
        save_file({head: weights.get_tensor(embeddings)}, path / "head.safetensors")
    if index.exists():
        files["weight_map"][head] = "head.safetensors"
        index.write_text(json.dumps(files))
    return path
