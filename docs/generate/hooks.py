"""MkDocs hooks: add pages made from code and notebooks, and convert formulas to MathML."""

import html
import re
from pathlib import Path
from typing import Any

import pages
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, so that navigation and links find them."""
    root = Path(config.config_file_path).parent
    generated: dict[str, str | bytes] = {
        "reference/config.md": pages.config_page(),
        "reference/commands.md": pages.commands_page(),
    }
    for notebook in sorted((root / "notebooks").glob("*.ipynb")):
        generated |= pages.notebook_page(notebook)
    generated["notebooks/toy.py"] = (root / "notebooks" / "toy.py").read_text()
    for place, content in generated.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers draw without a script."""
    content = _BLOCK.sub(lambda match: f"<p>{_mathml(match[1], 'block')}</p>", content)
    return _INLINE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)
