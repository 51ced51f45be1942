"""The choice of a backend."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from spectrue.kernels import dispatch, reference

from .conftest import BACKEND

OPS = sorted(reference.__all__)
pytestmark = pytest.mark.skipif(BACKEND != "reference", reason="chooses backends itself")


def test_every_op_of_the_specification_is_public() -> None:
    assert sorted(dispatch.BACKENDS["reference"]) == OPS
    assert set(OPS) <= set(dispatch.__all__)
    assert all(hasattr(dispatch, name) for name in dispatch.__all__)


@pytest.mark.parametrize(("hip", "platform"), [(None, "cuda"), ("6.4", "hip")])
def test_platforms(monkeypatch: pytest.MonkeyPatch, hip: str | None, platform: str) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert dispatch.platform_of(torch.device("cpu")) == "cpu"
    assert dispatch.platform_of(torch.device("cuda", 0)) == platform
    with pytest.raises(NotImplementedError, match="meta"):
        dispatch.platform_of(torch.device("meta"))


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_an_op_without_an_implementation_is_refused(
    monkeypatch: pytest.MonkeyPatch, platform: dispatch.Platform
) -> None:
    monkeypatch.setattr(dispatch, "platform_of", lambda device: platform)
    monkeypatch.setitem(dispatch.BACKENDS, "triton", {})
    monkeypatch.setattr(dispatch, "_TRITON_OPS", {})
    with pytest.raises(NotImplementedError, match=f"argmax_lowest .* on {platform}"):
        dispatch.argmax_lowest(torch.zeros(1, 3))
    with pytest.raises(NotImplementedError, match=f"argmax_lowest .* on {platform}"):
        dispatch.argmax_lowest(logits=torch.zeros(1, 3))
    with dispatch.use_backend("reference"):
        assert dispatch.argmax_lowest(torch.zeros(1, 3)).tolist() == [0]
    with pytest.raises(NotImplementedError):
        dispatch.argmax_lowest(torch.zeros(1, 3))


def test_use_backend_takes_over_and_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        dispatch.BACKENDS, "triton", {"argmax_lowest": lambda logits: torch.tensor([42])}
    )
    monkeypatch.setattr(dispatch, "_TRITON_OPS", {})
    with dispatch.use_backend("triton"):
        assert dispatch.argmax_lowest(torch.zeros(1, 3)).tolist() == [42]
        with dispatch.use_backend("reference"):
            assert dispatch.argmax_lowest(torch.zeros(1, 3)).tolist() == [0]
        with pytest.raises(NotImplementedError, match="valid_rows"):
            dispatch.valid_rows(torch.zeros(1, 3))
    assert dispatch.argmax_lowest(torch.zeros(1, 3)).tolist() == [0]
    with pytest.raises(ValueError, match="reference, triton"), dispatch.use_backend("cuda"):
        pass


def test_every_op_is_there_in_triton_with_the_signature_of_the_specification() -> None:
    assert sorted(dispatch._TRITON_OPS) == OPS
    for name, module in dispatch._TRITON_OPS.items():
        ours = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        specified = inspect.signature(dispatch.BACKENDS["reference"][name]).parameters
        assert list(ours) == list(specified), name
        assert [(p.kind, p.default) for p in ours.values()] == [
            (p.kind, p.default) for p in specified.values()
        ], name


def test_a_platform_without_triton_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(dispatch.BACKENDS, "triton", {})
    error = ModuleNotFoundError("No module named 'triton'", name="triton")

    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with (
        dispatch.use_backend("triton"),
        pytest.raises(NotImplementedError, match=r"argmax_lowest on cpu .*spectrue\[gpu\]"),
    ):
        dispatch.argmax_lowest(torch.zeros(1, 3))
    error = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    with dispatch.use_backend("triton"), pytest.raises(ModuleNotFoundError, match="numpy"):
        dispatch.argmax_lowest(torch.zeros(1, 3))


def test_importing_it_needs_no_triton() -> None:
    code = "import sys; import spectrue.kernels.dispatch; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
