"""The transformer, its weights in the format of Hugging Face, and tokenizers. The steps from a chat to logits:

    config = ModelConfig(...)                           # config.py: sizes, named as in config.json
    config, params = weights.load("runs/qwen")          # weights.py: safetensors as a tree of arrays
    tokenizer = load_tokenizer("runs/qwen")             # tokenizers.py: bytes; published_tokenizer.py: tokenizer.json
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)    # messages become dicts
    logits = transformer.apply(params, config, tokens)  # transformer.py: pure functions

`sampling.decode` in `rlframe.language.decoding` samples tokens from the logits.
"""

from rlframe.language.model.config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]
