"""`spectrue bench verify`: the command, its floors, and that its peers and its check are right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from typer.testing import CliRunner

from spectrue.deploy import bench_verify, bench_verify_cases, cli
from spectrue.deploy.bench_verify_cases import OPS, PIPELINES, Case, floor_bytes, with_guess
from spectrue.deploy.bench_verify_check import Checked, check
from spectrue.deploy.bench_verify_inputs import Inputs, RowKind, make_inputs
from spectrue.deploy.bench_verify_peers import (
    Draw,
    flashinfer_peer,
    torch_match,
    torch_peers,
    torch_probs,
    torch_reject,
)
from spectrue.deploy.bench_verify_timing import Times, time_passes
from spectrue.kernels import dispatch, row_law

CPU = torch.device("cpu")
CASES = {case.name: case for case in PIPELINES + OPS}


def inputs(
    rows: RowKind = "peaked",
    *,
    batch: int = 4,
    k: int = 3,
    vocab_size: int = 300,
    draft_vocab_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    return make_inputs(
        rows,
        batch=batch,
        k=k,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        num_sets=2,
        dtype=dtype,
        device=CPU,
    )[1]


def of_case(case: Case, **more: Any) -> Inputs:
    draft_vocab_size = 150 if case.reduced else None
    return with_guess(case, inputs(case.rows, draft_vocab_size=draft_vocab_size, **more))


def test_the_command(tmp_path: Path) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "p.png"
    args = "bench verify --batch 2 --num-speculative-tokens 1 --vocab-size 300,200 --dtype float32"
    done = CliRunner().invoke(cli.app, [*args.split(), "--json", str(file), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "no GPU: this times the reference" in done.output
    assert "flashinfer needs CUDA; it is left out" in done.output
    for text in ("batch 2, V 300", "batch 2, V 200", *CASES):
        assert text in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    assert found["backend"] == "reference"
    assert found["versions"]["torch"] == torch.__version__
    assert found["dtype"] == "float32"
    assert found["num_speculative_tokens"] == 1
    assert found["copy_bandwidth"] > 1e8
    assert [(r["batch"], r["vocab_size"], r["name"]) for r in found["results"]] == [
        (b, v, name) for b, v in ((2, 300), (2, 200)) for name in CASES
    ]
    for r in found["results"]:
        assert r["num_rows"] == 2 * r["batch"]
        assert r["ours"]["p10"] <= r["ours"]["median"] <= r["ours"]["p90"]
        assert r["floor_us"] == pytest.approx(1e6 * r["floor_bytes"] / found["copy_bandwidth"])
        assert r["ratio_to_floor"] == pytest.approx(r["ours"]["median"] / r["floor_us"])
        assert r["checked"]["rows"] > 0
        assert r["checked"]["wrong"] == 0
        if r["kind"] == "pipeline":
            best = min(peer["median"] for peer in r["peers"].values())
            assert r["speedup"] == pytest.approx(best / r["ours"]["median"])
            assert 1 <= r["accept_length"] <= 2
        else:
            assert r["peers"] == {}
            assert r["speedup"] is None


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
from spectrue.deploy.cli import main
sys.argv = ["spectrue", *sys.argv[1:]]
main()
"""


def test_it_runs_without_ray_and_friends() -> None:
    blocked = {"ray", "fastapi", "pydantic", "starlette", "triton", "matplotlib", "yaml"}
    args = ["bench", "verify", "--quick", "--batch", "1", "--vocab-size", "64"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked), *args],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "batch 1, V 64" in done.stdout
    assert "argmax_lowest" not in done.stdout  # --quick


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--batch 0", "batch must be integers from 1 up, like 64,128, got '0'"),
        ("--batch 4,x", "batch must be integers from 1 up, like 64,128, got '4,x'"),
        ("--vocab-size 8", "vocab_size must be integers from 32 up, like 64,128, got '8'"),
        ("--num-speculative-tokens 0", "num_speculative_tokens must be at least 1, got 0"),
        ("--dtype int8", "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ("--json no/where.json", "json: there is no directory no"),
        ("--plot no/where.png", "plot: there is no directory no"),
    ],
)
def test_bad_options(
    args: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["spectrue", "bench", "verify", *args.split()])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    args = ["bench", "verify", "--plot", str(tmp_path / "p.png")]
    monkeypatch.setattr(sys, "argv", ["spectrue", *args])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    assert "spectrue[bench]" in capsys.readouterr().err


def test_sizes_by_default() -> None:
    gpu = torch.device("cuda")
    options = bench_verify.make_options(gpu)
    assert options.points() == [(b, 128256, PIPELINES + OPS) for b in (64, 1)]
    assert options.num_speculative_tokens == 4
    assert options.replays >= 50
    swept = bench_verify.make_options(gpu, plot=True).points()
    assert {b for b, v, _ in swept if v == 128256} == {1, 4, 16, 64, 256}
    assert {v for b, v, _ in swept if b == 64} == {32000, 49152, 128256, 151666}
    quick = bench_verify.make_options(gpu, quick=True).points()
    assert [(b, v) for b, v, _ in quick] == [(64, 128256)]


def test_floors() -> None:
    x = inputs(batch=4, k=3, vocab_size=300, draft_vocab_size=150)  # 16 rows of 600 bytes
    by_hand = {
        "greedy": 9600,
        "match, cuts": 9600,
        "coupled, flat rows": 9600,
        "process_logits": 9600,
        "rejection": 9600 + 4 * 600 + 4 * 300,
        "draw_inverse_cdf": 16 * 3 * 8 + 16 * 256,  # 3 chunks a row
        "verify_match": 8 * (16 + 12 + 16),
        "verify_rejection": 16 * 3 * 8 + 4 * (600 + 300) + 8 * (16 + 12 + 16),
    }
    assert {name: floor_bytes(CASES[name], x) for name in by_hand} == by_hand
    assert floor_bytes(CASES["greedy"], inputs(dtype=torch.float32)) == 16 * 1200
    assert bench_verify_cases.CHUNK == row_law.CHUNK


@pytest.mark.parametrize("name", [c.name for c in PIPELINES])
def test_inputs_are_realistic(name: str) -> None:
    case = CASES[name]
    x = of_case(case, batch=150, k=2, vocab_size=1000)
    _, accepted, invalid = case.run(x)
    reached = (accepted + 1).clamp(max=2).sum()
    share = 0.5 if case.cuts and case.method == "rejection" else 0.62
    share = 0.01 if case.reduced else share  # absent tokens are never accepted
    assert share < accepted.sum() / reached < 0.78
    assert not invalid.any()
    top = x.logits.float().softmax(1).amax(1)
    if case.rows == "peaked":
        assert 0.2 < top.mean() < 0.6
    elif case.rows != "normal":
        assert top.mean() == pytest.approx(float(case.rows[4:]), abs=0.02)


@pytest.mark.parametrize("cuts", [False, True])
def test_the_law_of_torch_is_the_reference_law(cuts: bool) -> None:
    x = inputs("normal", vocab_size=2000)  # bfloat16 logits have many ties
    want = bench_verify_cases.process(x, cuts).scaled().exp()
    want /= want.sum(1, keepdim=True)
    got = torch_probs(x, cuts)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", [c.name for c in PIPELINES if c.method != "coupled"])
def test_the_peers_decide_as_the_reference(name: str) -> None:
    case = CASES[name]
    x = of_case(case, batch=64)
    peer = next(iter(torch_peers(case).values()))  # by inverse CDF, at the same uniforms
    for got, want in zip(peer(x), case.run(x), strict=False):
        assert (got == want).flatten(1 if got.dim() > 1 else 0).float().mean() > 0.99
    if case.method == "greedy":
        assert torch.equal(peer(x)[0], case.run(x)[0])


def copies(x: Inputs, n: int) -> Inputs:
    """One request n times, each with its own random numbers and drafts."""
    one = x.requests(0, 1)
    torch.manual_seed(0)
    draft = torch.multinomial(one.draft_probs, n, replacement=True).T.flatten()
    rows = {
        name: getattr(one, name).repeat(n, *[1] * (getattr(one, name).dim() - 1))
        for name in ("logits", "temperature", "top_k", "top_p", "min_p", "uniform", "draft_probs")
    }
    return replace(
        one,
        **rows | {"uniform": torch.rand(n * (x.k + 1)), "coins": torch.rand(n * x.k)},
        draft=draft,
        guess=draft,
        cu=torch.arange(1, n + 1) * x.k,
    )


def p_values(output: Tensor, law: Tensor) -> list[float]:
    """Of the first token, and of the second where the first was accepted."""
    found = []
    for depth in range(2):
        tokens = output[output[:, depth] >= 0, depth]
        count = torch.bincount(tokens, minlength=law.shape[1]).double()
        expected = law[depth].double() / law[depth].double().sum() * len(tokens)
        likely = expected > 5
        assert not count[law[depth] == 0].any()
        pairs = [
            torch.cat([v[likely], v[~likely].sum()[None] + 1e-9]).numpy() for v in (count, expected)
        ]
        found.append(float(chisquare(*pairs, sum_check=False).pvalue))
    return found


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("how", ["cumsum", "noise"])
def test_the_peers_are_exact(how: Draw, cuts: bool) -> None:
    """Chi-square: the tokens' law is the target's, whatever was drafted."""
    x = copies(inputs("normal", k=1, vocab_size=40, batch=1), 20_000)
    probs = torch_probs(x, cuts)
    law = probs[:2]
    output, accepted = torch_reject(x, probs, how)
    assert 0.5 < accepted.float().mean() < 0.9
    assert min(p_values(output, law)) > 1e-3
    name = "match, cuts" if cuts else "match"
    peer = torch_peers(CASES[name])[f"torch, {how}"]
    assert min(p_values(peer(x)[0], law)) > 1e-3
    # and it would show a peer that draws from the target where it should from the residual
    wrong = output.clone()
    rejected = accepted == 0
    wrong[rejected, 0] = torch.multinomial(law[0], int(rejected.sum()), replacement=True)
    assert min(p_values(wrong, law)) < 1e-9


def test_the_walk_of_torch_is_verify_match() -> None:
    x = inputs(batch=50)
    want = dispatch.verify_match(x.target, x.guess, x.cu, x.valid, max_draft_tokens=x.k)
    for got, wanted in zip(torch_match(x, x.target), want, strict=False):
        assert torch.equal(got, wanted)


class FakeFlashinfer:
    """The signatures of flashinfer.sampling 0.6.18."""

    def softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        return (logits / temperature[:, None]).softmax(-1)

    def top_k_renorm_probs(self, probs: Tensor, top_k: int) -> Tensor:
        kept = torch.zeros_like(probs).scatter_(1, *reversed(probs.topk(top_k)))
        return torch.as_tensor(kept / kept.sum(1, keepdim=True))

    def top_p_renorm_probs(self, probs: Tensor, top_p: float) -> Tensor:
        assert 0 < top_p < 1
        return probs

    def top_p_sampling_from_probs(
        self, probs: Tensor, top_p: float, *, seed: Tensor, offset: Tensor
    ) -> Tensor:
        return self.sampling_from_logits(probs.log(), seed=seed, offset=offset)

    def sampling_from_logits(self, logits: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
        assert seed.shape == offset.shape == (1,)
        assert seed.dtype == offset.dtype == torch.int64
        return logits.argmax(-1).int()

    def chain_speculative_sampling(
        self,
        draft_probs: Tensor,
        draft_token_ids: Tensor,
        target_probs: Tensor,
        *,
        seed: Tensor,
        offset: Tensor,
    ) -> tuple[Tensor, ...]:
        batch, k, vocab_size = draft_probs.shape
        assert draft_token_ids.shape == (batch, k)
        assert draft_token_ids.dtype == torch.int32
        assert draft_probs.dtype == target_probs.dtype == torch.float32
        assert target_probs.shape == (batch, k + 1, vocab_size)
        torch.testing.assert_close(target_probs.sum(2), torch.ones(batch, k + 1))
        assert seed.shape == offset.shape == (1,)
        return draft_token_ids, torch.zeros(batch), torch.zeros(batch)


def test_flashinfer_is_called_as_it_wants_to_be() -> None:
    for case in PIPELINES:
        peer = flashinfer_peer(case, FakeFlashinfer())
        assert (peer is None) == (case.method in ("greedy", "coupled"))
        if peer is not None:
            assert len(peer(of_case(case))) >= 2
    assert flashinfer_peer(OPS[0], FakeFlashinfer()) is None


@contextmanager
def ours(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> Iterator[None]:
    """An op that the reference has right, and we have not."""
    real = getattr(dispatch, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result if dispatch._override.get() == "reference" else change(result)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, name, changed)
        yield


def test_a_peer_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Inputs) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench_verify, "torch_peers", lambda case: {"torch": fail})
    done = CliRunner().invoke(cli.app, ["bench", "verify", "--quick", "--vocab-size", "64"])
    assert done.exit_code == 0, done.output
    assert "note: match: torch: RuntimeError: no such kernel" in done.output


def test_wrong_rows_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    args = ["bench", "verify", "--quick", "--batch", "2", "--vocab-size", "64", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["spectrue", *args])

    def shift(result: Any) -> Any:
        return (result[0].roll(1, 0), *result[1:])

    with ours(monkeypatch, "verify_rejection", shift), pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    error = capsys.readouterr().err
    assert "rows differ from the reference: rejection (" in error
    assert "match" not in error
    wrong = {r["name"] for r in json.loads(file.read_text())["results"] if r["checked"]["wrong"]}
    assert "rejection" in wrong


@pytest.mark.parametrize("name", ["match", "match, flat rows", "rejection", "draw_inverse_cdf"])
def test_draws_at_an_edge_are_counted_apart(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Uniforms off by less than the tolerance: another token here and there, which is no fault."""
    case = CASES[name]
    x = of_case(case, batch=8, k=1, vocab_size=200_000 if "flat" in name else 300)
    edges = bench_verify_cases.process(x, False).scaled().double().softmax(1).cumsum(1)
    edge = edges.gather(1, x.target[:, None]).squeeze(1).float()
    x = with_guess(case, replace(x, uniform=edge))

    def moved(by: float) -> Checked:
        def run(x: Any) -> Any:
            if dispatch._override.get() == "reference":
                return case.run(x)
            if isinstance(x, tuple):
                return case.run((replace(x[0], uniform=x[0].uniform + by), x[1]))  # type: ignore[arg-type]
            return case.run(replace(x, uniform=x.uniform + by))

        return check(replace(case, run=run), [x])

    assert moved(0).near_edge == moved(0).wrong == 0
    found = [moved(by) for by in (-3e-6, 3e-6)]
    assert sum(c.near_edge for c in found) > 0
    assert all(c.ok for c in found)
    assert not moved(0.3).ok


def test_a_peer_that_fails_is_named() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\nmore")

    passes = {"ours": [lambda: None], "broken": [fail]}
    found = time_passes(passes, 8, CPU)
    assert isinstance(found["ours"], Times)
    assert found["broken"] == "RuntimeError: no such kernel"
    with pytest.raises(RuntimeError):
        time_passes({"ours": [fail]}, 8, CPU)


def test_flashinfer_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(probs: Tensor, top_k: int) -> Tensor:
        raise RuntimeError("ninja: build stopped\nmore")

    monkeypatch.setitem(
        sys.modules, "flashinfer.sampling", SimpleNamespace(top_k_renorm_probs=fail)
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: torch.empty(0))
    from spectrue.deploy.bench_verify_peers import load_flashinfer

    ops, why = load_flashinfer(torch.device("cuda"))
    assert ops is None
    assert why == "flashinfer: RuntimeError: ninja: build stopped ... more"
