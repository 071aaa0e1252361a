"""A small OpenAI-compatible server for a transformers model, greedy and without batching.

Answers /v1/models, /v1/completions (with echo and logprobs) and /v1/chat/completions, as vLLM does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class Served:
    """A model behind an address; `requests` records the paths and bodies that were asked."""

    def __init__(self, name: str, model: Any, tokenizer: Any, max_model_len: int) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.requests: list[tuple[str, Any]] = []
        self.lock = threading.Lock()
        self.echoes = True  # whether prompts get log-probabilities
        self.content: Any = ...  # another content of every message

    def models(self) -> Any:
        return {"data": [{"id": self.name, "max_model_len": self.max_model_len}]}

    def completion(self, body: Any) -> Any:
        prompts = body["prompt"]
        choices = []
        for number, ids in enumerate(prompts):
            if body.get("echo"):
                choices.append({"index": number, **self._echo(ids)})
            else:
                text = self._write(ids, body["max_tokens"], body.get("stop") or [])
                choices.append({"index": number, "text": text, "logprobs": None})
        return {"choices": choices}

    def chat(self, body: Any) -> Any:
        text = self.tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        content = self._write(ids, body["max_tokens"], body.get("stop") or [])
        if self.content is not ...:
            content = self.content
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}

    def answer(self, question: str, most: int, stop: list[str], chat: bool) -> str:
        """Return what is written after a question, or in reply to it."""
        if not chat:
            return self._write(self.tokenizer.encode(question), most, stop)
        messages = [{"role": "user", "content": question}]
        reply = self.chat({"messages": messages, "max_tokens": most, "stop": stop})
        return str(reply["choices"][0]["message"]["content"])

    def _echo(self, ids: list[int]) -> Any:
        logs = self._logits(ids).log_softmax(-1)
        every = [*ids, int(logs[-1].argmax())]
        if not self.echoes:
            every = every[-1:]
        values: list[float | None] = [None] if self.echoes else []
        tops: list[dict[str, float] | None] = [None] if self.echoes else []
        for row, token in zip(logs[-len(every[1:]) or -1 :], every[1:] or every, strict=True):
            best = int(row.argmax())
            values.append(float(row[token]))
            tops.append({str(best): float(row[best]), str(token): float(row[token])})
        return {
            "text": self.tokenizer.decode(every),
            "logprobs": {"token_logprobs": values, "top_logprobs": tops},
        }

    def _write(self, ids: list[int], most: int, stop: list[str]) -> str:
        ids, new = list(ids), []
        for _ in range(most):
            token = int(self._logits([*ids, *new])[-1].argmax())
            if token == self.tokenizer.eos_token_id:
                break
            new.append(token)
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        for word in stop:
            text = text.split(word)[0]
        return text

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with self.lock, torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits


@contextmanager
def serve(served: Served) -> Iterator[str]:
    """Answer requests on this machine while the block runs; gives the address, up to /v1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(served.models() if self.path == "/v1/models" else None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.requests.append((self.path, body))
            asked = {"/v1/completions": served.completion, "/v1/chat/completions": served.chat}
            self._answer(asked[self.path](body) if self.path in asked else None)

        def _answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(404 if value is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
