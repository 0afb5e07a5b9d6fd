"use strict";
// Draws the charts one by one in the colours of the page, and shows the samples.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const figures = [];  // the Bokeh figures drawn so far

  // -- colours

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function paint(figure) {
    const text = css("--text"), soft = css("--soft"), rule = css("--rule");
    for (const axis of [...figure.below, ...figure.left]) {
      const colors = { axis_label_text_color: soft, major_label_text_color: text, axis_line_color: rule,
        major_tick_line_color: rule };
      if ("group_text_color" in axis) Object.assign(colors, { group_text_color: text, separator_line_color: rule });
      axis.setv(colors);
    }
    for (const item of figure.center) if (item.grid_line_color !== undefined) item.grid_line_color = rule;
  }

  function repaint() {
    if (matchMedia("print").matches) return;
    root.dataset.drawn = getComputedStyle(root).colorScheme;
    figures.forEach(paint);
  }

  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  function setTheme(theme) {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = `theme: ${theme}`;
    repaint();
    try { localStorage.setItem("mugrpo-theme", theme); } catch { /* no storage: the theme is not remembered */ }
  }
  let theme = "system";
  try { theme = localStorage.getItem("mugrpo-theme") || theme; } catch { /* as above */ }
  setTheme(themes.includes(theme) ? theme : "system");
  button.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(button.textContent.slice(7)) + 1) % themes.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  // A canvas cannot be redrawn for printing. The style sheet scales it to the width of a printed column and
  // inverts the colours of a chart that was drawn for a dark screen.
  addEventListener("beforeprint", () => {
    for (const chart of document.querySelectorAll(".chart")) {
      chart.style.setProperty("--screen-width", `${chart.clientWidth}px`);
      chart.style.setProperty("--print-zoom", (310 / chart.clientWidth).toFixed(3));
    }
  });

  // -- charts

  const hidden = new Set();  // numbers of the runs that are switched off

  function showRuns(figure) {
    for (const part of [...figure.renderers, ...figure.center]) {
      if (part.name?.startsWith("run-")) part.visible = !hidden.has(part.name.slice(4));
    }
  }

  // Exponential moving average, corrected for its start. It starts again behind a gap (NaN), so at each stage.
  function average(values, share) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (Number.isNaN(value)) { sum = weight = 0; return value; }
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  }

  const smoothing = document.getElementById("smoothing");
  function smooth(figure) {
    const share = Number(smoothing.value);
    for (const { source, rough } of figure.smoothed ?? []) {
      const ys = rough.map((values, i) => values === null ? source.data.ys[i] : average(values, share));
      source.data = { ...source.data, ys };
    }
  }
  smoothing.addEventListener("input", () => {
    smoothing.nextElementSibling.textContent = smoothing.value;
    figures.forEach(smooth);
  });

  const pause = () => new Promise((done) => setTimeout(done));

  async function drawAll() {
    for (const chart of data.charts) {
      try {
        const figure = await drawChart(chart);
        figures.push(figure);
        paint(figure);
        showRuns(figure);
        if (Number(smoothing.value)) smooth(figure);
        document.getElementById(chart.target).dataset.drawn = "yes";
      } catch (error) {
        console.error(chart.target, error);
      }
      document.body.dataset.interactive ??= Math.round(performance.now());
      await pause();
    }
    document.body.dataset.ready = "yes";
  }

  for (const box of document.querySelectorAll(".run-switch")) {
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(box.value); else hidden.add(box.value);
      figures.forEach(showRuns);
      if (samples) samples.show();
    });
  }
  for (const box of document.querySelectorAll("[data-only]")) {
    box.addEventListener("change", () => {
      document.getElementById(`table-${box.dataset.only}`).classList.toggle("only-differing", box.checked);
    });
  }

  // -- samples

  const number = (value) => (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 1e4))
    ? value.toPrecision(3) : value.toExponential(1);

  function token(sample, i) {
    const span = document.createElement("span");
    const logRatio = sample.logp[i] - sample.behavior[i];
    span.className = "token";
    if (sample.vetoed.includes(i)) span.classList.add("veto");
    else if (Math.abs(logRatio) > 0.05) {
      span.classList.add(logRatio < 0 ? "down" : "up");
      span.style.setProperty("--strength", Math.min(0.12 + Math.abs(logRatio) / 4, 0.75).toFixed(2));
    }
    if (sample.triggers.includes(i)) span.classList.add("trigger");
    if (i === sample.pieces.length - 1 && sample.finish === "stop" && sample.pieces[i] === "") {
      span.innerHTML = '<span class="end">[end]</span>';
    } else {
      span.textContent = sample.pieces[i];
    }
    span.dataset.i = i;
    return span;
  }

  function describe(sample, i) {
    const ratio = Math.exp(sample.logp[i] - sample.behavior[i]);
    const text = JSON.stringify(sample.pieces[i]);
    const veto = sample.vetoed.includes(i) ? " · vetoed" : sample.triggers.includes(i) ? " · trigger" : "";
    return `token ${i} ${text} · ρ = ${number(ratio)} · log π = ${number(sample.logp[i])}` +
      ` · log b = ${number(sample.behavior[i])}${veto}`;
  }

  function response(sample) {
    const article = document.createElement("article");
    article.className = "response";
    const name = data.runs.length > 1 ? `${data.runs[sample.run]} · ` : "";
    const title = document.createElement("h3");
    title.textContent = `${name}stage ${sample.stage} · reward ${number(sample.reward)} · advantage ` +
      `${number(sample.advantage)} · ${sample.pieces.length} tokens · ${sample.finish}` +
      (sample.status === "ok" ? "" : ` · ${sample.status}`) +
      (sample.vetoed.length ? ` · ${sample.vetoed.length} vetoed` : "") + (sample.cut ? ` · ${sample.cut}` : "");
    const prompt = document.createElement("pre");
    prompt.className = "prompt";
    prompt.tabIndex = 0;
    prompt.textContent = sample.prompt;
    const text = document.createElement("pre");
    text.tabIndex = 0;
    text.setAttribute("aria-label", "response; the arrow keys move through its tokens");
    const shown = Math.min(sample.logp.length, sample.pieces.length);
    for (let i = 0; i < shown; i++) text.append(token(sample, i));
    let current = -1;
    const select = (i) => {
      if (current >= 0) text.children[current].classList.remove("current");
      current = Math.max(0, Math.min(i, shown - 1));
      text.children[current].classList.add("current");
      document.getElementById("readout").textContent = describe(sample, current);
    };
    const pointed = (event) => {
      const span = event.target.closest("[data-i]");
      if (span) select(Number(span.dataset.i));
    };
    text.addEventListener("pointerover", pointed);
    text.addEventListener("click", pointed);
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      select(current + step);
    });
    const parts = [title, prompt];
    if (sample.answer) {
      const expected = document.createElement("p");
      expected.className = "expected";
      const answer = document.createElement("code");
      answer.textContent = sample.answer;
      expected.append("expected answer: ", answer);
      parts.push(expected);
    }
    article.append(...parts, text);
    return article;
  }

  function sampleList() {
    const form = document.getElementById("filters");
    if (!form) return null;
    const list = document.getElementById("sample-list"), more = document.getElementById("more");
    let limit = 8;
    const add = (select, values) => {
      for (const [value, label] of values) select.add(new Option(label, value));
    };
    add(form.run, data.runs.map((name, i) => [i, name]));
    add(form.stage, [...new Set(data.samples.map((s) => s.stage))].sort((a, b) => a - b).map((s) => [s, s]));
    const wanted = (sample) => !hidden.has(String(sample.run)) &&
      (form.run.value === "" || sample.run === Number(form.run.value)) &&
      (form.stage.value === "" || sample.stage === Number(form.stage.value)) &&
      (form.low.value === "" || sample.reward >= Number(form.low.value)) &&
      (form.high.value === "" || sample.reward <= Number(form.high.value)) &&
      (!form.vetoed.checked || sample.vetoed.length > 0);
    const show = () => {
      const found = data.samples.filter(wanted);
      list.replaceChildren(...found.slice(0, limit).map(response));
      document.getElementById("count").textContent = `${found.length} of ${data.samples.length} responses`;
      more.hidden = found.length <= limit;
    };
    form.addEventListener("input", () => { limit = 8; show(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => { limit += 16; show(); });
    return { show };
  }

  const samples = sampleList();
  if (samples) samples.show();
  drawAll();
})();
