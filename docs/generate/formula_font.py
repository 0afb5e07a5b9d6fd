"""Make the font that says where browsers place subscripts and fraction bars.

Browsers read these distances from the `MATH` table of the first font of a formula. Common text fonts have no
such table or, as DejaVu Sans, one full of zeros: subscripts then stand on the line and fraction bars strike
through denominators. This font has the table, a space, and a root sign in three sizes, because browsers look
for root signs only here. All letters come from other fonts.
"""

import io

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import newTable
from fontTools.ttLib.tables import otTables
from fontTools.ttLib.tables._g_l_y_f import Glyph

_UNIT = 1000  # units per em
_ROOTS = (1000, 1500, 2200)  # heights of the root signs
_NUMBERS = {
    "ScriptPercentScaleDown": 72,
    "ScriptScriptPercentScaleDown": 60,
    "DelimitedSubFormulaMinHeight": 1300,
    "DisplayOperatorMinHeight": 1300,
    "RadicalDegreeBottomRaisePercent": 60,
}
# Distances in thousandths of an em. All others are 0.
_DISTANCES = {
    "AxisHeight": 280,
    "AccentBaseHeight": 480,
    "SubscriptShiftDown": 220,
    "SubscriptTopMax": 400,
    "SubscriptBaselineDropMin": 150,
    "SuperscriptShiftUp": 380,
    "SuperscriptShiftUpCramped": 320,
    "SuperscriptBottomMin": 120,
    "SuperscriptBaselineDropMax": 250,
    "SubSuperscriptGapMin": 150,
    "SuperscriptBottomMaxWithSubscript": 380,
    "SpaceAfterScript": 40,
    "UpperLimitGapMin": 120,
    "UpperLimitBaselineRiseMin": 220,
    "LowerLimitGapMin": 150,
    "LowerLimitBaselineDropMin": 600,
    "FractionNumeratorShiftUp": 400,
    "FractionNumeratorDisplayStyleShiftUp": 680,
    "FractionDenominatorShiftDown": 400,
    "FractionDenominatorDisplayStyleShiftDown": 690,
    "FractionNumeratorGapMin": 70,
    "FractionNumDisplayStyleGapMin": 130,
    "FractionRuleThickness": 50,
    "FractionDenominatorGapMin": 70,
    "FractionDenomDisplayStyleGapMin": 130,
    "OverbarVerticalGap": 150,
    "OverbarRuleThickness": 50,
    "OverbarExtraAscender": 50,
    "UnderbarVerticalGap": 150,
    "UnderbarRuleThickness": 50,
    "UnderbarExtraDescender": 50,
    "RadicalVerticalGap": 60,
    "RadicalDisplayStyleVerticalGap": 140,
    "RadicalRuleThickness": 50,
    "RadicalExtraAscender": 50,
}


def build() -> bytes:
    """Return the font as a TrueType file."""
    font = FontBuilder(_UNIT, isTTF=True)
    roots = {f"root{height}": height for height in _ROOTS}
    names = [".notdef", "space", *roots]
    font.setupGlyphOrder(names)
    font.setupCharacterMap({0x20: "space", 0x221A: names[2]})
    font.setupGlyf(dict.fromkeys(names, Glyph()) | {name: _root(height) for name, height in roots.items()})
    font.setupHorizontalMetrics(dict.fromkeys(names, (500, 0)) | {"space": (250, 0)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": "Formula distances", "styleName": "Regular"})
    font.setupOS2(sTypoAscender=800, sTypoDescender=-200, sxHeight=450, sCapHeight=680)
    font.setupPost()
    font.font["MATH"] = newTable("MATH")
    font.font["MATH"].table = _math(roots)
    font.font["head"].created = font.font["head"].modified = 0  # equal builds give equal files
    file = io.BytesIO()
    font.save(file)
    return file.getvalue()


def _root(height: int) -> Glyph:
    """Draw a root sign of this height, from 200 below the line; a rule of thickness 50 continues it."""
    pen = TTGlyphPen(None)
    low, high = -200, height - 200
    middle = low + height // 2
    corners = [
        (40, middle - 40),
        (140, middle + 20),
        (250, low + 170),
        (460, high),
        (500, high),
        (500, high - 50),
    ]
    corners += [(490, high - 50), (270, low), (230, low), (110, middle - 45), (55, middle - 75)]
    pen.moveTo(corners[0])
    for corner in corners[1:]:
        pen.lineTo(corner)
    pen.closePath()
    return pen.glyph()


def _math(roots: dict[str, int]) -> otTables.MATH:
    constants = otTables.MathConstants()
    for field in constants.getConverters():
        value = _NUMBERS.get(field.name)
        if value is None:
            value = otTables.MathValueRecord()
            value.Value = _DISTANCES.get(field.name, 0)
        setattr(constants, field.name, value)
    table = otTables.MATH()
    table.Version = 0x00010000
    table.MathConstants = constants
    table.MathGlyphInfo = otTables.MathGlyphInfo()  # empty, but browsers refuse a font without it
    for field in table.MathGlyphInfo.getConverters():
        setattr(table.MathGlyphInfo, field.name, None)
    table.MathVariants = _larger(roots)
    return table


def _larger(roots: dict[str, int]) -> otTables.MathVariants:
    """Say which glyphs are larger forms of the root sign."""
    sizes = otTables.MathGlyphConstruction()
    sizes.GlyphAssembly, sizes.MathGlyphVariantRecord = None, []
    for name, height in roots.items():
        size = otTables.MathGlyphVariantRecord()
        size.VariantGlyph, size.AdvanceMeasurement = name, height
        sizes.MathGlyphVariantRecord.append(size)
    sizes.VariantCount = len(roots)
    found = otTables.MathVariants()
    found.MinConnectorOverlap, found.VertGlyphCount, found.HorizGlyphCount = 0, 1, 0
    found.VertGlyphCoverage, found.HorizGlyphCoverage = otTables.Coverage(), None
    found.VertGlyphCoverage.glyphs = [next(iter(roots))]
    found.VertGlyphConstruction, found.HorizGlyphConstruction = [sizes], []
    return found
