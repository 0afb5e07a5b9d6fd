"use strict";
// Draws one chart with BokehJS from the data of `charts.py`. `page.js` calls `drawChart`.
const drawChart = (() => {
  const known = (values) => values.map((value) => (value === null ? NaN : value));
  const name = (item) => `run-${item.run}`;  // parts with the name of a run are switched off with it

  function newFigure(chart, options) {
    const figure = Bokeh.Plotting.figure({
      height: 270, sizing_mode: "stretch_width", toolbar_location: "above", y_axis_label: chart.y,
      tools: "xbox_zoom,xpan,reset,save", background_fill_color: null, border_fill_color: null,
      outline_line_color: null, ...options,
    });
    // On a touch screen a finger that moves over a chart scrolls the page.
    if (matchMedia("(pointer: coarse)").matches) figure.toolbar.active_drag = null;
    figure.toolbar.logo = null;
    figure.toolbar.autohide = true;
    for (const axis of [...figure.below, ...figure.left]) {
      axis.axis_label_text_font_style = "normal";
      axis.minor_tick_line_color = null;
    }
    for (const grid of figure.center) if (grid.dimension === 0) grid.visible = false;
    return figure;
  }

  function addHover(figure, renderers, tooltips) {
    if (renderers.length) figure.add_tools(new Bokeh.HoverTool({ renderers, tooltips, line_policy: "nearest" }));
  }

  function addMark(figure, dimension, mark) {
    const { label, place, color } = mark;
    const span = { location: place, dimension, line_color: color, line_dash: "dotted", name: name(mark) };
    figure.add_layout(new Bokeh.Span(span));
    if (!label) return;
    const where = dimension === "height" ? { x: place, y: 0, y_units: "screen" } : { x: 0, x_units: "screen", y: place };
    figure.add_layout(new Bokeh.Label({
      text: label, text_font_size: "10px", text_color: color, x_offset: 3, y_offset: 3, ...where,
    }));
  }

  // All lines of one run with the same style form one glyph.
  function addStrokes(figure, lines) {
    const source = new Bokeh.ColumnDataSource({ data: {
      xs: lines.map((line) => known(line.xs)), ys: lines.map((line) => known(line.ys)),
      color: lines.map((line) => line.color), alpha: lines.map((line) => line.alpha),
      what: lines.map((line) => line.what),
    } });
    const rough = lines.map((line) => line.errors ? null : known(line.ys));  // null: not smoothed
    (figure.smoothed ??= []).push({ source, rough });
    const fields = { xs: { field: "xs" }, ys: { field: "ys" }, line_color: { field: "color" }, line_alpha: { field: "alpha" } };
    return figure.multi_line({ ...fields, source, line_dash: lines[0].style, line_width: 1.8, name: name(lines[0]) });
  }

  function addDots(figure, line) {
    const source = new Bokeh.ColumnDataSource({ data: {
      x: known(line.xs), y: known(line.ys), what: line.xs.map(() => line.what),
      ...(line.errors && line.low ? { low: known(line.low), high: known(line.high) } : {}),
    } });
    if (line.errors && line.low) {
      figure.add_layout(new Bokeh.Whisker({
        base: { field: "x" }, lower: { field: "low" }, upper: { field: "high" }, source, upper_head: null,
        lower_head: null, line_color: line.color, line_width: 1.5, name: name(line),
      }));
    }
    const colors = { fill_color: line.color, line_color: line.color };
    return figure.scatter({ x: { field: "x" }, y: { field: "y" }, source, size: line.size, ...colors, name: name(line) });
  }

  function addBand(figure, line) {
    const data = { x: known(line.xs), y1: known(line.low), y2: known(line.high) };
    const source = new Bokeh.ColumnDataSource({ data });
    const fields = { x: { field: "x" }, y1: { field: "y1" }, y2: { field: "y2" } };
    figure.varea({ ...fields, source, fill_color: line.color, fill_alpha: 0.15, name: name(line) });
  }

  function lineChart(chart) {
    const options = {
      x_axis_label: chart.x,
      x_axis_type: chart.log.includes("x") ? "log" : "linear",
      y_axis_type: chart.log ? "log" : "linear",
    };
    for (const axis of ["x_range", "y_range"]) if (chart[axis]) options[axis] = chart[axis];
    const figure = newFigure(chart, options);
    const strokes = new Map(), dots = [];
    for (const line of chart.lines) {
      if (line.low && !line.errors) addBand(figure, line);
      if (line.style !== "points") {
        const key = `${line.run} ${line.style}`;
        strokes.set(key, [...(strokes.get(key) || []), line]);
      }
    }
    const drawn = [...strokes.values()].map((lines) => addStrokes(figure, lines));
    for (const line of chart.lines) if (line.dots) dots.push(addDots(figure, line));
    const form = chart.log.includes("x") ? "{0.00e+0}" : "{0.[0000]}";
    addHover(figure, drawn, [["", "@what"], [chart.x, `$snap_x${form}`], [chart.y, `$snap_y${form}`]]);
    addHover(figure, dots, [["", "@what"], [chart.x, `@x${form}`], [chart.y, `@y${form}`]]);
    for (const mark of chart.marks) addMark(figure, "height", mark);
    for (const level of chart.levels) addMark(figure, "width", level);
    if (chart.x === "stage") figure.below[0].ticker.min_interval = 1;
    return figure;
  }

  function barChart(chart) {
    const base = chart.groups.map(() => 0);
    const layers = chart.parts.map((part) => {
      const bottom = [...base];
      part.heights.forEach((height, i) => { base[i] += height; });
      const what = base.map(() => part.what);
      return { color: part.color, data: { group: chart.groups, bottom, top: [...base], height: part.heights, what } };
    });
    const figure = newFigure(chart, {
      x_range: new Bokeh.FactorRange({ factors: chart.groups }), y_range: [0, 1.08 * Math.max(...base)],
      x_axis_label: "stage",
    });
    const fields = { x: { field: "group" }, bottom: { field: "bottom" }, top: { field: "top" } };
    const drawn = layers.map(({ color, data }) => figure.vbar({
      ...fields, source: new Bokeh.ColumnDataSource({ data }), width: 0.8, fill_color: color, line_color: color,
    }));
    addHover(figure, drawn, [["", "@what"], ["stage", "@group"], [chart.y, "@height{0.[000]}"]]);
    figure.below[0].major_label_orientation = chart.groups.length > 12 ? 0.9 : "horizontal";
    return figure;
  }

  return async (chart) => {
    const figure = chart.kind === "bars" ? barChart(chart) : lineChart(chart);
    await Bokeh.Plotting.show(figure, document.getElementById(chart.target));
    return figure;
  };
})();
