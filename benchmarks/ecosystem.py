"""Small random models of transformers, and a U-Net: a module, keyword arguments and a loss for each.

Each has at least six blocks where it has blocks. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLASSES = "single_label_classification"
"""Models that are not told make it up in their first forward, and write it into their configuration."""

Case = tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]


def its_own(output: Any) -> torch.Tensor:
    """The loss that the model computes from its labels."""
    loss: torch.Tensor = output.loss
    return loss


def words(batch: int, length: int, vocabulary: int = 1000) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def llama(width: int = 128, layers: int = 6, batch: int = 4, length: int = 128) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config), words(batch, length), its_own


def gpt2(layers: int = 6, length: int = 128, batch: int = 4) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=256, n_embd=128, n_layer=layers, n_head=4)
    return GPT2LMHeadModel(config), words(batch, length), its_own


def bert(batch: int = 4, layers: int = 6) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=512
    )
    return BertForMaskedLM(config), words(batch, 128), its_own


def t5(batch: int = 4, layers: int = 6) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=512, num_layers=layers, num_heads=4, decoder_start_token_id=0
    )
    inputs = {**words(batch, 128), "labels": torch.randint(1000, (batch, 96))}
    return T5ForConditionalGeneration(config), inputs, its_own


def vit(layers: int = 6, batch: int = 8) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
        problem_type=CLASSES,
    )
    return ViTForImageClassification(config), images(batch, 64), its_own


def swin(batch: int = 8) -> Case:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64,
        patch_size=2,
        embed_dim=32,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=10,
        problem_type=CLASSES,
    )
    return SwinForImageClassification(config), images(batch, 64), its_own


def convnext(batch: int = 8) -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[24, 48, 96, 192], depths=[2, 2, 4, 2], num_labels=10, image_size=64, problem_type=CLASSES
    )
    return ConvNextForImageClassification(config), images(batch, 64), its_own


def resnet(batch: int = 8) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
        problem_type=CLASSES,
    )
    return ResNetForImageClassification(config), images(batch, 64), its_own


def mixtral(batch: int = 4, layers: int = 6) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config), words(batch, 128), its_own


def whisper(batch: int = 4, layers: int = 6) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=1000,
        num_mel_bins=40,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        d_model=64,
        max_source_positions=200,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.randn(batch, 40, 400), "labels": torch.randint(3, 1000, (batch, 64))}
    return WhisperForConditionalGeneration(config), inputs, its_own


def images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(10, (batch,))}


class DoubleConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = nn.functional.relu(self.first_norm(self.first(value)), inplace=True)
        return nn.functional.relu(self.second_norm(self.second(value)), inplace=True)


class UNet(nn.Module):
    """Four levels down and up again, with skip connections: Ronneberger, Fischer, Brox, 2015."""

    def __init__(self, width: int = 16, levels: int = 4, classes: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(DoubleConvolution, [3, *widths[:-2]], widths[:-1]))
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(DoubleConvolution(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(picture))
            picture = nn.functional.max_pool2d(skipped[-1], 2)
        picture = self.bottom(picture)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            picture = block(torch.cat([skipped.pop(), enlarge(picture)], 1))
        result: torch.Tensor = self.head(picture)
        return result


def unet(batch: int = 4) -> Case:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, torch.zeros(output.shape[0], *output.shape[2:], dtype=torch.long))

    return UNet(), {"picture": torch.randn(batch, 3, 64, 64)}, loss


MODELS: dict[str, Callable[[], Case]] = {
    "Llama": llama,
    "GPT-2": gpt2,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
    "Swin": swin,
    "ConvNeXt": convnext,
    "ResNet": resnet,
    "Mixtral": mixtral,
    "Whisper": whisper,
    "U-Net": unet,
}
