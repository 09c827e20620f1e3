"""Peers of `serve.py` that have no server of their own, run by an interpreter in which they are installed.

    python bench/serve_peers.py embed FOLDER PORT      # FastAPI + sentence-transformers, one request at a time
    python bench/serve_peers.py generate FOLDER        # transformers, one prompt at a time, of those on stdin as JSON

The first has OpenAI's route of embeddings, as weft has.
"""

import base64
import json
import sys
import time
from typing import Any


def serve_embeddings(folder: str, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from sentence_transformers import SentenceTransformer

    model, app = SentenceTransformer(folder, device="cpu"), FastAPI()

    @app.post("/v1/embeddings")
    async def embeddings(body: dict[str, Any]) -> dict[str, Any]:  # a coroutine: one request at a time
        vectors = model.encode(body["input"], show_progress_bar=False)
        data = [
            {"object": "embedding", "index": row, "embedding": base64.b64encode(vector.tobytes()).decode()}
            for row, vector in enumerate(vectors)
        ]
        return {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def generate(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    jobs, tokens = json.load(sys.stdin), 0
    with torch.inference_mode():
        model.generate(**tokenizer("warm up", return_tensors="pt"), max_new_tokens=8, do_sample=False)
        start = time.perf_counter()
        for prompt, length in jobs:
            read = tokenizer(prompt, return_tensors="pt")
            out = model.generate(**read, max_new_tokens=length, do_sample=False, pad_token_id=0)
            tokens += out.shape[1] - read["input_ids"].shape[1]
        seconds = time.perf_counter() - start
    print(json.dumps({"tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    if sys.argv[1] == "embed":
        serve_embeddings(sys.argv[2], int(sys.argv[3]))
    else:
        generate(sys.argv[2])
