"""MkDocs hooks: add the notebooks as pages, adapt links that leave the folder, convert formulas to MathML."""

import functools
import html
import re
from pathlib import Path
from typing import Any

import formula_font
import pages
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
_MODULE = re.compile(r"^::: (\S+)", re.M)
_NOTEBOOK = re.compile(r"\]\(((?:\.\./)*)\.\./notebooks/(\w+)\.ipynb\)")
_SOURCE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)\.\./(mugrpo_jax/[\w/]+)\.py\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the font, so that navigation and links find them."""
    root = Path(config.config_file_path).parent
    generated: dict[str, str | bytes] = {"formula.ttf": formula_font.build()}
    for notebook in sorted((root / "notebooks").glob("*.ipynb")):
        generated |= pages.notebook_page(notebook)
    for place, content in generated.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change links that leave the folder of the documentation, where a code host follows them.

    A link to a notebook leads to its page. A link from the name of a function to its source file leads to the
    function in the reference. Other links to source files become text, because the reference shows sources.
    """
    return _SOURCE.sub(_in_reference, _NOTEBOOK.sub(r"](\1notebooks/\2.md)", markdown))


def _in_reference(link: re.Match[str]) -> str:
    text, up, place = link.groups()
    name, module = text.strip("`"), place.replace("/", ".")
    page = _reference_pages().get(module)
    return f"[{text}]({up}reference/{page}#{module}.{name})" if page and name.isidentifier() else text


@functools.cache
def _reference_pages() -> dict[str, str]:
    """Return for each module of the reference the name of its page."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages.REFERENCE.glob("*.md")}
    return {module: name for name, text in texts.items() for module in _MODULE.findall(text)}


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers draw without a script."""
    content = _BLOCK.sub(lambda match: f"<p>{_mathml(match[1], 'block')}</p>", content)
    return _INLINE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)
