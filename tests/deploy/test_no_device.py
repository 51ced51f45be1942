"""The replica process computes nothing: none of our modules in it knows torch, no device is up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import asyncio, sys
from fastapi import FastAPI
from spectrue.deploy.app import RayReplica, build_app
from spectrue.deploy.config import ServerConfig, ServeSection
from spectrue.deploy.replica import LLMReplica
from spectrue.workers.config import EngineConfig
from spectrue.workers.model_store import resolve_model
from spectrue.workers.tokenizer import load_tokenizer

class Transport:
    async def status(self):
        return {"max_model_len": 64, "vocab_size": 128, "num_speculative_tokens": 3}
    async def poll(self, timeout):
        await asyncio.sleep(timeout)
        return []
    async def watch(self):
        await asyncio.Event().wait()
    async def shutdown(self):
        pass

config = ServerConfig(engine=EngineConfig(model=sys.argv[1]), serve=ServeSection())
build_app(config)
assert "torch" not in sys.modules
tokenizer = load_tokenizer(resolve_model(config.engine.model))  # transformers brings torch
tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
replica = LLMReplica(config, Transport(), tokenizer)

async def live():
    app = replica.__serve_build_asgi_app__()
    assert isinstance(app, FastAPI)
    async with app.router.lifespan_context(app):
        await replica.check_health()

asyncio.run(live())

import torch
ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "spectrue"]
assert len(ours) > 10
for module in ours:
    assert not module.__name__.startswith("spectrue.kernels"), module
    for value in vars(module).values():
        assert value is not torch, module
        assert not str(getattr(value, "__module__", "")).startswith("torch"), (module, value)
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
print("done")
"""


def test_the_replica_process_has_no_device_context(tiny_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tiny_llama)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
