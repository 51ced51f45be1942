"""`spectrue`: the command line. Ray, fastapi, pydantic and torch load inside commands only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from spectrue.workers.config import EngineConfig, SpeculativeConfig
from spectrue.workers.errors import ConfigError, SpectrueError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measurements.")
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"spectrue {metadata.version('spectrue')}")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            print("spectrue, version unknown (not installed as a package)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    """Exact speculative decoding on Ray Serve."""


SPECULATIVE = SpeculativeConfig.__dataclass_fields__.keys()

# Flags of every command that runs an engine. All are None where they are not given.
ENGINE_FLAGS: dict[str, Any] = {
    "model": Annotated[
        str | None, typer.Option(help="A name, a folder with config.json, or a .gguf file.")
    ],
    "drafter": Annotated[
        str | None, typer.Option(help="none, ngram, draft_model, eagle, eagle3 or mtp.")
    ],
    "num_speculative_tokens": Annotated[
        int | None, typer.Option(help="k, the most draft tokens that a request gets in a step.")
    ],
    "tree_topk": Annotated[
        int | None,
        typer.Option(help="Children of a node of the draft tree; 1: drafts are a chain."),
    ],
    "tree_size": Annotated[int | None, typer.Option(help="Drafts of a tree.")],
    "tree_kind": Annotated[str | None, typer.Option(help="dynamic or static.")],
    "depth": Annotated[
        str | None, typer.Option(help="fixed, or adaptive: each step's k by what is measured.")
    ],
    "draft_model": Annotated[
        str | None,
        typer.Option(help="The drafter's checkpoint; alone, sets --drafter draft_model."),
    ],
    "verify_method": Annotated[str | None, typer.Option(help="auto, match or rejection.")],
    "draft_sampling": Annotated[str | None, typer.Option(help="auto, greedy, sampled or coupled.")],
    "dtype": Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")],
    "max_model_len": Annotated[
        int | None, typer.Option(help="Tokens of prompt and output together.")
    ],
    "cpu_threads": Annotated[int | None, typer.Option(help="Per rank.")],
}


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command ENGINE_FLAGS; those that were given reach it as the dict `engine`."""

    def run(**values: Any) -> None:
        engine = {name: values.pop(name) for name in ENGINE_FLAGS}
        command(engine={name: v for name, v in engine.items() if v is not None}, **values)

    own = signature(command, eval_str=True)
    parameters = [p for name, p in own.parameters.items() if name != "engine"]
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in ENGINE_FLAGS.items()
    ]
    # What typer reads of a command.
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@app.command()
@engine_flags
def serve(
    engine: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="A YAML file like default.yaml.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients ask for.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    reproducible: Annotated[
        bool | None,
        typer.Option("--reproducible/--no-reproducible", help="Text depends on the seed alone."),
    ] = None,
    strict_draft: Annotated[
        bool | None,
        typer.Option(
            "--strict-draft/--no-strict-draft", help="Refuse a head that fails its check."
        ),
    ] = None,
    tp_size: Annotated[int | None, typer.Option(help="Ranks that share the model.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    allow_simulated_acceptance: Annotated[
        bool,
        typer.Option(
            "--allow-simulated-acceptance", help="For benchmarks: serve what is not real text."
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, until Ctrl-C. Flags win over SPECTRUE_* and the config file."""
    from spectrue.deploy.config import load_config
    from spectrue.deploy.serve_local import serve_local

    engine |= {
        "served_model_name": served_model_name,
        "reproducible": reproducible,
        "strict_draft": strict_draft,
        "tp_size": tp_size,
        "max_num_seqs": max_num_seqs,
    }
    settings = load_config(config, {"serve.host": host, "serve.port": port, **_dotted(engine)})
    if settings.engine.speculative.simulates and not allow_simulated_acceptance:
        raise ConfigError(
            "speculative.simulated_acceptance makes up how many drafts are accepted, so the text "
            "is not the model's: give --allow-simulated-acceptance if this is a benchmark"
        )
    serve_local(settings, Console())


@app.command()
@engine_flags
def doctor(
    engine: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="A YAML file like default.yaml.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda or hip: as if this machine were one.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="gfx942, gfx950, sm_90 ...")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What this deployment would do on this machine, or on another, and what is wrong with it.

    Exit code 1 if anything is.
    """
    from spectrue.deploy.config import load_config
    from spectrue.deploy.doctor import run

    settings = load_config(config, _dotted(engine))
    if not run(settings, platform=platform, arch=arch, as_json=as_json):
        raise typer.Exit(1)


@app.command()
@engine_flags
def generate(
    engine: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The text to continue, or the user's message.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the chat template, or as it is.")
    ] = True,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: 256, or less where the context ends.")
    ] = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="May be given more than once.")] = None,
) -> None:
    """Complete one prompt in this process, without Ray, and print the text as it comes."""
    from spectrue.deploy.generate import generate as run
    from spectrue.workers.core import SamplingParams

    params = SamplingParams(
        max_tokens=256 if max_tokens is None else max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    fit = max_tokens is None
    run(_engine_config(engine), prompt, params, chat=chat, console=Console(stderr=True), fit=fit)


@app.command("train-draft")
def train_draft(
    out: Annotated[Path, typer.Option(help="Folder of the head, and of what is resumed.")],
    model: Annotated[str | None, typer.Option(help="The target, as for `serve`.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="eagle3.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines to answer; default: the model writes its own.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of answers to train on. Default: 20,000,000.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens that the head can draft. Default: 8192.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what OUT has.")] = False,
    passes: Annotated[
        float | None, typer.Option(help="Over the text, without --steps. Default: 8.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of the optimizer.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Of training, instead of steps.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="Default: 65536 on a GPU, 8192 on a CPU.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Parts in which a step is computed, for less memory.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a conversation. Default: 384.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 0.002.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the target.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    processes: Annotated[int | None, typer.Option(help="That write text at once.")] = None,
    evaluation_prompts: Annotated[
        str | None, typer.Option(help="JSON lines to measure on; default: text held out.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Drafts that are trained and measured. Default: 3.")
    ] = None,
) -> None:
    """Train a draft head for a model on text that the model writes. Ctrl-C, then --resume."""
    given = {name: v for name, v in locals().items() if name not in ("out", "resume")}
    from spectrue.deploy.train_draft import run

    if not run(out, {name: v for name, v in given.items() if v is not None}, resume):
        raise typer.Exit(130)


@bench.command("engine")
@engine_flags
def bench_engine(
    engine: dict[str, Any],
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: float = 0.0,
    num_prompts: Annotated[int | None, typer.Option(min=1)] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="JSON lines.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--stop-at-eos")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    load_format: Annotated[
        str | None, typer.Option(help="auto, or dummy: random weights of config.json's shapes.")
    ] = None,
    simulated_acceptance: Annotated[
        str | None, typer.Option(help="Made-up accept rates, one a draft: 0.8,0.6,0.45.")
    ] = None,
    simulated_accept_length: Annotated[
        float | None, typer.Option(help="The same, as 1 + the sum of the rates.")
    ] = None,
) -> None:
    """The engine alone: tokens/s, accept length, and the share of time outside the model."""
    from spectrue.deploy.bench_engine import run

    engine |= {
        "load_format": load_format,
        "simulated_acceptance": None
        if simulated_acceptance is None
        else _numbers(simulated_acceptance, "--simulated-acceptance"),
        "simulated_accept_length": simulated_accept_length,
    }
    run(
        _engine_config(engine),
        batch_size=batch_size,
        max_tokens=max_tokens,
        temperature=temperature,
        num_prompts=num_prompts,
        prompts_file=prompts_file,
        ignore_eos=ignore_eos,
        as_json=as_json,
    )


@bench.command("draft")
@engine_flags
def bench_draft(
    engine: dict[str, Any],
    temperature: Annotated[str, typer.Option(help="One or more, with commas between.")] = "0,1",
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    prompts_file: Annotated[
        Path | None, typer.Option(help="JSON lines; `category` in them gives a row each.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--stop-at-eos")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Speed against no speculation, in turns.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG. Needs matplotlib.")] = None,
) -> None:
    """A drafter: accept length by position, category and temperature; its gain in speed."""
    from spectrue.deploy.bench_draft import run

    run(
        _engine_config(engine),
        temperatures=_numbers(temperature, "--temperature"),
        batch_size=batch_size,
        max_tokens=max_tokens,
        prompts_file=prompts_file,
        num_prompts=num_prompts,
        ignore_eos=ignore_eos,
        compare=compare,
        json_file=json_file,
        plot=plot,
    )


@bench.command("verify")
def bench_verify(
    batch: Annotated[str | None, typer.Option(help="Requests in a step: 64,1.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="k, the draft tokens of a request.")
    ] = None,
    vocab_size: Annotated[str | None, typer.Option(help="Of the target: 128256,32000.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the logits.")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="A PNG; if no sizes are given, over a range of them. Needs matplotlib."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The main pipelines alone.")] = False,
) -> None:
    """The verify kernels: time against their bytes, torch and flashinfer, and a check."""
    from spectrue.deploy.bench_verify import run

    run(
        batch=batch,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=vocab_size,
        dtype=dtype,
        json_file=json_file,
        plot=plot,
        quick=quick,
    )


def _dotted(engine: dict[str, Any]) -> dict[str, Any]:
    """Flags under the names of settings."""
    return {
        f"engine.speculative.{name}" if name in SPECULATIVE else f"engine.{name}": value
        for name, value in engine.items()
    }


def _engine_config(engine: dict[str, Any]) -> EngineConfig:
    """Of flags by their settings' names. Without `deploy.config`, which needs pydantic and yaml."""
    from spectrue.workers.model_store import DEFAULT_MODEL

    given = {name: value for name, value in engine.items() if value is not None}
    speculative = {name: given.pop(name) for name in SPECULATIVE & given.keys()}
    if "draft_model" in speculative:
        speculative.setdefault("drafter", "draft_model")
    return EngineConfig(
        **{"model": DEFAULT_MODEL, **given}, speculative=SpeculativeConfig(**speculative)
    )


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} must be numbers with commas between, got {text!r}") from None


def main() -> None:
    try:
        app()
    except SpectrueError as e:
        Console(stderr=True).print(f"error: {e}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
