/* Draws the page from a content object. window.pipar.draw(content) may be called repeatedly: charts are updated in place
   and keep their zoom. Nothing is fetched. */
(function () {
  "use strict";

  // The colours of Okabe and Ito, which colour-blind readers can distinguish; blocks, legend and tooltips also have names.
  const KINDS = {
    fc: { words: "forward on the device", fill: "#56b4e9", ink: "#000" },
    bc: { words: "backward on the device", fill: "#009e73", ink: "#fff" },
    u: { words: "activations up", fill: "#e69f00", ink: "#000" },
    fs: { words: "forward on the server", fill: "#0072b2", ink: "#fff" },
    bs: { words: "backward on the server", fill: "#cc79a7", ink: "#000" },
    d: { words: "gradients down", fill: "#d55e00", ink: "#fff" },
    step: { words: "optimiser step", fill: "#5c5c5c", ink: "#fff" },
    model: { words: "model on the link", fill: "#f0e442", ink: "#000" },
    load: { words: "load samples", fill: "#b8b8b8", ink: "#000" },
    noise: { words: "noise on inputs", fill: "#4d4d00", ink: "#fff" },
    encode: { words: "encode", fill: "#9d9d9d", ink: "#000" },
    decode: { words: "decode", fill: "#9d9d9d", ink: "#000" },
    protect: { words: "noise for privacy", fill: "#4d4d00", ink: "#fff" },
    pack: { words: "serialise model", fill: "#8c6d46", ink: "#fff" },
    install: { words: "load model", fill: "#8c6d46", ink: "#fff" },
    aggregate: { words: "averaging", fill: "#7a3e9d", ink: "#fff" },
  };
  const OTHER = { words: "other", fill: "#b8b8b8", ink: "#000" };
  const RUN_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d46", "#7f7f7f"];
  const SYMBOLS = ["circle", "rect", "triangle", "diamond", "roundRect", "pin", "arrow", "emptyCircle"];
  const LANES = ["device", "uplink", "server", "downlink"];
  const LANE_COLOURS = { device: "#56b4e9", uplink: "#e69f00", server: "#0072b2", downlink: "#d55e00" };
  const LANE_WORDS = { compute: "compute", io: "load/code", noise: "noise", uplink: "uplink", downlink: "downlink", core: "server", wait: "waiting" };
  const ROW = 24;

  const state = { content: null, view: null, against: null, zoom: { start: 0, end: 100 }, charts: new Map(), printing: false };
  const byId = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // --- helpers

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  }

  function replace(parent, ...children) {
    parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  }

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const digits = (value, count) => (isNumber(value) ? value.toFixed(count) : "–");
  const share = (value, count = 0) => (isNumber(value) ? `${(value * 100).toFixed(count)} %` : "–");
  const part = (value, whole) => (isNumber(value) && isNumber(whole) && whole > 0 ? value / whole : null);
  const short = (value) => (isNumber(value) ? String(Number(value.toPrecision(4))) : "–");
  const times = (value) => (isNumber(value) ? `${value.toFixed(2)}×` : "–");
  const mark = (run) => run.mark || "";
  const megabytes = (value) => (isNumber(value) ? `${(value / 1e6).toFixed(2)} MB` : "–");

  function duration(seconds) {
    if (!isNumber(seconds)) return "–";
    if (seconds === 0) return "0 s";
    const size = Math.abs(seconds);
    if (size < 1e-3) return `${(seconds * 1e6).toFixed(size < 1e-5 ? 2 : 1)} µs`;
    if (size < 1) return `${(seconds * 1e3).toPrecision(4).replace(/\.?0+$/, "")} ms`;
    return `${seconds.toFixed(size < 100 ? 3 : 1)} s`;
  }

  const seconds = (value) => (!isNumber(value) ? "–" : value < 0.01 && value > 0 ? duration(value) : `${value.toFixed(value < 100 ? 2 : 1)} s`);

  // Before printing, the computed style is still that of the screen.
  const ON_PAPER = { ink: "#000000", quiet: "#444444", line: "#bbbbbb", faint: "#f2f2f2", panel: "#ffffff", accent: "#003d6b" };

  function colours() {
    if (state.printing) return ON_PAPER;
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), faint: of("--faint"), panel: of("--panel"), accent: of("--accent") };
  }

  const narrow = () => window.innerWidth < 640;

  function table(caption, heads, rows, options = {}) {
    const cell = (tag, value, head, extra) => {
      const made = element(tag, { class: head.number ? "number" : null, ...extra });
      made.append(value === null || value === undefined ? "–" : value);
      return made;
    };
    const body = rows.map((row, place) =>
      element("tr", { class: options.best === place ? "best" : null },
        heads.map((head, column) => cell(column === 0 ? "th" : "td", row[column], head, column === 0 ? { scope: "row" } : {}))));
    const made = element("table", {},
      caption ? element("caption", {}, element("span", {}, caption)) : null,
      element("thead", {}, element("tr", {}, heads.map((head) => cell("th", head.title, head, { scope: "col" })))),
      element("tbody", {}, body));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || options.label || "Table" }, made);
  }

  const column = (title) => ({ title });
  const number = (title) => ({ title, number: true });

  // --- figures: a chart, its caption and its numbers

  function figure(parent, id, height) {
    let made = byId(id);
    if (!made) {
      made = element("figure", { id },
        element("h3", {}), element("figcaption", {}), element("div", { class: "chart", role: "img" }), element("div", { class: "numbers" }));
      parent.append(made);
    }
    made.dataset.drawn = "yes";
    const box = made.querySelector(".chart");
    box.style.height = `${height}px`;
    return made;
  }

  function show(parent, id, { title, caption, label, height, option, numbers }) {
    const made = figure(parent, id, height);
    made.querySelector("h3").textContent = title;
    made.querySelector("figcaption").textContent = caption || "";
    made.querySelector("figcaption").hidden = !caption;
    const box = made.querySelector(".chart");
    let chart = state.charts.get(id);
    if (!chart) {
      chart = echarts.init(box, null, { renderer: "svg" });
      state.charts.set(id, chart);
    }
    chart.resize();
    chart.setOption({ ...base(), ...option }, { notMerge: true });
    box.setAttribute("aria-label", label);
    const below = made.querySelector(".numbers");
    const wasOpen = below.querySelector("details")?.open;
    replace(below, numbers ? element("details", { open: wasOpen }, element("summary", {}, "The numbers"), numbers) : null);
    return chart;
  }

  function base() {
    const ink = colours();
    return {
      animation: false,
      textStyle: { color: ink.ink, fontFamily: getComputedStyle(document.body).fontFamily },
      aria: { enabled: false },
    };
  }

  function tooltip(extra) {
    const ink = colours();
    return { confine: true, backgroundColor: ink.panel, borderColor: ink.line, textStyle: { color: ink.ink, fontSize: 13 }, ...extra };
  }

  function valueAxis(name, extra = {}) {
    const ink = colours();
    return {
      type: "value", name, nameTextStyle: { color: ink.quiet, align: "left" }, axisLabel: { color: ink.quiet, ...extra.axisLabel },
      axisLine: { show: false }, splitLine: { lineStyle: { color: ink.line, opacity: 0.6 } }, ...without(extra, "axisLabel"),
    };
  }

  function categoryAxis(data, name) {
    const ink = colours();
    return {
      type: "category", data, name, nameLocation: "middle", nameGap: 26, nameTextStyle: { color: ink.quiet },
      axisLabel: { color: ink.quiet }, axisLine: { lineStyle: { color: ink.line } }, axisTick: { show: false },
    };
  }

  const without = (object, key) => Object.fromEntries(Object.entries(object).filter(([name]) => name !== key));

  function legend() {
    const ink = colours();
    return { top: 0, left: 0, type: "scroll", textStyle: { color: ink.ink }, itemWidth: 18, itemHeight: 11, inactiveColor: ink.quiet };
  }

  function forget() {
    for (const made of document.querySelectorAll("main figure")) {
      if (made.dataset.drawn === "yes") {
        made.dataset.drawn = "";
        continue;
      }
      state.charts.get(made.id)?.dispose();
      state.charts.delete(made.id);
      made.remove();
    }
  }

  // --- result

  const featured = (runs) => runs.find((run) => run.method === "pipar") || runs[runs.length - 1];

  function sentence(content) {
    const runs = content.runs;
    const run = featured(runs);
    if (!run) return "There is nothing to show yet.";
    const faster = Object.entries(run.speedups).map(([base, value]) =>
      value >= 1 ? `${value.toFixed(2)} times as fast as ${base}` : `${(1 / value).toFixed(2)} times as slow as ${base}`);
    const words = [`${run.name} trains an epoch in ${seconds(run.seconds)}`];
    if (!isNumber(run.seconds)) return run.running ? "The first epoch is not finished yet." : "No epoch was finished.";
    if (faster.length) words.push(`: ${faster.join(" and ")}`);
    const about = [run.world, run.setting].filter(Boolean).join("; ");
    words.push(about ? `. ${about[0].toUpperCase()}${about.slice(1)}.` : ".");
    if (content.running && !byId("live")) words.push(" The run has not finished, or was interrupted.");
    return words.join("");
  }

  function card(what, value, detail) {
    return element("div", { class: "card" }, element("span", { class: "value" }, value), element("span", { class: "what" }, what),
      detail ? element("span", { class: "what" }, detail) : null);
  }

  function drawResult(content) {
    const run = featured(content.runs);
    const cards = [];
    if (run && isNumber(run.seconds)) {
      cards.push(card(`per epoch, ${run.name}`, seconds(run.seconds), isNumber(run.predicted_s) ? `predicted ${seconds(run.predicted_s)}` : null));
      for (const [base, value] of Object.entries(run.speedups)) cards.push(card(`speed-up over ${base}`, times(value)));
      // For methods that did not run, both times are the planner's.
      for (const [base, value] of Object.entries(run.outlook?.methods ?? {})) {
        if (!(base in run.speedups)) cards.push(card(`speed-up over ${base}`, times(part(value, run.outlook.epoch_s)), "predicted for both"));
      }
      cards.push(card("server idle", share(part(run.server_idle_s, run.seconds)), `${seconds(run.server_idle_s)} of an epoch`));
      cards.push(card("devices idle", share(part(run.device_idle_s, run.seconds)), `${seconds(run.device_idle_s)} of an epoch`));
      const tested = isNumber(run.test_accuracy);
      if (tested || isNumber(run.val_accuracy)) {
        cards.push(card(tested ? "test accuracy" : "validation accuracy", `${share(tested ? run.test_accuracy : run.val_accuracy, 1)}${mark(run)}`,
          run.mark ? `† ${run.equivalence}` : content.accuracy_is_equal ? "the same with every method" : null));
      }
      for (const [name, value] of Object.entries(run.metrics ?? {})) {
        if (isNumber(value)) cards.push(card(`${run.is_tested ? "test" : "validation"} ${name}`, `${digits(value, 4)}${mark(run)}`, run.mark ? `† ${run.equivalence}` : null));
      }
      const [own] = ["accuracy", ...(run.evaluation?.names ?? [])].filter((name) => isNumber(run.evaluation?.mean[name]));
      if (own) {
        const words = (value) => (own === "accuracy" ? share(value, 1) : digits(value, 4));
        cards.push(card(`${own} on devices, mean`, words(run.evaluation.mean[own]), `worst decile ${words(run.evaluation.worst_decile[own])}`));
      }
      if (isNumber(run.epsilon)) cards.push(card("epsilon (updates)", short(run.epsilon), "highest of all devices"));
      if (isNumber(run.efficiency)) cards.push(card("efficiency", share(run.efficiency), "lower bound / actual time"));
    }
    replace(byId("cards"), cards.length ? cards : element("p", { class: "note" }, "No epoch is finished yet."));
    const begun = content.runs.some((one) => one.epochs.length);
    for (const id of ["utilisation", "learning", "costs"]) byId(id).hidden = !begun;
    replace(byId("comparison"), content.runs.length > 1 ? comparison(content.runs) : null);
  }

  function comparison(runs) {
    const bases = ["fl", "sfl"].filter((base) => runs.some((run) => base in run.speedups));
    const isPrivate = runs.some((run) => isNumber(run.epsilon));
    const heads = [column("method"), number("per epoch"), ...bases.map((base) => number(`vs ${base}`)),
      number("server idle"), number("device idle"), number("accuracy"), ...(isPrivate ? [number("epsilon")] : []), number("up"), number("down"), column("plan")];
    const rows = runs.map((run) => [run.name, seconds(run.seconds),
      ...bases.map((base) => (run.method === base ? times(1) : times(run.speedups[base]))),
      seconds(run.server_idle_s), seconds(run.device_idle_s), `${share(run.test_accuracy ?? run.val_accuracy, 1)}${mark(run)}`, ...(isPrivate ? [short(run.epsilon)] : []), megabytes(run.bytes_up), megabytes(run.bytes_down), run.replans.length ? `${run.plan}, then new plans` : run.plan]);
    const known = runs.map((run, place) => [run.seconds, place]).filter(([value]) => isNumber(value)).sort((a, b) => a[0] - b[0]);
    const made = table("Means over the epochs; the fastest method in bold.", heads, rows, { best: known.length ? known[0][1] : -1 });
    const marked = runs.filter((run) => run.mark).map((run) => `† ${run.name}: weights are ${run.equivalence}; the accuracy may differ from that of exact training.`);
    return [made, ...marked.map((words) => element("p", { class: "note" }, words))];
  }

  // --- the timeline

  const timelines = (content) => content.runs.map((run, place) => ({ run, place, shown: run.timeline[state.view] })).filter((one) => one.shown);

  function drawTimelines(content) {
    const has = (view) => content.runs.some((run) => run.timeline[view]);
    if (!state.view || !has(state.view)) {
      state.view = content.runs.some((run) => run.timeline.iteration?.uses_link) ? "iteration" : has("epoch") ? "epoch" : "iteration";
    }
    const found = timelines(content);
    byId("timeline-tools").hidden = byId("timeline-legend").hidden = found.length === 0;
    if (!found.length) {
      replace(byId("timelines"), element("p", { class: "note" }, content.runs.some((run) => run.running && run.is_traced)
        ? "The timeline appears with the first traced epoch." : "The run has no trace (run.trace = \"off\")."));
      state.charts.forEach((chart, id) => { if (id.startsWith("lanes-")) { chart.dispose(); state.charts.delete(id); } });
      return;
    }
    byId("timelines").querySelector("p.note")?.remove();
    drawTools(has);
    drawLegend(found);
    const length = Math.max(...found.map(({ shown }) => shown.end_us - shown.start_us)) / 1e6;
    for (const one of found) drawLanes(one, length, content.runs.length > 1);
  }

  function radios(name, words, options, chosen, changed) {
    return element("fieldset", {}, element("legend", {}, words), options.map(([value, title, disabled]) => {
      const input = element("input", { type: "radio", name, value, id: `${name}-${value}`, disabled });
      input.checked = value === chosen;
      input.addEventListener("change", () => changed(value));
      return element("label", { for: `${name}-${value}` }, input, title);
    }));
  }

  function drawTools(has) {
    const tools = byId("timeline-tools");
    const button = (id, title, action) => {
      const made = element("button", { type: "button", id }, title);
      made.addEventListener("click", action);
      return made;
    };
    replace(tools,
      radios("view", "Show", [["iteration", "one iteration", !has("iteration")], ["epoch", "whole epoch", !has("epoch")]], state.view, (value) => {
        state.view = value;
        state.zoom = { start: 0, end: 100 };
        redraw();
      }),
      element("div", {}, button("zoom-in", "Zoom in", () => zoomBy(0.5)), " ", button("zoom-out", "Zoom out", () => zoomBy(2)), " ",
        button("earlier", "Earlier", () => moveBy(-0.5)), " ", button("later", "Later", () => moveBy(0.5)), " ",
        button("all", "All", () => zoomTo(0, 100))),
      element("span", { class: "hint", style: "margin:0" }, "Or use Ctrl + wheel or pinch to zoom, drag to move, or the slider below a chart."));
  }

  function zoomBy(factor) {
    const { start, end } = state.zoom;
    const middle = (start + end) / 2;
    const half = Math.min(50, ((end - start) * factor) / 2);
    const first = Math.max(0, Math.min(middle - half, 100 - 2 * half));
    zoomTo(first, first + 2 * half);
  }

  function moveBy(part) {
    const { start, end } = state.zoom;
    const first = Math.max(0, Math.min(start + (end - start) * part, 100 - (end - start)));
    zoomTo(first, first + end - start);
  }

  function zoomTo(start, end, except) {
    state.zoom = { start, end };
    for (const [id, chart] of state.charts) {
      if (id.startsWith("lanes-") && chart !== except) chart.dispatchAction({ type: "dataZoom", start, end }, { silent: true });
    }
  }

  function drawLegend(found) {
    const kinds = Object.keys(KINDS).filter((kind) => found.some(({ shown }) => shown.spans.some((span) => span[1] === kind && !span[6] && span[5] > 0)));
    const item = (swatch, words) => element("li", {}, swatch, words);
    replace(byId("timeline-legend"), element("ul", { class: "legend", "aria-label": "What the colours of blocks mean" },
      kinds.map((kind) => item(element("span", { class: "swatch", style: `background:${KINDS[kind].fill}` }), kind === KINDS[kind].words ? kind : `${kind}: ${KINDS[kind].words}`)),
      item(element("span", { class: "swatch critical" }), "on the critical path"),
      item(element("span", { class: "swatch waiting" }), "waiting")));
  }

  const laneName = ({ owner, lane }) => (owner === "server" ? `server ${lane}` : `${owner} ${LANE_WORDS[lane] || lane}`);

  function drawLanes({ run, place, shown }, length, isCompared) {
    const small = narrow();
    const ink = colours();
    const rows = shown.spans;
    const start = shown.start_us;
    const data = rows.map((span, at) => [span[0], (span[4] - start) / 1e6, (span[4] + span[5] - start) / 1e6, at]);
    const names = shown.lanes.map(laneName);
    const left = small ? 112 : 170;
    const unit = length < 1 ? { factor: 1e3, name: "ms" } : { factor: 1, name: "s" };
    const axisWords = (value) => `${Number((value * unit.factor).toPrecision(6))} ${unit.name}`;
    const own = new Set(shown.lanes.map((lane) => lane.owner));
    const option = {
      grid: { left, right: 14, top: 6, bottom: state.printing ? 30 : 56 },
      tooltip: tooltip({ trigger: "item", formatter: (params) => hover(shown, rows[params.value[3]]) }),
      xAxis: valueAxis("", { min: 0, max: length, axisLabel: { formatter: axisWords, hideOverlap: true, showMaxLabel: false } }),
      yAxis: {
        type: "category", data: names, inverse: true, axisLine: { show: false }, axisTick: { show: false },
        axisLabel: { color: ink.ink, fontSize: small ? 10.5 : 12, width: left - 10, overflow: "truncate", interval: 0 },
        splitArea: { show: true, areaStyle: { color: ["transparent", ink.faint], opacity: 0.55 } },
      },
      dataZoom: [
        { type: "inside", xAxisIndex: 0, filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false, minValueSpan: length / 5000, ...state.zoom },
        {
          type: "slider", show: !state.printing, xAxisIndex: 0, filterMode: "weakFilter", height: 18, bottom: 6, showDataShadow: false, brushSelect: false, minValueSpan: length / 5000,
          labelFormatter: (value) => axisWords(Number(value.toPrecision(4))), textStyle: { color: ink.quiet }, borderColor: ink.line, fillerColor: "rgba(86,180,233,0.25)",
          ...state.zoom,
        },
      ],
      series: [{
        type: "custom", clip: true, encode: { x: [1, 2], y: 0 }, data,
        renderItem: (params, api) => block(params, api, rows[api.value(3)], own, ink),
      }],
    };
    const words = describe(run, shown, isCompared);
    const id = `lanes-${place}`;
    const isNew = !state.charts.has(id);
    const chart = show(byId("timelines"), id, { ...words, height: shown.lanes.length * ROW + (state.printing ? 36 : 62), option, numbers: pathTable(shown) });
    chart.getDom().closest("figure").dataset.run = run.name;
    if (isNew) {
      chart.on("datazoom", (event) => {
        const zoom = event.batch ? event.batch[0] : event;
        if (isNumber(zoom.start)) zoomTo(zoom.start, zoom.end, chart);
      });
    }
  }

  function block(params, api, span, own, ink) {
    const [, kind, microBatch, , , , isWaiting, whose, isCritical] = span;
    const from = api.coord([api.value(1), api.value(0)]);
    const to = api.coord([api.value(2), api.value(0)]);
    const tall = api.size([0, 1])[1] * 0.74;
    const area = params.coordSys;
    const clipped = (y, height, least) => echarts.graphic.clipRectByRect(
      { x: from[0], y, width: Math.max(least, to[0] - from[0]), height }, { x: area.x, y: area.y, width: area.width, height: area.height });
    if (isWaiting) {
      const thin = clipped(from[1] - 1.5, 3, 0);
      return thin && { type: "rect", shape: thin, style: { fill: ink.line } };
    }
    const shape = clipped(from[1] - tall / 2, tall, api.value(2) > api.value(1) ? 0.75 : 0);
    if (!shape) return null;
    const look = KINDS[kind] || OTHER;
    const forOthers = whose && !own.has(whose);
    const children = [{ type: "rect", shape, style: { fill: look.fill, opacity: forOthers ? 0.4 : 1 } }];
    const words = `${kind}${microBatch || ""}`;
    if (shape.width > words.length * 7 + 4) {
      children.push({
        type: "text", silent: true,
        style: { text: words, x: shape.x + shape.width / 2, y: from[1], align: "center", verticalAlign: "middle", fontSize: 11, fill: forOthers ? ink.ink : look.ink },
      });
    }
    if (isCritical) {
      // A block may be thinner than its outline; the strip below it is visible anyway.
      const line = shape.width > 5 ? 1.5 : 0;
      if (line) children.push({ type: "rect", silent: true, shape: { x: shape.x + 0.75, y: shape.y + 0.75, width: shape.width - 1.5, height: shape.height - 1.5 }, style: { fill: "none", stroke: ink.ink, lineWidth: line } });
      children.push({ type: "rect", silent: true, shape: { x: shape.x, y: shape.y + shape.height - 1, width: Math.max(1, shape.width), height: 3.5 }, style: { fill: ink.ink } });
    }
    return { type: "group", children };
  }

  const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);

  function hover(shown, span) {
    const [lane, kind, microBatch, iteration, from, length, isWaiting, whose, isCritical] = span;
    const words = (KINDS[kind] || OTHER).words;
    const at = shown.lanes[lane];
    const lines = [`<b>${isWaiting ? `waiting for ${kind}` : `${kind}${microBatch || ""}`}</b>${isWaiting || !KINDS[kind] ? "" : ` ${words}`}`, escaped(laneName(at))];
    if (whose) lines.push(`for ${escaped(whose)}`);
    if (microBatch) lines.push(`micro-batch ${microBatch}`);
    if (iteration) lines.push(`iteration ${iteration}`);
    lines.push(`starts at ${duration((from - shown.start_us) / 1e6)}`, `lasts ${duration(length / 1e6)}`);
    if (isCritical) lines.push("on the critical path");
    return lines.join("<br>");
  }

  function pathWords(shown) {
    const total = (shown.end_us - shown.start_us) / 1e6;
    return Object.entries(shown.critical_s).filter(([, value]) => value > 0.005 * total).sort((a, b) => b[1] - a[1])
      .map(([lane, value]) => `${LANE_WORDS[lane] || lane} ${share(value / total)}`).join(", ");
  }

  function describe(run, shown, isCompared) {
    const total = (shown.end_us - shown.start_us) / 1e6;
    const what = shown.iteration ? `iteration ${shown.iteration} of ${shown.device} in epoch ${shown.epoch}` : `epoch ${shown.epoch} of ${shown.device}, including the exchange of models`;
    const path = pathWords(shown);
    const words = [`${duration(total)}. Critical path: ${path || "unknown"}.`];
    if (shown.iteration && !shown.uses_link) words.push("It sends no activations; models are exchanged at the end of the epoch.");
    const drawn = new Set(shown.lanes.map((lane) => lane.owner).filter((owner) => owner !== "server")).size;
    if (shown.iteration && drawn < run.devices.count) words.push(`Showing ${drawn} of ${run.devices.count.toLocaleString("en")} devices.`);
    if (shown.before_us > 0) words.push(`Only the last part is drawn, without the first ${duration(shown.before_us / 1e6)}.`);
    if (shown.left_out) words.push(`${shown.left_out} spans are not drawn; ${run.running ? "after the run, all are in trace.json" : "all are in trace.json"}.`);
    return {
      title: isCompared ? `${run.name} (${run.timeline.plan}): ${what}` : `${what[0].toUpperCase()}${what.slice(1)}`,
      caption: words.join(" "),
      label: `Timeline of ${what} with ${run.name}: ${shown.lanes.length} lanes, ${shown.spans.length} spans, ${words.join(" ")}`,
    };
  }

  function pathTable(shown) {
    const path = shown.spans.filter((span) => span[8]).sort((a, b) => a[4] - b[4]);
    const rows = path.slice(0, 300).map(([lane, kind, microBatch, , from, length, , whose]) =>
      [`${kind}${microBatch || ""}`, laneName(shown.lanes[lane]), whose || "", duration((from - shown.start_us) / 1e6), duration(length / 1e6)]);
    return table(`The spans of the critical path${path.length > 300 ? " (first 300)" : ""}`,
      [column("stage"), column("lane"), column("for"), number("start"), number("length")], rows);
  }

  // --- utilisation, learning, time and bytes

  function drawUtilisation(content) {
    const parent = byId("utilisations");
    content.runs.forEach((run, place) => {
      if (!run.epochs.length) return;
      const names = run.epochs.map((epoch) => String(epoch.epoch));
      const many = names.length > 12;
      const series = LANES.map((lane, at) => ({
        name: lane, type: many ? "line" : "bar", symbol: SYMBOLS[at], symbolSize: 6, barMaxWidth: 26, itemStyle: { color: LANE_COLOURS[lane], decal: decal(at) },
        lineStyle: { color: LANE_COLOURS[lane] }, data: run.epochs.map((epoch) => epoch.utilisation[lane]),
      }));
      const means = LANES.map((lane) => `${lane} ${share(run.utilisation[lane])}`).join(", ");
      show(parent, `busy-${place}`, {
        title: content.runs.length > 1 ? run.name : "Busy share by epoch", caption: `On average ${means}.`,
        label: `Busy share of the lanes in each epoch of ${run.name}; on average ${means}.`, height: 250,
        option: { legend: legend(), grid: { left: 44, right: 12, top: 36, bottom: 42 }, tooltip: tooltip({ trigger: "axis", valueFormatter: (value) => share(value, 1) }),
          xAxis: categoryAxis(names, "epoch"), yAxis: valueAxis("", { min: 0, max: 1, axisLabel: { formatter: (value) => `${Math.round(value * 100)} %` } }), series },
        numbers: table(`Busy shares, ${run.name}`, [column("epoch"), ...LANES.map(number)],
          run.epochs.map((epoch) => [String(epoch.epoch), ...LANES.map((lane) => share(epoch.utilisation[lane], 1))])),
      });
    });
  }

  // Stripes and dots, so that bars can be distinguished without colours.
  function decal(at) {
    const patterns = [
      null,
      { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4 },
      { symbol: "circle", dashArrayX: [[6, 6], [0, 6, 6, 0]], dashArrayY: [5, 0], symbolSize: 0.6 },
      { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: Math.PI / 4 },
    ];
    return patterns[at % 4] && { color: "rgba(255,255,255,0.45)", ...patterns[at % 4] };
  }

  function along(run) {
    let passed = run.seconds_left_out;
    return run.epochs.map((epoch) => {
      passed += epoch.seconds || 0;
      return state.against === "epoch" ? epoch.epoch : passed;
    });
  }

  function curve(content, id, title, keys, form, tick, { parent = "curves", words = "Solid: training batches; dashed: validation set." } = {}) {
    const several = content.runs.length > 1;
    const series = [];
    const heads = [column("run"), number("epoch"), ...keys.map((key) => number(key.words))];
    const rows = [];
    content.runs.forEach((run, place) => {
      const at = along(run);
      keys.forEach((key, dash) => {
        const points = run.epochs.map((epoch, n) => [at[n], epoch[key.name]]).filter((point) => isNumber(point[1]));
        if (!points.length) return;
        const colour = RUN_COLOURS[(several ? place : dash) % RUN_COLOURS.length];
        series.push({
          name: several ? run.name : key.words, id: `${run.name} ${key.words}`, type: "line", data: points, symbol: SYMBOLS[(several ? place : dash) % SYMBOLS.length], symbolSize: 7,
          showSymbol: points.length <= 60, lineStyle: { color: colour, type: dash ? "dashed" : "solid", width: 2 }, itemStyle: { color: colour },
        });
      });
      for (const epoch of run.epochs) rows.push([run.name, String(epoch.epoch), ...keys.map((key) => form(epoch[key.name]))]);
    });
    if (!series.length) return;
    const last = content.runs.map((run) => {
      const known = run.epochs.map((epoch) => epoch[keys[keys.length - 1].name]).filter(isNumber);
      return known.length ? `${run.name} ends at ${form(known[known.length - 1])}` : null;
    }).filter(Boolean).join(", ");
    show(byId(parent), id, {
      title, caption: several && keys.length > 1 ? words : "", label: `${title} by ${state.against}: ${last}.`, height: 280,
      option: { legend: legend(), grid: { left: 52, right: 18, top: 40, bottom: 44 }, tooltip: tooltip({ trigger: "item", formatter: (point) => `<b>${escaped(point.seriesId)}</b><br>${state.against === "epoch" ? `epoch ${point.value[0]}` : `after ${seconds(point.value[0])}`}<br>${form(point.value[1])}` }),
        xAxis: valueAxis(state.against === "epoch" ? "epoch" : "seconds of training", { nameLocation: "middle", nameGap: 26, min: state.against === "epoch" ? 1 : 0, max: state.against === "epoch" ? (seen) => Math.max(2, seen.max) : null, minInterval: state.against === "epoch" ? 1 : 0, nameTextStyle: { color: colours().quiet } }),
        yAxis: valueAxis("", { scale: true, minInterval: tick.least, axisLabel: { formatter: tick.form } }), series },
      numbers: table(title, heads, rows),
    });
  }

  function drawLearning(content) {
    const learned = content.runs.some((run) => run.epochs.some((epoch) => isNumber(epoch.train_loss) || isNumber(epoch.val_accuracy)));
    const tools = byId("learning-tools");
    byId("curves").querySelector("p.note")?.remove();
    if (!learned) {
      replace(tools);
      byId("curves").append(element("p", { class: "note" }, content.runs.some((run) => run.learns) ? "No epoch has a loss yet." : "A timing-only run trains no network: there is no loss and no accuracy."));
      return;
    }
    state.against ??= content.runs.length > 1 ? "seconds" : "epoch"; // by epoch, curves of methods with equal weights would cover each other
    replace(tools, radios("against", "Against", [["epoch", "epochs"], ["seconds", "seconds"]], state.against, (value) => {
      state.against = value;
      redraw();
    }));
    curve(content, "curve-loss", "Loss", [{ name: "train_loss", words: "training" }, { name: "val_loss", words: "validation" }], (value) => digits(value, 4), { least: 0, form: (value) => String(Number(value.toPrecision(6))) });
    curve(content, "curve-accuracy", "Validation accuracy", [{ name: "val_accuracy", words: "validation" }], (value) => share(value, 2), { least: 0.01, form: (value) => share(value) });
    const metrics = [...new Set(content.runs.flatMap((run) => Object.keys(run.metrics ?? {})))];
    metrics.forEach((name, place) => curve(content, `curve-metric-${place}`, `Validation ${name}`, [{ name: `metric ${name}`, words: "validation" }], (value) => digits(value, 4), { least: 0, form: (value) => String(Number(value.toPrecision(6))) }));
  }

  // The global model on samples that the devices keep for this.
  function drawEvaluation(content) {
    const runs = content.runs.filter((run) => run.evaluation);
    byId("evaluation").hidden = !runs.length;
    const names = [...new Set(runs.flatMap((run) => run.evaluation.names))];
    const words = (name, value) => (name === "accuracy" ? share(value, 1) : digits(value, 4));
    names.forEach((name, place) => curve(content, `curve-devices-${place}`, `${name[0].toUpperCase()}${name.slice(1)} on devices`,
      [{ name: `mean ${name}`, words: "mean" }, { name: `worst_decile ${name}`, words: "worst decile" }], (value) => words(name, value),
      name === "accuracy" ? { least: 0.01, form: (value) => share(value) } : { least: 0, form: (value) => String(Number(value.toPrecision(6))) },
      { parent: "evaluation-curves", words: "Solid: mean over devices; dashed: worst decile." }));
    replace(byId("evaluation-tables"), runs.map((run) => {
      const { epoch, rows, left_out: others, mean, worst_decile: worst, seconds: took, bytes_down: down } = run.evaluation;
      const heads = [column("device"), number("samples"), ...run.evaluation.names.map(number), ...(rows.some((row) => row.reason) ? [column("note")] : [])];
      const line = (device, samples, values, reason) => [device, samples, ...run.evaluation.names.map((name) => words(name, values[name])), ...(heads.at(-1).title === "note" ? [reason || ""] : [])];
      const caption = `${content.runs.length > 1 ? `${run.name}: the` : "The"} model of epoch ${epoch}${others ? `; the worst ${rows.length} of ${rows.length + others} devices` : ""}; evaluated in ${seconds(took)}, ${megabytes(down)} sent to devices${run.evaluation.is_wider ? ". The curves have only the devices that were drawn for each round." : ""}`;
      const body = table(caption, heads, [...(run.evaluation.names.length ? [line("mean", "", mean), line("worst decile", "", worst)] : []), ...rows.map((row) => line(row.device, row.samples === null ? "–" : row.samples.toLocaleString("en"), row.values, row.reason))]);
      return content.runs.length > 1 ? element("details", { open: run === featured(content.runs) }, element("summary", {}, run.name), body) : body;
    }));
  }

  function drawCosts(content) {
    const parent = byId("cost-charts");
    const several = content.runs.length > 1;
    const runs = content.runs.filter((run) => run.epochs.length);
    if (!runs.length) return;
    const names = [...new Set(runs.flatMap((run) => run.epochs.map((epoch) => epoch.epoch)))].sort((a, b) => a - b);
    const at = (run, name, key) => run.epochs.find((epoch) => epoch.epoch === name)?.[key] ?? null;
    const many = names.length > 12;
    const bar = (name, place, data, type) => ({
      name, type: type || (many ? "line" : "bar"), data, symbol: SYMBOLS[place % SYMBOLS.length], symbolSize: 7, barMaxWidth: 34,
      itemStyle: { color: RUN_COLOURS[place % RUN_COLOURS.length], decal: decal(place) }, lineStyle: { color: RUN_COLOURS[place % RUN_COLOURS.length], type: type ? "dashed" : "solid" },
    });
    const time = runs.map((run, place) => bar(several ? run.name : "measured", place, names.map((name) => at(run, name, "seconds"))));
    if (!several && runs[0].epochs.some((epoch) => isNumber(epoch.predicted_s))) time.push(bar("predicted", 1, names.map((name) => at(runs[0], name, "predicted_s")), "line"));
    show(parent, "cost-time", {
      title: "Seconds of each epoch", caption: runs.some((run) => run.epochs_left_out) ? `The last ${names.length} epochs; result.json has all.` : "", label: `Seconds of each epoch: ${runs.map((run) => `${run.name} ${seconds(run.seconds)} on average`).join(", ")}.`, height: 270,
      option: { legend: legend(), grid: { left: 52, right: 12, top: 38, bottom: 42 }, tooltip: tooltip({ trigger: "axis", valueFormatter: seconds }), xAxis: categoryAxis(names.map(String), "epoch"), yAxis: valueAxis("", { axisLabel: { formatter: "{value} s" } }), series: time },
      numbers: table("Seconds of each epoch", [column("run"), number("epoch"), number("seconds"), number("predicted"), number("lower bound")],
        runs.flatMap((run) => run.epochs.map((epoch) => [run.name, String(epoch.epoch), digits(epoch.seconds, 3), digits(epoch.predicted_s, 3), digits(epoch.bound_s, 3)]))),
    });
    const places = several ? runs.map((run) => run.name) : names.map(String);
    const bytes = (key) => (several ? runs.map((run) => run[key]) : names.map((name) => at(runs[0], name, key))).map((value) => (isNumber(value) ? value / 1e6 : null));
    const direction = (name, key, place) => ({ name, type: "bar", data: bytes(key), barMaxWidth: 34, itemStyle: { color: place ? LANE_COLOURS.downlink : LANE_COLOURS.uplink, decal: decal(place ? 3 : 0) } });
    show(parent, "cost-bytes", {
      title: several ? "Bytes per epoch, all devices" : "Bytes of each epoch, all devices", caption: "",
      label: `Megabytes up and down in an epoch: ${runs.map((run) => `${run.name} ${megabytes(run.bytes_up)} up, ${megabytes(run.bytes_down)} down`).join("; ")}.`, height: 270,
      option: { legend: legend(), grid: { left: 62, right: 12, top: 38, bottom: 42 }, tooltip: tooltip({ trigger: "axis", valueFormatter: (value) => `${digits(value, 2)} MB` }), xAxis: categoryAxis(places, several ? "" : "epoch"), yAxis: valueAxis("", { axisLabel: { formatter: "{value} MB" } }),
        series: [direction("up", "bytes_up", 0), direction("down", "bytes_down", 1)] },
      numbers: table("Bytes of all devices", [column("run"), number("epoch"), number("up"), number("down")],
        runs.flatMap((run) => run.epochs.map((epoch) => [run.name, String(epoch.epoch), megabytes(epoch.bytes_up), megabytes(epoch.bytes_down)]))),
    });
  }

  // --- plans, devices, facts

  function meter(value, words) {
    if (!isNumber(value)) return "–";
    const filled = element("span");
    filled.style.width = `${Math.max(0, Math.min(1, value)) * 100}%`;
    return element("span", {}, words ?? share(value), element("span", { class: "meter", "aria-hidden": "true" }, filled));
  }

  function drawPlans(content) {
    replace(byId("plans"), element("p", { class: "note" }, "The first P layers of the network run on the device, the others on the server. A batch is split into N micro-batches, so that computation and communication overlap. Predictions are the planner's."),
      content.runs.map((run) => planOf(run, content.runs.length > 1)));
  }

  function planOf(run, isCompared) {
    const found = run.outlook;
    const made = element("div", { class: "plan" });
    made.append(element("h3", {}, `${isCompared ? `${run.name}: ` : ""}${run.plan}`));
    if (run.whole) made.append(element("p", {}, `${run.whole[0].toUpperCase()}${run.whole.slice(1)}.`));
    for (const again of run.replans) made.append(element("p", {}, `New plans from epoch ${again.epoch} on: ${again.plan}${again.reason ? ` (${again.reason})` : ""}.`));
    if (run.busiest) made.append(element("p", {}, `The busiest lane was the ${run.busiest}: ${share(run.utilisation[run.busiest])} of an epoch on average.`));
    if (!found || !isNumber(found.epoch_s)) {
      made.append(element("p", { class: "note" }, (found && found.note) || (run.running ? "Predictions of what would be faster follow at the end of the run." : "There are no predictions of what would be faster.")));
      return made;
    }
    const words = [`The planner predicts ${seconds(found.epoch_s)} for an epoch, with the ${found.bottleneck} as the bottleneck (${share(found.utilisation[found.bottleneck])} busy); measured: ${seconds(run.seconds)}.`];
    if (found.paper.plan !== found.plan) words.push(`The paper's estimate would have chosen ${found.paper.plan}: ${seconds(found.paper.epoch_s)} when simulated (${compared(found.paper.epoch_s, found.epoch_s)}).`);
    made.append(element("p", {}, words.join(" ")));
    // The busiest lane need not be the one to improve: others may hold it up.
    const best = found.changes.reduce((one, other) => (one && one.epoch_s <= other.epoch_s ? one : other), null);
    if (best) made.append(element("p", { class: "most" }, best.epoch_s < 0.99 * found.epoch_s ? `The largest gain: ${best.change}, ${compared(best.epoch_s, found.epoch_s)}.` : "None of these changes would gain as much as 1 %."));
    const all = [{ change: "unchanged", plan: found.plan, epoch_s: found.epoch_s }, ...found.changes.map((one) => ({ ...one, change: `with ${one.change}` })),
      ...found.split_points.map((one) => ({ ...one, change: `all devices with ${one.change}` }))];
    const longest = Math.max(...all.map((one) => one.epoch_s));
    made.append(table("Predicted epochs, each with the best plans for its case", [column("case"), number("epoch"), number("change"), column("best plan")],
      all.map((one) => [one.change, meter(one.epoch_s / longest, seconds(one.epoch_s)), one.change === "unchanged" ? "" : compared(one.epoch_s, found.epoch_s), one.plan])));
    if (found.note) made.append(element("p", { class: "note" }, found.note));
    return made;
  }

  const compared = (value, base) => (isNumber(value) && isNumber(base) && base > 0 ? `${value >= base ? "+" : "−"}${Math.abs((value / base - 1) * 100).toFixed(1)} %` : "–");

  function drawDevices(content) {
    replace(byId("device-tables"), content.runs.map((run) => {
      const { rows, count, epoch } = run.devices;
      const busy = rows.some((row) => Object.keys(row.busy).length);
      const sent = rows.some((row) => isNumber(row.bytes_up));
      const heads = [column("device"), column("plan"), number("samples"), column("link up/down"), column("machine"), ...(sent ? [number("up per epoch"), number("down per epoch")] : []), ...(busy ? [number("compute busy"), number("uplink busy"), number("downlink busy")] : [])];
      const words = `${content.runs.length > 1 ? `${run.name}: ` : ""}${rows.length < count ? `${rows.length} of ${count} devices` : count === 1 ? "one device" : `${count} devices`}${busy ? `; busy shares of epoch ${epoch}` : ""}`;
      const body = table(words, heads, rows.map((row) => [row.device, row.plan, row.samples === null ? null : row.samples.toLocaleString("en"), row.link, row.machine, ...(sent ? [megabytes(row.bytes_up), megabytes(row.bytes_down)] : []), ...(busy ? ["device", "uplink", "downlink"].map((lane) => meter(row.busy[lane])) : [])]));
      return content.runs.length > 1 ? element("details", { open: run === featured(content.runs) }, element("summary", {}, run.name), body) : body;
    }));
  }

  function factsOf(run) {
    const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ");
    return [["network", `${run.model} on ${run.dataset}`], ["world", run.world], ["devices", run.setting], ["server", run.server], ["loss", run.loss], ["optimiser", run.optimizer], ["batch", run.batch_size], ["round", run.round], ["seed", run.seed],
      ["method", run.method_title ? `${run.method}: ${run.method_title}` : run.method], ["plan", run.plan], ["equivalence", run.equivalence], ["privacy", run.privacy], ["stopped", run.stopped], ["command", run.command], ["folder", run.folder], ["machine", run.machine], ["versions", versions]]
      .filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [name, String(value)]);
  }

  function factList(title, facts) {
    // Break a command between its words, not after the hyphens of an option.
    const words = (value) => value.split(" ").flatMap((one, place) => [place ? " " : null, element("span", {}, one)]);
    const word = (name, value) => (["command", "folder"].includes(name) ? element("code", {}, words(value)) : value);
    return element("div", {}, title ? element("h3", {}, title) : null, element("dl", {}, facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, word(name, value))])));
  }

  function drawFacts(content) {
    const all = content.runs.map(factsOf);
    if (all.length === 1) return replace(byId("facts"), factList("", all[0]));
    const isCommon = ([name, value]) => all.every((facts) => facts.some(([other, same]) => other === name && same === value));
    return replace(byId("facts"), all.length ? factList("All runs", all[0].filter(isCommon)) : null,
      content.runs.map((run, place) => factList(run.name, all[place].filter((fact) => !isCommon(fact)))));
  }

  // --- everything

  function draw(content) {
    const focused = document.activeElement?.id;
    state.content = content;
    document.title = `${content.title} – pipar`;
    byId("title").textContent = content.title;
    byId("lead").textContent = sentence(content);
    byId("report").hidden = false;
    drawResult(content);
    drawTimelines(content);
    drawUtilisation(content);
    drawLearning(content);
    drawEvaluation(content);
    drawCosts(content);
    drawPlans(content);
    drawDevices(content);
    drawFacts(content);
    forget();
    // A later figure may have made its neighbours narrower.
    for (const chart of state.charts.values()) chart.resize();
    if (focused) byId(focused)?.focus({ preventScroll: true });
    if (content.pipar) byId("foot").textContent = `Made by pipar ${content.pipar}. This page loads nothing from the network.`;
  }

  function redraw() {
    if (state.content) draw(state.content);
  }

  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    window.requestAnimationFrame(redraw);
  });
  dark.addEventListener("change", redraw);
  for (const [name, printing] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(name, () => {
      state.printing = printing;
      document.documentElement.classList.toggle("printing", printing);
      redraw();
    });
  }

  window.pipar = { draw, charts: state.charts, state };
  const written = byId("content");
  if (written) draw(JSON.parse(written.textContent));
})();
