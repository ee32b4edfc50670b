"""The transformer, its published weights, and tokenizers. A conversation becomes logits like this:

    config = ModelConfig(...)                           # config.py: sizes, as fields of a published config.json
    config, params = weights.load("runs/qwen")          # weights.py: published safetensors become a tree of arrays
    tokenizer = load_tokenizer("runs/qwen")             # tokenizers.py: bytes; published_tokenizer.py: tokenizer.json
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)    # chat_messages.py: their forms
    logits = transformer.apply(params, config, tokens)  # transformer.py: pure functions

`sampling.decode` in `rlframe.language.decoding` chooses tokens from them.
"""

from rlframe.language.model.config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]
