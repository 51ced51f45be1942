"""What README, CONTRIBUTING and docs/ say can be typed, opened and found."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from spectrue.deploy import cli
from spectrue.deploy.config import ENV_PREFIX, NOT_SETTINGS, _env_name, settings
from spectrue.deploy.protocol import ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# A path in backticks: it has a folder or a known ending, and nothing that is not a path.
PATH = re.compile(r"\.?[A-Za-z_][\w.-]*(?:/[\w.*-]+)*/?")
ENDINGS = (".py", ".md", ".yaml", ".toml", ".txt")
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != ".git"}
PLANNED = {"kernels/triton_*"}  # named as a rule, with no file yet


def code_blocks(text: str, *languages: str) -> Iterator[str]:
    """The fenced blocks of these languages."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language in languages:
            yield block


def shell_lines(text: str) -> Iterator[str]:
    for block in code_blocks(text, "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield line.strip()


def commands(text: str, program: str) -> list[list[str]]:
    """Arguments of each line that runs `program`, in blocks and in backticks."""
    found = []
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    for line in (*shell_lines(text), *spans):
        words = shlex.split(line, comments=True) if program in line else []
        if words and words[0].rsplit("/", 1)[-1] == program:
            found.append(words[1:])
    return found


def parse(args: list[str], optional: bool = True) -> None:
    """Walk the real command tree. Raises click's UsageError; runs nothing.

    `optional`: a command's name alone, as in a sentence, may leave out what it requires.
    """
    command: Any = typer.main.get_command(cli.app)
    context = command.context_class(command, info_name="spectrue")
    name: str | None = "spectrue"
    while hasattr(command, "commands"):
        if not args:
            return  # a group's name alone, in a sentence
        name, command, args = command.resolve_command(context, args)
        context = command.context_class(command, info_name=name, parent=context)
    if args or not optional:
        command.make_context(name, list(args), parent=context.parent)


def make_targets() -> set[str]:
    names: set[str] = set()
    for line in re.findall(r"^([A-Za-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.M):
        names.update(line.split())
    return names


def check_make(args: list[str], targets: set[str], variables: set[str]) -> None:
    for word in args:
        name, assigned, _ = word.partition("=")
        if assigned:
            assert name in variables, f"make {word}: the Makefile has no variable {name}"
        else:
            assert name in targets, f"make {word}: the Makefile has no such target"


def make_variables() -> set[str]:
    return set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.M))


def links(text: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


def check_link(source: Path, link: str) -> None:
    if re.match(r"[a-z]+:", link):
        return
    path, _, anchor = link.partition("#")
    target = (source.parent / path).resolve() if path else source
    assert target.exists(), f"{source.name} links to {link}"
    assert target.is_relative_to(ROOT), f"{source.name} links out of the repository: {link}"
    if anchor:
        assert anchor in anchors(target.read_text()), f"{source.name}: no heading for {link}"


def named_paths(text: str) -> list[str]:
    """What stands in backticks and is a path of this repository."""
    found = []
    for span in re.findall(r"`([^`\s]+)`", text):
        known = span.split("/")[0] in FOLDERS and "/" in span
        if PATH.fullmatch(span) and (known or span.endswith(ENDINGS)) and span != "__init__.py":
            found.append(span)
    return found


def check_path(name: str) -> None:
    if name in PLANNED:
        return
    if "*" in name:
        assert list(ROOT.glob(name)), f"no file matches {name}"
    else:
        assert (ROOT / name).exists(), f"{name} does not exist"


def everything(find: Callable[..., Sequence[Any]], *args: str) -> list[Any]:
    """A test case for each thing that `find` finds in the documents."""
    cases = []
    for doc in DOCS:
        for i, item in enumerate(find(doc.read_text(), *args)):
            words = item if isinstance(item, str) else " ".join(item)
            cases.append(pytest.param(doc, item, id=f"{doc.name}:{i}:{words[:40]}"))
    return cases


@pytest.mark.parametrize(("doc", "args"), everything(commands, "spectrue"))
def test_spectrue_commands_parse(doc: Path, args: list[str]) -> None:
    parse(args)


@pytest.mark.parametrize(("doc", "args"), everything(commands, "make"))
def test_make_targets_exist(doc: Path, args: list[str]) -> None:
    check_make(args, make_targets(), make_variables())


@pytest.mark.parametrize(("doc", "link"), everything(links))
def test_links_lead_somewhere(doc: Path, link: str) -> None:
    check_link(doc, link)


@pytest.mark.parametrize(("doc", "name"), everything(named_paths))
def test_named_files_exist(doc: Path, name: str) -> None:
    check_path(name)


def test_the_module_tables_are_complete() -> None:
    named = set(named_paths((ROOT / "docs" / "architecture.md").read_text()))
    for package in ("kernels", "workers", "deploy"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            assert name in named or path.name == "__init__.py", f"{name} is in no module table"


def test_variables_of_the_environment_exist() -> None:
    known = NOT_SETTINGS | {_env_name(setting) for setting in settings()}
    known |= {"SPECTRUE_TEST_BACKEND"}  # of tests/kernels
    for doc in DOCS:
        for name in re.findall(rf"`({ENV_PREFIX}\w+)`", doc.read_text()):
            assert name in known, f"{doc.name}: {name} is no setting"


def test_every_field_of_a_request_is_in_the_readme() -> None:
    http = (ROOT / "README.md").read_text().split("## HTTP")[1].split("## Configuration")[0]
    named = set(re.findall(r"\w+", http))
    fields = CompletionRequest.model_fields.keys() | ChatCompletionRequest.model_fields.keys()
    assert fields - named == set()


@pytest.mark.parametrize("section", ["engine", "engine.speculative", "serve"])
def test_every_setting_is_in_the_readme(section: str) -> None:
    """In the table of its section, which has no other."""
    table = (ROOT / "README.md").read_text().split(f"| `{section}` |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    valid = [s.rpartition(".") for s in settings()]
    assert sorted(named) == sorted(name for parent, _, name in valid if parent == section)


def test_python_blocks_compile() -> None:
    for doc in DOCS:
        for block in code_blocks(doc.read_text(), "python"):
            compile(block, doc.name, "exec")


# -- these checks can fail -----------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    text = "".join(doc.read_text() for doc in DOCS)
    for found in (commands(text, "spectrue"), commands(text, "make"), links(text)):
        assert len(found) >= 8
    assert len(named_paths(text)) >= 60


@pytest.mark.parametrize(
    "line",
    [
        "spectrue serf",
        "spectrue serve --prot 9000",
        "spectrue serve --port http",
        "spectrue serve extra",
        "spectrue bench engines",
        "spectrue bench engine --batch-size 0",
        "spectrue generate",
        "spectrue generate --temperature 0",
        ".venv/bin/spectrue generate hello --temperature hot",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (args,) = commands(f"```sh\n{line}\n```\n", "spectrue")
    with pytest.raises(Exception) as e:  # noqa: PT011 (typer may bring a click of its own)
        parse(args, optional=False)
    assert "UsageError" in [kind.__name__ for kind in type(e.value).__mro__]


@pytest.mark.parametrize("line", ["make serf", "make serve PROT=1", "make tset PORT=1"])
def test_a_wrong_target_is_found(line: str) -> None:
    (args,) = commands(f"```sh\n{line}\n```\n", "make")
    with pytest.raises(AssertionError, match="the Makefile has no"):
        check_make(args, make_targets(), make_variables())


@pytest.mark.parametrize("link", ["docs/no.md", "docs/sampling.md#no", "../elsewhere.md", "#no"])
def test_a_wrong_link_is_found(link: str) -> None:
    with pytest.raises(AssertionError):
        check_link(ROOT / "README.md", links(f"[x]({link})")[0])


@pytest.mark.parametrize("name", ["workers/no.py", "kernels/no_*.py", "NO.md", "tests/no"])
def test_a_wrong_path_is_found(name: str) -> None:
    (found,) = named_paths(f"see `{name}`.")
    with pytest.raises(AssertionError):
        check_path(found)
