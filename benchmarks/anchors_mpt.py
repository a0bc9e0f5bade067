"""Published throughput of MPT models on one node of eight devices: llm-foundry, scripts/train/benchmarking/README.md.

https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking; bf16, FSDP FULL_SHARD, every row of the
tables with 8 devices. Device, then size, length, micro batch, tokens a second and device, and whether activations are
checkpointed (T: every block, F: none).
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
}
"""Width, layers and heads: scripts/train/yamls/pretrain there."""
VOCABULARY = 50_368

_PUBLISHED = {
    "h100": """
30b 8192 1 1384 T; 30b 4096 1 1802 T; 30b 2048 3 2002 T; 30b 1024 6 2084 T; 13b 32768 1 1976 T; 13b 16384 3 2985 T;
13b 4096 10 4717 T; 13b 2048 2 4792 F; 13b 1024 40 5502 T; 7b 65536 1 1956 T; 7b 32768 2 3318 T; 7b 8192 8 6935 T;
7b 4096 16 8611 T; 7b 2048 6 10643 F; 7b 1024 64 10203 T; 3b 65536 1 3262 T; 3b 32768 3 5873 T; 3b 16384 1 11152 F;
3b 8192 3 16578 F; 3b 4096 5 20964 F; 3b 1024 20 27046 F; 3b 512 40 27965 F; 1b 65536 1 5506 T; 1b 32768 1 12025 F;
1b 16384 2 19649 F; 1b 8192 3 29157 F; 1b 4096 7 38535 F; 1b 2048 14 45455 F; 1b 1024 18 48910 F; 1b 512 56 52275 F;
760m 32768 1 16291 F; 760m 16384 3 27815 F; 760m 8192 6 41825 F; 760m 4096 12 55459 F; 760m 2048 24 63147 F;
760m 1024 48 78581 F; 760m 512 96 83749 F""",
    "a100-80": """
30b 8192 1 574 T; 30b 4096 1 814 T; 30b 2048 3 916 T; 30b 1024 6 946 T; 30b 512 12 967 T; 13b 32768 1 1016 T;
13b 16384 3 1431 T; 13b 8192 5 1795 T; 13b 4096 10 2060 T; 13b 2048 2 2262 F; 13b 1024 40 2330 T; 7b 65536 1 1013 T;
7b 32768 2 1672 T; 7b 16384 4 2453 T; 7b 8192 8 3206 T; 7b 4096 16 3684 T; 7b 2048 6 4641 F; 7b 1024 64 4357 T;
3b 65536 1 1767 T; 3b 32768 3 3029 T; 3b 16384 1 5529 F; 3b 8192 3 7695 F; 3b 4096 5 9457 F; 3b 2048 10 10811 F;
3b 1024 20 11580 F; 3b 512 40 12127 F; 1b 65536 1 3044 T; 1b 32768 1 6275 F; 1b 16384 2 9956 F; 1b 8192 3 13814 F;
1b 4096 7 17807 F; 1b 2048 14 20513 F; 1b 1024 18 22112 F; 1b 512 56 23148 F; 760m 65536 1 4143 T; 760m 32768 1 8802 F;
760m 16384 3 14274 F; 760m 8192 6 20933 F; 760m 4096 12 27351 F; 760m 2048 24 32434 F; 760m 1024 48 29765 F;
760m 512 96 29446 F; 350m 65536 1 7524 F; 350m 32768 2 13652 F; 350m 16384 4 23559 F; 350m 8192 8 36569 F;
350m 4096 16 49555 F; 350m 2048 32 58782 F; 350m 1024 64 64813 F; 350m 512 128 69330 F; 125m 65536 1 20368 F;
125m 32768 2 36407 F; 125m 16384 4 60040 F; 125m 8192 8 90392 F; 125m 4096 16 118396 F; 125m 2048 40 142830 F;
125m 2048 32 141737 F; 125m 1024 64 156468 F; 125m 512 128 165681 F""",
    "a100-40": """
13b 8192 1 1407 T; 13b 4096 2 1603 T; 13b 2048 4 1668 T; 13b 1024 8 1727 T; 13b 512 16 1763 T; 7b 16384 1 2249 T;
7b 8192 3 2887 T; 7b 4096 6 3366 T; 7b 2048 12 3679 T; 7b 1024 24 3854 T; 7b 512 48 3895 T; 3b 32768 1 2955 T;
3b 16384 2 4465 T; 3b 8192 1 7149 F; 3b 4096 2 8777 F; 3b 2048 5 10065 F; 3b 1024 10 10731 F; 3b 512 20 11324 F;
1b 32768 1 5095 T; 1b 16384 1 9715 F; 1b 8192 2 13474 F; 1b 4096 4 16856 F; 1b 2048 8 19271 F; 1b 1024 16 20959 F;
1b 512 32 21782 F; 760m 32768 1 7183 T; 760m 16384 1 13914 F; 760m 8192 3 20106 F; 760m 4096 6 25863 F;
760m 2048 12 30173 F; 760m 1024 24 33422 F; 760m 512 48 34938 F; 350m 32768 1 13416 F; 350m 16384 2 22896 F;
350m 8192 4 34933 F; 350m 4096 8 46833 F; 350m 2048 16 55995 F; 350m 1024 32 62523 F; 350m 512 64 66284 F;
125m 32768 1 32651 F; 125m 16384 2 55484 F; 125m 8192 5 86858 F; 125m 4096 13 115162 F; 125m 2048 26 136334 F;
125m 1024 52 148289 F; 125m 512 104 156735 F""",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the published tables."""

    size: str
    length: int
    batch: int
    tokens_per_second: float
    checkpointed: bool


def published(device: str) -> list[Configuration]:
    rows = (row.split() for row in _PUBLISHED[device].split(";"))
    return [
        Configuration(size, int(length), int(batch), float(tokens), checkpointed == "T")
        for size, length, batch, tokens, checkpointed in rows
    ]
