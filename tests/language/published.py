"""Make tokenizers in the format of Hugging Face: byte-level BPE as in GPT-2, or characters and bytes as in Llama."""
# ruff: noqa: RUF001  quotation marks of other languages

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = (
    "Hello, world! “Curly quotes”, it’s fine…",
    "中文字符测试：你好，世界。",
    "Привет, мир! Как дела?",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 e\u0301",
    "日本語\n\n\tमानक 한국어 \u2028 ñ€𝄞  two",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(folder: Path, **config: Any) -> Path:
    """Write a byte-level BPE tokenizer with ChatML's special tokens. Many characters consist of several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return _save(tokenizer, folder, {"eos_token": "<|im_end|>", "chat_template": CHATML, **config})


def byte_fallback(folder: Path, **config: Any) -> Path:
    """Write a tokenizer with tokens for known characters. Other characters become single bytes.

    The tokenizer adds a space in front of each text.
    """
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["▁", "▁▁", "▁w", "中", *sorted(set(TEXTS[0]) - set(" “”’…"))]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *single, *characters])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "▁"), ("▁", "w")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _save(tokenizer, folder, {"bos_token": "<s>", "eos_token": "</s>", **config})


def _save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
