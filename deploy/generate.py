"""`spectrue generate`: one prompt through the engine in this process, no Ray."""

from __future__ import annotations

import sys

from rich.console import Console

from spectrue.workers.config import EngineConfig
from spectrue.workers.core import Request, SamplingParams
from spectrue.workers.errors import InvalidRequestError, SpectrueError


def generate(
    config: EngineConfig,
    prompt: str,
    params: SamplingParams,
    *,
    chat: bool,
    console: Console,
    fit: bool = False,
) -> None:
    """Text to stdout as it comes, everything else to `console`.

    `fit`: the user did not choose `max_tokens`, what the context leaves will do.
    """
    from spectrue.workers.async_engine import AsyncEngine
    from spectrue.workers.model_store import resolve_model

    path = resolve_model(config.model, progress=lambda text: console.print(text, style="dim"))
    config = config.replace(model=str(path), served_model_name=config.name)
    with console.status(f"loading {config.name}"):
        engine = AsyncEngine(config)
        tokenizer = engine.engine.tokenizer
        assert tokenizer is not None
    try:
        if chat:
            tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            tokens = tokenizer.encode(prompt)
        limit = engine.engine.info.max_model_len
        if not fit and len(tokens) < limit < len(tokens) + params.max_tokens:
            raise InvalidRequestError(
                f"max_tokens = {params.max_tokens} and a prompt of {len(tokens)} tokens exceed the "
                f"model's context of {limit} tokens; at most {limit - len(tokens)} are left",
                "max_tokens",
            )
        request = Request(request_id="0", prompt_token_ids=tuple(tokens), params=params)
        engine.submit([request])
        last = None
        while last is None or last.finish_reason is None:
            for last in engine.poll(timeout=60):
                sys.stdout.write(last.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        if last.finish_reason == "error":
            raise SpectrueError(f"the request failed: {last.error}")
        stats = last.spec_decode
        console.print(
            f"{last.num_output_tokens} tokens, {last.finish_reason}; accept length "
            f"{stats.accept_length:.2f}, verified by {stats.verify_method}",
            style="dim",
        )
    finally:
        engine.shutdown()
