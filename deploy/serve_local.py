"""`spectrue serve`: a Ray and a Serve of its own on this machine, from start to Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from spectrue.deploy.config import ServerConfig
from spectrue.deploy.processes import Descendants
from spectrue.workers.errors import ConfigError, SpectrueError
from spectrue.workers.model_store import resolve_model
from spectrue.workers.preflight import check_checkpoints

APP = "spectrue"
STATUS_PERIOD = 5.0  # seconds

# Before ray is imported. A variable that the user has set stays.
GPU_DEVICES = ("/dev/kfd", "/dev/nvidia0", "/dev/nvidiactl")
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # the replica sees no device
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call that comes after the end starts no new Ray
}


def serve_local(config: ServerConfig, console: Console) -> None:
    """Blocks until SIGINT or SIGTERM, and leaves no process behind."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell's background job comes with it ignored
    start = time.monotonic()
    descendants = Descendants()
    ready = False
    try:
        _check_port(config.serve.host, config.serve.port)
        with _step(console, f"Looking for {config.engine.model}"):
            config = _with_local_model(config, console)
        try:
            with _step(console, "Starting Ray"):
                _start_ray(config)
            with _step(console, f"Loading {config.engine.name}") as status:
                _deploy(config, status, console)
            ready = True
            _print_ready(config, console, time.monotonic() - start)
            _block(console)
        finally:
            _stop(console, descendants, config.serve.graceful_shutdown_timeout if ready else None)
    except KeyboardInterrupt:
        console.print("Stopped.")


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _step(console: Console, what: str) -> Iterator[Any]:
    """A spinner on a terminal, and lines that stay."""
    start = time.monotonic()
    console.print(f"{what} ...", highlight=False)
    with console.status(what) as status:
        yield status
    console.print(f"  done in {time.monotonic() - start:.1f} s", style="dim", highlight=False)


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except OSError as e:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror or e}. "
            "Stop what uses the port, or take another one with --port."
        ) from None


def _with_local_model(config: ServerConfig, console: Console) -> ServerConfig:
    """Fetched here, where the user sees it, and not by each rank."""
    engine = config.engine

    def report(text: str) -> None:
        console.print(f"  {text}", style="dim", highlight=False, soft_wrap=True)

    path = resolve_model(engine.model, progress=report)
    speculative = engine.speculative
    if speculative.draft_model is not None:
        draft = resolve_model(speculative.draft_model, progress=report)
        speculative = replace(speculative, draft_model=str(draft))
    engine = engine.replace(model=str(path), served_model_name=engine.name, speculative=speculative)
    check_checkpoints(engine)
    if engine.device == "auto" and _num_gpus() >= engine.tp_size:
        # Ray shows a rank the GPUs that it asked for, so the choice is made before.
        each = "a GPU" if engine.tp_size == 1 else f"GPUs for tp_size = {engine.tp_size}"
        report(f"device = cuda: this machine has {each}")
        engine = engine.replace(device="cuda")
    return replace(config, engine=engine)


def _num_gpus() -> int:
    """Without a context on them. torch is imported only where there is a driver."""
    if not any(os.path.exists(path) for path in GPU_DEVICES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _start_ray(config: ServerConfig) -> None:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        # Closed to others, and without the file that Ray would leave in ~/.ray.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray").setLevel(logging.ERROR)
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from spectrue.deploy.app import deployment_options

    logging.getLogger("ray.serve").setLevel(logging.ERROR)

    bundles = deployment_options(config)["placement_group_bundles"]
    needed = config.serve.num_replicas * sum(b["CPU"] for b in bundles)
    ray.init(
        address="local",  # never one that runs already
        num_cpus=max(os.cpu_count() or 1, int(needed + 1)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 2**20,  # only control data goes through it
    )
    signal.signal(signal.SIGTERM, _interrupt)  # Ray put its own there, which prints a stack
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": config.serve.host, "port": config.serve.port},
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )


def _deploy(config: ServerConfig, status: Any, console: Console) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from spectrue.deploy.app import build_app
    from spectrue.workers.ray_actor import loading_progress

    failure: list[BaseException] = []

    def run() -> None:
        try:
            serve.run(
                build_app(config),
                name=APP,
                route_prefix=config.serve.route_prefix,
                logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
            )
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    shown = None
    while thread.is_alive():
        for what, done, total in loading_progress():
            status.update(f"{what}: {done} of {total}")
            if what != shown:
                console.print(f"  {what}", style="dim", highlight=False)
                shown = what
        thread.join(0.25)
    if failure:
        raise _deploy_error(failure[0])


def _deploy_error(error: BaseException) -> SpectrueError:
    """Serve gives a replica's exception as text, inside its own traceback, in its status."""
    from ray import serve

    texts = [str(error)]
    if (application := serve.status().applications.get(APP)) is not None:
        texts += [application.message, *(d.message for d in application.deployments.values())]
    text = "\n".join(texts)
    found = re.findall(r"spectrue\.workers\.\w+\.\w+Error: (.*)", text)
    if found:
        return SpectrueError(found[-1])
    return SpectrueError(f"the replica did not start: {text.strip() or type(error).__name__}")


def _print_ready(config: ServerConfig, console: Console, seconds: float) -> None:
    host = config.serve.host
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{config.serve.port}{config.serve.route_prefix.rstrip('/')}"
    with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
        status = json.load(response)

    def line(text: str = "", **more: Any) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, **more)

    line()
    line(f"Spectrue serves {config.engine.name} at {url} (ready in {seconds:.0f} s)", style="bold")
    line(f"  verify method: {status['verify_method']}: {status['verify_reason']}")
    for decision in status.get("decisions", ()):
        if decision["setting"] == "speculative.verify_method":
            continue
        line(f"  {decision['setting']} = {decision['value']}: {decision['reason']}", style="dim")
    body = {
        "model": config.engine.name,
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "temperature": 0,
        "max_tokens": 64,
    }
    line("\nTry it:")
    line(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
    line("\nCtrl-C stops it.")


def _block(console: Console) -> None:
    """Until a signal. Says when the replica is replaced and when it is back."""
    from ray import serve

    before = "RUNNING"
    while True:
        time.sleep(STATUS_PERIOD)
        application = serve.status().applications.get(APP)
        if application is None:
            raise SpectrueError("Ray Serve lost the application")
        now = application.status.value
        if now != before:
            text = f"application {before} -> {now} {application.message}".rstrip()
            console.print(text, markup=False, highlight=False)
            before = now


def _stop(console: Console, descendants: Descendants, patience: float | None) -> None:
    """Running requests may finish first, for `patience` seconds; a second signal ends them.

    None: the server was never ready, so there are none to speak of.
    """
    try:
        descendants.note()
        _drain(console, patience)
    except KeyboardInterrupt:
        if patience is not None:
            console.print("Ending them.")
    except Exception as e:  # Serve is broken; all its processes are ended all the same
        console.print(f"Could not drain: {e}", markup=False, highlight=False)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows takes a moment and must be done
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        descendants.note()
        wait = 0.0  # an interrupted ray.init() leaves processes that nobody tells to go
        try:
            if "ray" in sys.modules and (ray := sys.modules["ray"]).is_initialized():
                wait = 5.0
                ray.shutdown()
        finally:
            descendants.end(wait)


def _drain(console: Console, patience: float | None) -> None:
    """Serve gives up at serve.graceful_shutdown_timeout, and itself ends with its Ray."""
    import ray
    from ray import serve

    if not ray.is_initialized() or APP not in serve.status().applications:
        return
    if patience is not None:
        console.print(
            f"\nStopping, running requests may finish (up to {patience:g} s); "
            "Ctrl-C again ends them ...",
            highlight=False,
        )
    # NOTE: in this thread, although it blocks. One that outlives ray.shutdown() starts a new Ray.
    serve.delete(APP, _blocking=False)
    while APP in serve.status().applications:
        time.sleep(0.2)
