"""SCRATCH until branch lm has it."""


class ByteTokenizer:
    bos_token_id = None
    eos_token_id = 256
    pad_token_id = 257
    vocab_size = 258
    eos_token = "<eos>"

    def encode(self, text, add_special_tokens=False):
        out = []
        for i, part in enumerate(text.split("<eos>")):
            if i:
                out.append(256)
            out += part.encode("utf-8", "surrogateescape")
        return out

    def decode(self, ids, skip_special_tokens=False):
        text, run = "", []
        for i in ids:
            if i < 256:
                run.append(i)
            else:
                text += bytes(run).decode("utf-8", "replace")
                run = []
                text += "" if skip_special_tokens or i != 256 else "<eos>"
        return text + bytes(run).decode("utf-8", "replace")

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        text = "".join(f"{m['role']}: {m['content']}<eos>\n" for m in messages)
        if add_generation_prompt:
            text += "assistant: "
        return self.encode(text) if tokenize else text


def load_tokenizer(name):
    assert name == "byte", name
    return ByteTokenizer()
