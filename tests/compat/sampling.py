"""Sample completions with atroposlib's server classes, and print them as a JSON object.

A Python with atroposlib runs this program. Its arguments are the type and URL of the server and the tokenizer's folder.
"""

import asyncio
import json
import sys

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from transformers import AutoTokenizer


async def main(server_type, url, folder):
    config = APIServerConfig(
        server_type=server_type, base_url=url, model_name="policy", tokenizer_name=folder, api_key="none", timeout=60
    )
    manager = ServerManager([config])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"n": 2, "max_tokens": 6, "temperature": 1.0, "stop": ["<never>"]}
    async with manager.managed_server(tokenizer=tokenizer) as model:
        completion = await model.chat_completion(messages=[{"role": "user", "content": "hi"}], **options)
        nodes = model.get_state()["nodes"]
    found = {
        "reasons": [choice.finish_reason for choice in completion.choices],
        "texts": [choice.message.content for choice in completion.choices],
        "nodes": [{"tokens": node.tokens, "masks": node.masked_tokens, "logprobs": node.logprobs} for node in nodes],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
