"""MkDocs hooks: add the notebooks as pages, adapt links that leave the folder, convert formulas to MathML."""

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
_NOTEBOOK = re.compile(r"\]\(((?:\.\./)*)\.\./notebooks/(\w+)\.ipynb\)")
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+mugrpo_jax/[\w/]+\.py\)")


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

    A link to a notebook leads to its page. A link to a source file becomes text, because the source is folded
    under each function.
    """
    return _OUTSIDE.sub(r"\1", _NOTEBOOK.sub(r"](\1notebooks/\2.md)", markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers draw without a script."""
    content = _BLOCK.sub(lambda match: f"<p>{_mathml(match[1], 'block')}</p>", content)
    return _INLINE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)
