"""Architecture facts of the usual actors, so that their memory and time can be measured without a download.

The numbers are those of the published configurations. With them `--weights random` builds the actor offline; the
tests hold every entry against the parameter count that its publisher states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hilore_cli.errors import HiloreError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What decides the shapes and kernels of a decoder-only actor."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """The LM head shares the embedding's weights."""
    rope_theta: float
    rms_eps: float
    max_positions: int
    attention_bias: bool = False
    """Query, key and value projections have a bias (always so in Qwen2)."""
    rope_factor: float | None = None
    """Stretching factor of Llama 3's rope scaling; the other families have none."""

    def config(self) -> PretrainedConfig:
        """The configuration that transformers builds this architecture from."""
        from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and solving must not need it

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_factor is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        # Qwen2 fixes its biases in code and knows no such setting.
        bias = {} if self.model_type == "qwen2" else {"attention_bias": self.attention_bias}
        config: PretrainedConfig = AutoConfig.for_model(
            self.model_type,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            rms_norm_eps=self.rms_eps,
            max_position_embeddings=self.max_positions,
            rope_parameters=rope,
            **bias,
        )
        return config


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = True, vocab: int = 151_936
) -> Architecture:
    return Architecture(
        model_type="qwen2",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        rope_theta=1e6,
        rms_eps=1e-6,
        max_positions=32_768,
        attention_bias=True,
    )


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = True) -> Architecture:
    return Architecture(
        model_type="qwen3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=151_936,
        tied=tied,
        rope_theta=1e6,
        rms_eps=1e-6,
        max_positions=40_960,
    )


def _llama3(hidden: int, layers: int, heads: int, ffn: int, *, rope_factor: float, tied: bool = True) -> Architecture:
    return Architecture(
        model_type="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=128_256,
        tied=tied,
        rope_theta=5e5,
        rms_eps=1e-5,
        max_positions=131_072,
        rope_factor=rope_factor,
    )


def _smollm2(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, *, rope_theta: float = 1e5) -> Architecture:
    return Architecture(
        model_type="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        ffn=ffn,
        vocab=49_152,
        tied=True,
        rope_theta=rope_theta,
        rms_eps=1e-5,
        max_positions=8192,
    )


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11_008),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18_944, tied=False, vocab=152_064),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12_288, tied=False),
    "meta-llama/Llama-3.2-1B": _llama3(2048, 16, 32, 8192, rope_factor=32.0),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 28, 24, 8192, rope_factor=32.0),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 32, 32, 14_336, rope_factor=8.0, tied=False),
    "HuggingFaceTB/SmolLM2-135M": _smollm2(576, 30, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-360M": _smollm2(960, 32, 15, 5, 2560),
    "HuggingFaceTB/SmolLM2-1.7B": _smollm2(2048, 24, 32, 32, 8192, rope_theta=130_000.0),
}


def architecture_of(model_id: str) -> Architecture | None:
    """The shipped facts of a hub id, or None. The owner, the case, and `-Instruct` or `-Base` do not matter."""
    return {name.rpartition("/")[2].lower(): entry for name, entry in ARCHITECTURES.items()}.get(_bare(model_id))


def config_for(model_id: str) -> PretrainedConfig:
    """The configuration of a model whose facts are shipped. Raises HiloreError listing the known ids."""
    architecture = architecture_of(model_id)
    if architecture is None:
        raise HiloreError(
            f"--model {model_id}",
            "has no shipped architecture facts",
            "shipped are " + ", ".join(ARCHITECTURES) + "; or give a local folder with its config.json",
        )
    return architecture.config()


def _bare(model_id: str) -> str:
    name = model_id.rpartition("/")[2].lower()
    return name.removesuffix("-instruct").removesuffix("-base")
