"""The packages are laid out and layered as docs/architecture.md says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "workers", "deploy")  # a package may import those before it
SOURCES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))

# module -> where it may be imported, as patterns of paths
CONFINED = {
    "triton": r"kernels/triton_\w+\.py",
    "ray": r"workers/ray_\w+\.py|deploy/\w+\.py",
    "pydantic": r"deploy/\w+\.py",
    "fastapi": r"deploy/\w+\.py",
    "starlette": r"deploy/\w+\.py",
    "vllm_flash_attn": r"workers/attention\.py",
    "flash_attn": r"workers/attention\.py",
}


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names of all modules that a file imports."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_kernels_is_a_namespace() -> None:
    """With an __init__.py our folder would shadow Hugging Face's `kernels`: transformers breaks."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels" / "__init__.py").exists()


def test_every_package_is_in_the_wheel() -> None:
    folders = {"spectrue." + str(p.parent.relative_to(ROOT)).replace("/", ".") for p in SOURCES}
    listed = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert listed is not None
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == folders


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        head, *rest = name.split(".")
        assert head not in PACKAGES, f"{path}: import spectrue.{head}, not {head}"
        if head == "spectrue" and rest:
            assert PACKAGES.index(rest[0]) <= PACKAGES.index(package), f"{path} imports {name}"
        if head == "spectrue" and package == "workers" and rest[0] == "kernels":
            assert "dispatch" in rest or len(rest) == 1, f"{path} imports {name}, not dispatch"
        if head in CONFINED:
            where = str(path.relative_to(ROOT))
            assert re.fullmatch(CONFINED[head], where), f"{path} imports {head}"


@pytest.mark.parametrize(
    "name", ["scheduler", "block_manager", "core", "config", "errors", "policy"]
)
def test_decisions_need_no_tensors(name: str) -> None:
    code = f"import sys, spectrue.workers.{name}; sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".typing")},
        timeout=120,
        check=False,
    )


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""


def test_the_engine_runs_without_ray_and_friends(tiny_llama: Path) -> None:
    """`bench engine` on a machine that has neither ray, fastapi, pydantic nor triton."""
    blocked = {"ray", "fastapi", "pydantic", "starlette", "triton", "vllm_flash_attn", "uvicorn"}
    code = BLOCK.format(blocked=blocked) + (
        "from spectrue.deploy.cli import main\n"
        "sys.argv = ['spectrue', 'bench', 'engine', '--model', sys.argv[1], '--max-tokens', '4',"
        " '--cpu-threads', '1', '--json']\n"
        "main()"
    )
    done = run_python(code, str(tiny_llama))
    assert done.returncode == 0, done.stderr
    assert '"tokens_per_second"' in done.stdout


def test_kernels_resolve_to_this_checkout() -> None:
    from spectrue.kernels import dispatch

    assert Path(dispatch.__file__).resolve() == ROOT / "kernels" / "dispatch.py"


def test_nothing_names_the_machine_it_was_made_on() -> None:
    """No absolute path of a developer's machine and no registry host in what is committed."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = listed.stdout.split() if listed.returncode == 0 else []
    private = re.compile(
        r"/(?:work|opt|root)/|\bpypi\.org|registry\.npmjs|deb\.debian|pythonhosted"
    )
    for name in files:
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or name in ("LICENSE", "tests/test_layout.py"):
            continue
        text = path.read_bytes().decode("utf-8", "ignore")
        assert not private.search(text), f"{name}: {private.search(text)}"
