// The live part of the page: the training as it runs, from server-sent events. Everything received is put into the page
// as text, never as markup: names of devices and reasons come from other machines.
(function () {
  "use strict";
  const root = document.getElementById("live");
  if (!root) return;

  const PHASES = {
    preparing: "Preparing", training: "Training", stopping: "Stopping", stopped: "Stopped", over: "Finished", failed: "Failed",
  };
  const ENDS = new Set(["over", "stopped", "failed"]);
  const STATES = {
    expected: "not joined yet", joined: "joined", training: "training", idle: "not drawn this round", away: "away", silent: "silent", lost: "lost", back: "reconnected", left: "left",
  };
  const LANES = { device: "Device compute", uplink: "Uplink", server: "Server cores", downlink: "Downlink" };
  const SILENT_S = 60; // the server sends a keep-alive every ten seconds, but a report may take long over a slow link
  const SVG = "http://www.w3.org/2000/svg";

  let state = null; // the latest from the server
  let aheadS = 0; // how far the server's clock is ahead of this one
  let session = null;
  let heardAt = Date.now();
  let isConnected = false;
  let source = null;

  // --- small pieces

  function make(tag, words, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(words || {})) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function percent(share) {
    return share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
  }

  function number(value, digits) {
    return value === null || value === undefined ? "–" : value.toFixed(digits);
  }

  function clock(seconds) {
    const s = Math.max(0, Math.round(seconds));
    const [h, m] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
    const tail = `${String(m).padStart(h ? 2 : 1, "0")}:${String(s % 60).padStart(2, "0")}`;
    return h ? `${h}:${tail}` : tail;
  }

  function time(unix) {
    return new Date(1000 * unix).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  }

  function bar(label) {
    const fill = make("div", { class: "live-fill" });
    const track = make("div", { class: "live-track", role: "progressbar", "aria-label": label, "aria-valuemin": "0",
      "aria-valuemax": "100", "aria-valuenow": "0" }, fill);
    const text = make("span", { class: "live-value" }, "–");
    return {
      node: make("div", { class: "live-bar" }, track, text),
      set(share, when) {
        fill.style.width = `${100 * Math.min(1, share || 0)}%`;
        track.setAttribute("aria-valuenow", String(Math.round(100 * (share || 0))));
        setText(text, when ? `${percent(share)} ${when}` : percent(share));
      },
    };
  }

  // --- the parts of the page

  const badge = make("span", { class: "live-badge", "data-phase": "preparing" }, "Preparing");
  const title = make("span", { class: "live-title" });
  const link = make("p", { class: "live-link" }, "Connecting…");
  const said = make("p", { class: "live-said", role: "status" });
  const whole = bar("Training done");
  const tiles = {};
  const tileList = make("dl", { class: "live-tiles" });
  for (const [key, label] of Object.entries({
    epoch: "Epoch", iteration: "Iteration", loss: "Batch loss", accuracy: "Val. accuracy", devices: "On devices", worst: "Worst decile", rate: "Samples/s",
    elapsed: "Elapsed", left: "Time left",
  })) {
    tiles[key] = make("dd", { "data-live": key }, "–");
    tileList.append(make("div", { class: "live-tile" }, make("dt", null, label), tiles[key]));
  }
  for (const key of ["devices", "worst"]) tiles[key].parentNode.hidden = true; // until a device has evaluated a model
  const lanes = {};
  const laneList = make("div", { class: "live-lanes" });
  for (const [key, label] of Object.entries(LANES)) {
    lanes[key] = bar(`${label}, busy`);
    laneList.append(make("div", { class: `live-lane live-lane-${key}` }, make("span", null, label), lanes[key].node));
  }
  const line = document.createElementNS(SVG, "polyline");
  const spark = document.createElementNS(SVG, "svg");
  spark.setAttribute("class", "live-spark");
  spark.setAttribute("viewBox", "0 0 240 80");
  spark.setAttribute("preserveAspectRatio", "none");
  spark.setAttribute("role", "img");
  spark.setAttribute("aria-label", "Loss of the last batches: none yet");
  spark.append(line);
  const sparkTop = make("span", { class: "live-spark-top" });
  const sparkBottom = make("span", { class: "live-spark-bottom" });
  const sparkEmpty = make("p", { class: "live-empty" }, "Shown after the first batches.");
  const summary = make("p", { class: "live-summary" });
  const tableBody = make("tbody");
  const table = make("table", { class: "live-table" },
    make("caption", { class: "live-hidden" }, "Devices and their states"),
    make("thead", null, make("tr", null, ...["Device", "State", "For", "Plan", "Place in its epoch", "Compute busy", "Uplink busy", "Note"]
      .map((word) => make("th", { scope: "col" }, word)))),
    tableBody);
  const log = make("ol", { class: "live-log" });

  root.append(
    make("div", { class: "live-head" }, make("h2", null, badge, " ", title), link),
    said,
    make("div", { class: "live-whole" }, whole.node),
    tileList,
    make("div", { class: "live-columns" },
      make("div", { class: "live-panel" }, make("h3", null, "Lanes: busy share now"), laneList),
      make("div", { class: "live-panel" }, make("h3", null, "Loss of the last batches"),
        make("div", { class: "live-spark-box" }, spark, sparkTop, sparkBottom), sparkEmpty)),
    make("div", { class: "live-panel" }, make("h3", null, "Devices"), summary,
      make("div", { class: "live-scroll", role: "region", "aria-label": "Devices", tabindex: "0" }, table)),
    make("details", { class: "live-panel", open: "" }, make("summary", null, "Log"),
      make("div", { class: "live-scroll live-log-box", role: "region", "aria-label": "Log", tabindex: "0" }, log)),
  );

  // --- drawing the state

  function drawRun() {
    const phase = state.phase;
    setText(badge, state.waiting && phase !== "stopping" ? "Waiting" : PHASES[phase] || phase);
    badge.dataset.phase = phase;
    setText(title, state.run ? `${state.method}: ${state.title}, ${state.run}` : "");
    setText(said, sentence());
    said.hidden = !said.textContent;
    document.title = state.run ? `${percent(state.done)} ${badge.textContent.toLowerCase()}, ${state.run}` : "pipar";
    if (document.getElementById("report").hidden) setText(document.getElementById("title"), state.run || "Training starts");
    whole.set(state.done);
    setText(tiles.epoch, state.epoch ? `${state.epoch} of ${state.epochs}` : "–");
    setText(tiles.iteration, state.iterations ? `${state.iteration} of ${state.iterations}` : "–");
    setText(tiles.loss, number(state.loss, 3));
    const [metric] = Object.entries(state.metrics ?? {}); // the first one is shown instead of the accuracy
    setText(tiles.accuracy.previousSibling, metric ? `Val. ${metric[0]}` : "Val. accuracy");
    const accuracy = state.accuracy === null ? "–" : `${(100 * state.accuracy).toFixed(1)} %`;
    setText(tiles.accuracy, metric ? number(metric[1], 4) : accuracy);
    const own = state.on_devices;
    const asText = (value) => (own.name === "accuracy" && value !== null ? `${(100 * value).toFixed(1)} %` : number(value, 4));
    for (const key of ["devices", "worst"]) tiles[key].parentNode.hidden = !own;
    if (own) {
      setText(tiles.devices.previousSibling, `${own.name[0].toUpperCase()}${own.name.slice(1)} on devices`);
      setText(tiles.devices, asText(own.mean));
      setText(tiles.worst, asText(own.worst));
    }
    setText(tiles.rate, state.samples_per_s === null ? "–" : Number(state.samples_per_s.toPrecision(3)).toLocaleString());
    // Devices on other machines report their lanes at the end of a round.
    const isOld = (key) => state.lanes[key] === null && state.lanes_before[key] !== undefined;
    for (const key of Object.keys(LANES)) {
      lanes[key].set(isOld(key) ? state.lanes_before[key] : state.lanes[key], isOld(key) ? "last epoch" : "");
    }
    laneList.classList.toggle("live-lanes-old", Object.keys(LANES).some(isOld));
  }

  function sentence() {
    if (state.trouble) return state.trouble;
    if (state.preparing) return `${state.preparing[0]}: ${percent(state.preparing[1])}`;
    if (state.waiting) return `${state.waiting[0]} of ${state.waiting[1]} devices joined.`;
    const away = state.devices.filter((row) => ["away", "lost", "silent"].includes(row.state));
    return away.length ? away.map((row) => `${row.name} is ${row.state}`).join(", ") + "." : "";
  }

  function drawLosses() {
    const values = state.losses.filter((value) => value !== null);
    sparkEmpty.hidden = values.length > 1;
    spark.toggleAttribute("hidden", values.length < 2);
    if (values.length < 2) return;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const y = (value) => 76 - (72 * (value - low)) / (high - low || 1);
    line.setAttribute("points", values.map((v, i) => `${((240 * i) / (values.length - 1)).toFixed(1)},${y(v).toFixed(1)}`).join(" "));
    setText(sparkTop, high.toFixed(2));
    setText(sparkBottom, low.toFixed(2));
    spark.setAttribute("aria-label",
      `Loss of the last ${values.length} batches: between ${low.toFixed(2)} and ${high.toFixed(2)}, now ${values.at(-1).toFixed(2)}`);
  }

  const rows = new Map();

  function newRow(name) {
    const cells = ["state", "since", "plan", "place"].map(() => make("td"));
    const [compute, uplink] = [bar(`${name}: compute busy`), bar(`${name}: uplink busy`)];
    const note = make("td", { class: "live-note" });
    const chip = make("span", { class: "live-chip" });
    cells[0].append(chip);
    const node = make("tr", { "data-device": name }, make("th", { scope: "row" }, name), ...cells,
      make("td", null, compute.node), make("td", null, uplink.node), note);
    return { node, chip, since: cells[1], plan: cells[2], place: cells[3], compute, uplink, note, device: null };
  }

  function drawDevices() {
    const here = new Set(state.devices.map((device) => device.name));
    for (const [name, row] of rows) if (!here.has(name)) { row.node.remove(); rows.delete(name); }
    state.devices.forEach((device, place) => {
      if (!rows.has(device.name)) rows.set(device.name, newRow(device.name));
      const row = rows.get(device.name);
      if (tableBody.children[place] !== row.node) tableBody.insertBefore(row.node, tableBody.children[place] || null);
      row.device = device;
      row.node.dataset.state = device.state;
      row.chip.dataset.state = device.state;
      setText(row.chip, STATES[device.state] || device.state);
      const threads = device.threads > 1 ? `, ${device.threads} threads` : "";
      setText(row.plan, `${device.plan || "–"}${threads}`);
      setText(row.place, device.epoch ? `epoch ${device.epoch}, iteration ${device.iteration}${device.iterations ? ` of ${device.iterations}` : ""}` : "–");
      row.compute.set(device.compute);
      row.uplink.set(device.uplink);
    });
    // Devices on other machines report their lanes only at the end of a round.
    table.classList.toggle("live-no-busy", state.devices.every((device) => device.compute === null));
    const parts = Object.entries(state.states).map(([name, count]) => `${count} ${STATES[name] || name}`);
    if (state.unseen) parts.push(`${state.unseen} not listed`);
    setText(summary, parts.length ? parts.join(", ") : "No device has joined yet.");
  }

  let logged = "";

  function drawLog() {
    const latest = JSON.stringify(state.log.at(-1) || "");
    if (latest === logged) return;
    logged = latest;
    log.replaceChildren(...state.log.slice().reverse().map((entry) =>
      make("li", { "data-level": entry.level }, make("time", null, time(entry.at)), " ",
        ...(entry.level === "info" ? [] : [make("strong", null, `${entry.level}: `)]), entry.text)));
  }

  // --- clocks and the connection

  function tick() {
    const silentS = (Date.now() - heardAt) / 1000;
    // After sleep, or with a broken network, a browser does not notice that its connection is lost.
    if (isConnected && silentS > SILENT_S && !(state && ENDS.has(state.phase))) connect();
    if (state && ENDS.has(state.phase)) setText(link, "The program has ended; this is its last state.");
    else if (isConnected) setText(link, "Connected");
    else setText(link, state ? `No connection for ${clock(silentS)}: this state is old.` : "Connecting…");
    link.dataset.state = isConnected ? "on" : "off";
    if (!state) return;
    const isOver = ENDS.has(state.phase);
    const now = isOver ? state.now : Date.now() / 1000 + aheadS;
    setText(tiles.elapsed, state.since ? clock(now - state.since) : "–");
    setText(tiles.left, isOver ? "–" : state.ends_at ? clock(state.ends_at - now) : "–");
    for (const { device, since, note } of rows.values()) {
      setText(since, clock(now - device.since));
      const silence = device.state === "silent" ? `no message for ${clock(now - device.since)}` : device.note;
      setText(note, device.until ? `may reconnect for ${clock(device.until - now)}` : silence);
    }
  }

  function takeState(received) {
    if (session && received.session !== session) { location.reload(); return; } // a new program, maybe of another version
    session = received.session;
    state = received;
    aheadS = received.now - Date.now() / 1000;
    drawRun();
    drawLosses();
    drawDevices();
    drawLog();
    tick();
  }

  function connect() {
    source?.close();
    isConnected = false;
    source = new EventSource("events");
    source.onopen = () => { isConnected = true; heardAt = Date.now(); tick(); };
    source.addEventListener("alive", () => { heardAt = Date.now(); });
    source.addEventListener("state", (event) => {
      heardAt = Date.now();
      isConnected = true;
      takeState(JSON.parse(event.data));
    });
    source.addEventListener("content", (event) => {
      heardAt = Date.now();
      const content = JSON.parse(event.data);
      if (content) window.pipar.draw(content);
    });
    source.onerror = () => {
      isConnected = false;
      if (state && ENDS.has(state.phase)) source.close();
      else if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // refused: the browser does not retry by itself
      tick();
    };
  }

  connect();
  setInterval(tick, 500);
})();
