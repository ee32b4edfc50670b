"""Make the golden files in this folder with `transformers`. With these files, the tests need no transformers or torch.

Run in a separate environment: pip install torch transformers 'numpy<2'; python tests/language/model/golden/make.py
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, max_position_embeddings=64)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)),
    "llama3_tied": (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=8, rope_parameters=LLAMA3,
            tie_word_embeddings=True, attention_bias=True, rms_norm_eps=1e-5,
        ),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES, num_attention_heads=6, num_key_value_heads=2,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        ),
    ),
    "qwen2_tied": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        ),
    ),
    "qwen3_tied": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
            attention_bias=True,
        ),
    ),
}  # fmt: skip
CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role != 'system' or not loop.first %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
# This template needs trim_blocks, lstrip_blocks, a `tojson` without ASCII escapes, `break`, and special tokens.
STRICT = """{{ bos_token }}{% for message in messages %}
    {% if message.role not in ['user', 'assistant'] %}
        {{ raise_exception('no role ' + message.role) }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
[{{ message.role }}] {{ message.content | trim | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}"""
CHATS = [
    [{"role": "user", "content": "Hi <b>'there'</b>"}],
    [
        {"role": "user", "content": " a\nb "},
        {"role": "assistant", "content": "ü😀"},
        {"role": "user", "content": '"c"'},
    ],
    [{"role": "user", "content": str(i)} if i % 2 == 0 else {"role": "assistant", "content": str(i)} for i in range(5)],
]


@torch.no_grad()
def make_model(name, kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():  # larger than usual initial weights, so that every layer affects the logits
        parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    tokens = torch.randint(0, config.vocab_size, (3, 20))
    # Row 0 is complete, row 1 is padded on the left, row 2 on the right.
    mask = torch.ones_like(tokens)
    mask[1, :5], mask[2, -7:] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    state = {f"tensor:{key}": value.numpy() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["tensor:lm_head.weight"]  # save_pretrained also omits this tensor
    arrays = dict(tokens=tokens.numpy().astype(np.int32), mask=mask.numpy() > 0, logits=logits.numpy())
    fields = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    fields["architectures"] = [kind.__name__]
    np.savez_compressed(HERE / f"{name}.npz", config=json.dumps(fields), **arrays, **state)


def make_chats():
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), bos_token="<s>", eos_token="</s>"
    )
    cases = []
    for template in (CHATML, STRICT):
        for messages in CHATS:
            for prompt in (False, True):
                text = tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
                )
                cases.append(dict(template=template, messages=messages, add_generation_prompt=prompt, text=text))
    (HERE / "chats.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    print("torch", torch.__version__, "transformers", transformers.__version__)
    for name, (kind, config) in MODELS.items():
        make_model(name, kind, config)
    make_chats()
