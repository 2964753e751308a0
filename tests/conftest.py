from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hilore_cli.measuring.models import PACKAGED_MODEL, Actor, load_actor
from hilore_cli.measuring.options import WorkloadOptions

TinyLlama = Callable[..., Actor]


@pytest.fixture(scope="session")
def smollm2() -> Actor:
    """The real SmolLM2-135M-Instruct, loaded once; leave its weights and mode as they are."""
    pytest.importorskip("gguf")
    return load_actor(WorkloadOptions(model=PACKAGED_MODEL))


@pytest.fixture
def tiny_llama() -> TinyLlama:
    """Builds actors around a random 2-layer Llama; keyword arguments change its configuration."""

    def build(*, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any) -> Actor:
        settings = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "use_cache": False,
            **changes,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LlamaConfig(**settings, attn_implementation=attention)
            model = LlamaForCausalLM(config).to(dtype)
        return Actor(model=model.eval(), tokenizer=None, name="tiny-llama", weights_digest="random")

    return build
