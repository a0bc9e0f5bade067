"""Small random models of every family of transformers that takes text or pictures, and of diffusers' networks.

The families are those of transformers' auto classes; each is built once, for the first task of `TASKS` that it has. A
configuration is made small by the names of its fields (`SMALL`), and where that does not make a working one, corrected
(`CORRECTIONS`). Families whose configuration consists of others (a text and a picture model) are left out. Nothing is
downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ecosystem import CLASSES, Case, its_own

TASKS = {
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
MOST_PARAMETERS = 30_000_000
"""A model that is still larger was not made small; it would take minutes, and say no more."""

_HEADS, _LAYERS, _WIDTH, _INNER, _VOCABULARY, _POSITIONS = 4, 2, 32, 64, 120, 128
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "encoder_vocab_size", "src_vocab_size"), _VOCABULARY),
    **dict.fromkeys(("tgt_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), _VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "decoder_hidden_size"), _WIDTH
    ),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "embedding_dim", "lru_width"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), _INNER),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "dim_ff", "hidden_dim", "feed_forward_size", "dff"), _INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("prefix_dense_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("d_head", "attention_head_size", "attention_head_dim", "swa_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "n_ctx"), _POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_seq_len", "max_sequence_length", "block_size"), _POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("first_k_dense_replace", "moe_num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0),
    "image_size": 64,
    "patch_size": 8,
    "embed_dim": 24,
    "window_size": 4,
    "hidden_sizes": 48,
    "depths": 2,
    "num_channels": 3,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": None,
}
"""Fields of a configuration, and the most that each may be; a number for a list is for each of its elements."""
IDS = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id")

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_HEAD = {"head_dim": 8}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bit": {"hidden_sizes": [32, 32, 64, 64], "embedding_size": 32, "num_groups": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "levit": {"hidden_sizes": [32, 48, 64], "key_dim": [8, 8, 8], "image_size": 224, "patch_size": 16},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "ministral": _HEAD,
    "nemotron": {**_HEAD, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "max_position_embeddings": 32,
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16],
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
    },
    "swin": {"window_size": 2},
    "donut-swin": {"window_size": 2},
    "textnet": {"hidden_sizes": [64, 64, 64, 64, 64]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"]},
}
"""What a family's configuration needs besides, by its type."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What builds a model, and what it is trained for: one of `TASKS`, or "diffusers"."""

    build: Callable[[], Case]
    task: str

    def begun(self) -> Case:
        """A new model after one forward: some make up what they are in their first, such as the kind of attention."""
        torch.manual_seed(0)
        model, inputs, loss = self.build()
        if getattr(getattr(model, "config", None), "use_cache", None) is not None:
            inputs = {**inputs, "use_cache": False}
        model.train()(**inputs)
        return model, inputs, loss


def families() -> dict[str, Family]:
    """The families by name: the type of transformers, or the class of diffusers."""
    from transformers.models.auto import modeling_auto

    found = {name: Family(make, "diffusers") for name, make in _DIFFUSERS.items()}
    for task, mapping in TASKS.items():
        for kind, classes in getattr(modeling_auto, mapping).items():
            name = classes if isinstance(classes, str) else classes[0]
            if kind not in found and not _is_composite(kind):
                found[kind] = Family(partial(build, kind, name, task), task)
    return found


def build(kind: str, name: str, task: str) -> Case:
    """A small model of one family with a batch for its task."""
    import transformers

    torch.manual_seed(0)
    config = small_config(kind, task)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters: its configuration was not made small")
    model = getattr(transformers, name)(small_config(kind, task))
    if task == "ImageClassification":
        size = getattr(config, "image_size", 64)
        side = size if isinstance(size, int) else size[0]
        pictures = torch.randn(4, getattr(config, "num_channels", 3), side, side)
        return model, {"pixel_values": pictures, "labels": torch.randint(10, (4,))}, its_own
    ids = torch.randint(3, min(_VOCABULARY, config.vocab_size), (4, 32))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}, its_own


def small_config(kind: str, task: str) -> Any:
    """The configuration of a family, made small."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    # A field that is derived from others has a default of None, and stays as it is.
    defaults = {field.name: _default(field) for field in dataclasses.fields(made)}
    sizes = {name: _smaller(name, defaults[name], SMALL[name]) for name in SMALL if defaults.get(name) is not None}
    if "kv_lora_rank" in defaults:  # latent attention has a key for every head
        sizes["num_key_value_heads"] = _HEADS
    labels = {"num_labels": 10, "problem_type": CLASSES} if task == "ImageClassification" else {}
    if task == "CausalLM" and "is_decoder" in defaults:
        labels["is_decoder"] = True
    config = made(**{**sizes, **labels, **CORRECTIONS.get(kind, {})})
    if task == "Seq2SeqLM":
        config.decoder_start_token_id = 0
    return config


def _is_composite(kind: str) -> bool:
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[kind], "sub_configs", None))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _smaller(name: str, default: Any, most: Any) -> Any:
    if name in IDS:
        return most
    if isinstance(default, list | tuple):
        return [_smaller(name, each, most) for each in default]
    return min(default, most) if isinstance(default, int | float) else default


def _noise(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.sample.square().mean()
    return loss


def _unet() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=32, block_out_channels=(32, 32, 64, 64), layers_per_block=1, norm_num_groups=8)
    return model, {"sample": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([3, 700])}, _noise


def _conditioned_unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64, 64, 64), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    text = torch.randn(2, 7, 32)
    inputs = {"sample": torch.randn(2, 4, 32, 32), "timestep": torch.tensor([3, 700]), "encoder_hidden_states": text}
    return model, inputs, _noise


def _autoencoder() -> Case:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    model = AutoencoderKL(**blocks, block_out_channels=(16, 32, 32), norm_num_groups=8, layers_per_block=1)
    return model, {"sample": torch.randn(2, 3, 64, 64)}, _noise


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, num_layers=3, sample_size=16, num_embeds_ada_norm=100,
        out_channels=8, norm_num_groups=8,
    )  # fmt: skip
    picture = torch.randn(2, 4, 16, 16)
    labels = torch.tensor([1, 2])
    return model, {"hidden_states": picture, "timestep": torch.tensor([3, 70]), "class_labels": labels}, _noise


_DIFFUSERS: dict[str, Callable[[], Case]] = {
    "UNet2D": _unet,
    "UNet2DCondition": _conditioned_unet,
    "AutoencoderKL": _autoencoder,
    "DiT": _dit,
}
