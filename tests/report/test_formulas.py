"""The formulas of the documentation, laid out by a browser with the style sheet and the font of the site."""

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "generate"))
formula_font = importlib.import_module("formula_font")
hooks = importlib.import_module("hooks")

BOXES = """(() => {
  const box = (query) => document.querySelector(query).getBoundingClientRect();
  const [base, low] = ["msub > :first-child", "msub > :last-child"].map(box);
  const [top, bottom] = ["mfrac > :first-child", "mfrac > :last-child"].map(box);
  return {size: parseFloat(getComputedStyle(document.querySelector("math")).fontSize),
    lowered: low.bottom - base.bottom, gap: bottom.top - top.bottom,
    root: box("msqrt > :last-child").left - box("msqrt").left};
})()"""


@pytest.mark.parametrize("fonts", ["of the site", "of the site, none for formulas installed"])
def test_subscripts_are_low_and_fraction_bars_have_room(browser, tmp_path, fonts):
    style = (DOCS / "extra.css").read_text()
    assert '"Formula distances"' in style
    if "none" in fonts:
        style = re.sub(r'(?<=font-family: )"Latin.*?(?="Formula distances")', "", style, flags=re.S)
        assert "Math" not in style.partition("math {")[2].replace("\n", " ")
    (tmp_path / "formula.ttf").write_bytes(formula_font.build())
    formulas = (r"m_t", r"\frac{n}{n}", r"\sqrt{t}")
    shown = hooks.on_page_content("".join(rf'<span class="arithmatex">\({tex}\)</span> ' for tex in formulas))
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><style>{style}</style><body>{shown}')
    browser.open(page, wait="document.fonts.ready.then(() => true)")
    found = browser.evaluate(BOXES)
    assert found["lowered"] > 0.12 * found["size"], found  # a subscript, not the next letter
    assert found["gap"] > 0.2 * found["size"], found  # the bar strikes through nothing
    assert found["root"] > 0.2 * found["size"], found  # there is a root sign
