"""The documentation says what is true: its links, commands, config keys, paths and Python blocks."""

import ast
import dataclasses
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from mugrpo_jax import config as configs
from mugrpo_jax import objectives
from mugrpo_jax.cli import main as cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "generate"))
hooks = importlib.import_module("hooks")
pages = importlib.import_module("pages")

GENERATED = {f"reference/{name}": text for name, text in pages.reference_pages().items()}
for _notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
    GENERATED |= {k: v for k, v in pages.notebook_page(_notebook).items() if k.endswith(".md")}
SOURCES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
KEPT = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
TEXTS = KEPT | {f"docs/{name}": text for name, text in GENERATED.items()}
WRITTEN = {name: text for name, text in TEXTS.items() if name.removeprefix("docs/") not in GENERATED}

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_TO_SOURCE = re.compile(r"\[`?([^\]`]*)`?\]\((?:\.\./)*(mugrpo_jax/[\w/]+)\.py\)")
_COMMAND = re.compile(r"(?<![\w/.`-])mugrpo +([a-z].*)")  # not `mugrpo plan` in a sentence
SECTIONS = {field.name for field in dataclasses.fields(configs.RunConfig)}


def blocks(text, *languages):
    return [body for language, body in _FENCE.findall(text) if language in languages]


def prose(text):
    return _FENCE.sub("", text)


def commands(text):
    """The arguments of every `mugrpo` command in the shell blocks of a text."""
    for body in blocks(text, "bash", "text"):
        for line in body.replace("\\\n", " ").splitlines():
            for found in _COMMAND.findall(re.sub(r"(^|\s)#.*", "", line)):
                found = re.split(r"\s(?:&&|\||;)", found)[0]
                # The last line of a quoted script ends with the quote of its beginning.
                found = found.rstrip("'\"") if (found.count("'") + found.count('"')) % 2 else found
                if not found.startswith("COMMAND") and "[" not in found:  # a synopsis is no command
                    yield shlex.split(found)


def slugs(text):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", KEPT)
def test_relative_links_lead_to_files_of_the_repository(name):
    """Somebody who reads the page on a code host can follow its links, without a build."""
    for link in _LINK.findall(prose(KEPT[name])):
        place = link.partition("#")[0]
        if place and "://" not in link:
            target = ((ROOT / name).parent / place).resolve()
            assert target.is_relative_to(ROOT) and target.exists(), f"{name}: {link}"
        assert "#mugrpo_jax" not in link, f"{name}: {link}: only the built site has it; link the source file"
    for text, module in _TO_SOURCE.findall(KEPT[name]):
        if text.isidentifier():
            assert hasattr(importlib.import_module(module.replace("/", ".")), text), f"{name}: {text}"


def test_the_kept_reference_is_that_of_the_code():
    for name, text in pages.reference_pages().items():
        assert (pages.REFERENCE / name).read_text() == text, f"{name}: run python docs/generate/pages.py"


def test_every_module_of_the_reference_has_a_link_to_its_source():
    found = [
        pair
        for name, text in KEPT.items()
        if name.startswith("docs/reference/")
        for pair in re.findall(r"^(?:Source: \[.*?\]\(\.\./\.\./(.*?)\)\n\n)?^::: (\S+)", text, re.M)
    ]
    assert len(found) > 40
    for source, module in found:
        place = module.replace(".", "/")
        assert source in (f"{place}.py", f"{place}/__init__.py") and (ROOT / source).exists(), module


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for link in _LINK.findall(prose(hooks.on_page_markdown(TEXTS[name]))):
        if link.startswith(("http://", "https://")) or link.endswith(".svg"):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / name).parent / place if place else ROOT / name
        relative = str(target.resolve().relative_to(ROOT))
        assert relative in TEXTS or target.exists(), f"{name}: {link}"
        if anchor.startswith("mugrpo_jax."):
            module, _, attribute = anchor.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), f"{name}: {link}"
            assert f"::: {module}\n" in TEXTS[relative], f"{name}: {link} is not on that page"
        elif anchor:
            assert anchor in slugs(TEXTS[relative]), f"{name}: {link}"


@pytest.mark.parametrize("name", [name for name, text in WRITTEN.items() if blocks(text, "python")])
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "block"}  # a block may use what the blocks before it on the page have made
    for number, body in enumerate(blocks(WRITTEN[name], "python")):
        exec(compile(body, f"{name}, block {number}", "exec"), found)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if list(commands(text))])
def test_commands_and_their_flags_exist(name):
    for arguments in commands(TEXTS[name]):
        try:
            parsed = cli.parse(arguments)
        except SystemExit:
            pytest.fail(f"{name}: mugrpo {shlex.join(arguments)}")
        configs.load(None, getattr(parsed, "overrides", []))  # keys and values
        for argument in arguments:
            if argument.startswith("configs/"):
                configs.load(ROOT / argument)
        config = getattr(parsed, "config", None)
        if config is not None and not config.endswith(".yaml"):
            configs.load(config)  # the name of a shipped config


@pytest.mark.parametrize("name", TEXTS)
def test_commands_named_in_the_text_exist(name):
    known = {arguments[0] for arguments in commands(GENERATED["reference/commands.md"])}
    assert len(known) >= 9
    for command in re.findall(r"`mugrpo (\w+)", prose(TEXTS[name])):
        assert command in known | {"COMMAND"}, f"{name}: mugrpo {command}"


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if blocks(text, "yaml")])
def test_yaml_blocks_are_configs(name):
    for body in blocks(TEXTS[name], "yaml"):
        configs.build(configs.RunConfig, yaml.safe_load(body), name)


@pytest.mark.parametrize("name", WRITTEN)
def test_config_keys_named_in_the_text_exist(name):
    for dotted in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", prose(WRITTEN[name])):
        section, *rest = dotted.split(".")
        if section not in SECTIONS or rest[-1] in ("py", "html", "yaml", "json", "train"):
            continue
        place = configs.RunConfig()
        for part in (section, *rest):
            assert hasattr(place, part), f"{name}: {dotted}"
            place = getattr(place, part)


@pytest.mark.parametrize("name", WRITTEN)
def test_paths_named_in_the_text_exist(name):
    text = WRITTEN[name]
    inline = re.findall(r"`((?:configs|scripts|mugrpo_jax|tests|notebooks)/[\w./-]+)", prose(text))
    shell = [
        path
        for body in blocks(text, "bash")
        for path in re.findall(r"(?:^|\s|/)((?:configs|scripts|notebooks|tests)/[\w./-]+)", body)
    ]
    for path in inline + shell:
        assert (ROOT / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", WRITTEN)
def test_extras_that_are_installed_exist(name):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:mugrpo-jax|'\.)\[([\w,]+)\]", WRITTEN[name]):
        assert set(extras.split(",")) <= set(known), f"{name}: {extras}"


def test_every_key_is_in_the_config_page():
    def keys(config, prefix=""):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if isinstance(value, objectives.ObjectiveConfig):
                yield f"{prefix}{field.name}.name"
            elif dataclasses.is_dataclass(value):
                yield from keys(value, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name

    page = GENERATED["reference/config.md"]
    wanted = list(keys(configs.RunConfig()))
    assert len(wanted) > 50 and not [key for key in wanted if f"| `{key}` |" not in page]
    assert "| `batch.stages` | integer | `4` | generations in the run; at least 1 |" in page
    for name in objectives.OBJECTIVES:
        assert f"| `{name}` |" in page


def test_every_flag_is_in_the_commands_page(capsys):
    page = GENERATED["reference/commands.md"]
    names = re.findall(r"^    (\w+) ", cli.parser().format_help(), re.M)
    assert len(names) >= 9
    for name in names:
        with pytest.raises(SystemExit):
            cli.parser().parse_args([name, "--help"])
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert section and flags <= set(re.findall(r"--[a-z-]+", section[1])), name


def test_formulas_become_mathml():
    shown = hooks.on_page_content(
        r'<span class="arithmatex">\(\rho_t &lt; \tau\)</span> <div class="arithmatex">\[\frac{1}{Z}\]</div>'
    )
    assert shown.count("<math") == 2 and "arithmatex" not in shown
    assert "<mfrac>" in shown and "<mo>&#x0003C;</mo>" in shown


def test_the_site_has_a_switch_for_dark_mode_and_shows_sources():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    palettes = site["theme"]["palette"]
    assert [palette.get("scheme") for palette in palettes] == [None, "default", "slate"]
    assert all(palette["toggle"]["name"] and palette["toggle"]["icon"] for palette in palettes)
    handler = site["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    assert handler["options"]["show_source"] is True


def test_no_page_of_the_reference_has_everything():
    """One page with the whole reference is too long to find something in it."""
    counts = {name: text.count("\n::: ") for name, text in KEPT.items() if name.startswith("docs/reference/")}
    assert sum(counts.values()) > 40 and max(counts.values()) <= 12, counts


def test_links_out_of_the_documentation_lead_to_pages_of_the_site():
    shown = hooks.on_page_markdown(
        "[one](../notebooks/1_method.ipynb) [two](../../notebooks/2_losses.ipynb) "
        "[`veto.py`](../../mugrpo_jax/objectives/veto.py) "
        "[`veto_mask`](../../mugrpo_jax/objectives/veto.py) [run](../mugrpo_jax/cli/train.py)"
    )
    place = "../reference/losses.md#mugrpo_jax.objectives.veto.veto_mask"
    assert shown == (
        f"[one](notebooks/1_method.md) [two](../notebooks/2_losses.md) `veto.py` [`veto_mask`]({place}) run"
    )


def test_the_architecture_page_lists_the_imports_of_every_room():
    package, found = ROOT / "mugrpo_jax", {}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if names else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms = {name.split(".")[1] for name in names if name.startswith("mugrpo_jax.")}
            found.setdefault(room, set()).update(rooms - {room})
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", page[page.index("## Who imports whom") :], re.M))
    assert {path.parent.name for path in package.glob("*/__init__.py")} | {"toy"} == listed.keys()
    for room, text in listed.items():
        assert set(re.findall(r"`(\w+)`", text)) == found.get(room, set()) & listed.keys(), room


def test_the_architecture_page_lists_the_files_of_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", page, re.M))
    rooms = [path.parent for path in (ROOT / "mugrpo_jax").glob("*/__init__.py")]
    assert rooms
    for room in rooms:
        files = {path.stem for path in room.rglob("*.py")} - {"__init__"} | {
            p.parent.name for p in room.glob("*/*.py")
        }
        assert set(re.findall(r"`(\w+)`", listed[room.name])) == files, room.name
