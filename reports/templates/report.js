"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const STATUS = { "-1": "NOT JUDGED", 0: "PASS", 1: "WARN", 2: "INSUFFICIENT", 3: "FAIL", 4: "INVALID" };
  const SIGN = { "-1": "", 0: "✓", 1: "!", 2: "?", 3: "✕", 4: "⊘" };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  setupTable();

  // -- unpack: base64 -> gzip -> bytes

  async function unpack(id) {
    const text = atob($(id).textContent.trim());
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i); // some ten times faster than Uint8Array.from
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  }

  const TYPES = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, f4: Float32Array, f8: Float64Array, i8: BigInt64Array };
  function reader(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    header.get = (name) => {
      const entry = header.arrays[name];
      if (!entry) return null;
      const size = entry.shape.reduce((a, b) => a * b, 1);
      const view = new TYPES[entry.type](buffer, 4 + length + entry.at, size);
      return entry.type === "i8" ? Float64Array.from(view, Number) : view;
    };
    return header;
  }

  let data;
  try {
    const [code, block] = await Promise.all([unpack("plotly-gz"), unpack("data-gz")]);
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(code);
    document.head.append(script);
    data = reader(block);
  } catch (error) {
    $("failed").hidden = false;
    $("failed").textContent = "The pictures need a browser of 2023 or later (" + error.message + "). The tables are complete.";
    return;
  }
  const Plotly = window.Plotly;

  const first = data.get("first"), last = data.get("last"), status = data.get("status");
  const W = first.length, L = data.layers.length, S = data.sources.length;
  const middle = Array.from(first, (f, w) => (f + last[w]) / 2);
  const loadAt = Array.from(data.get("load_at")), frameAt = Array.from(data.get("frame_at"));
  const end = Math.max(last[W - 1], data.get("step").at(-1));
  const state = { layer: 0, window: W - 1 };
  const worst = data.cells[0];
  if (worst) Object.assign(state, { layer: indexOfLayer(worst.layer), window: indexOfWindow(worst.last) });

  function indexOfLayer(number) { return Math.max(0, data.layers.findIndex((l) => l.layer === number)); }
  function indexOfWindow(lastStep) {
    let best = 0;
    for (let w = 0; w < W; w++) if (Math.abs(last[w] - lastStep) < Math.abs(last[best] - lastStep)) best = w;
    return best;
  }
  function nearest(list, value) {
    return list.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(list[best] - value) ? i : best), 0);
  }
  const layerLabel = (l) => "layer " + data.layers[l].layer;
  const windowLabel = (w) => "steps " + first[w] + "–" + last[w];

  // -- what all plots share

  function look(extra) {
    const axis = {
      gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
      tickfont: { color: css("--soft") }, title: { font: { color: css("--soft"), size: 12 }, standoff: 8 },
    };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 12, t: 8, b: 40 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
      showlegend: false, dragmode: false, ...extra,
    };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) layout[key] = { ...axis, ...layout[key], title: { ...axis.title, ...layout[key].title } };
    }
    return layout;
  }
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  function bar(title, extra) {
    return { thickness: 10, outlinewidth: 0, len: 1, title: { text: title, side: "right", font: { color: css("--soft"), size: 11 } },
      tickfont: { color: css("--soft"), size: 11 }, ...extra };
  }
  function band(w, y) { // the selected window, as a frame across a plot over steps
    return { type: "rect", xref: "x", yref: y || "paper", x0: first[w], x1: last[w], y0: 0, y1: 1, layer: "above",
      line: { color: css("--accent"), width: 1.5 }, fillcolor: "rgba(110,170,255,0.10)" };
  }

  // Windows overlap, so a map shows each as the stride around its middle; that is also where its frame goes.
  const half = W > 1 ? (middle[W - 1] - middle[0]) / (W - 1) / 2 : (last[0] - first[0]) / 2 || 0.5;
  function frame(w, y0, y1, yref) {
    return { type: "rect", xref: "x", yref, x0: middle[w] - half, x1: middle[w] + half, y0, y1, line: { color: css("--ink"), width: 2.5 } };
  }

  // Loads are coloured by log2: under-used and over-used experts are as far from 1 as they are from each other.
  const LOG = [-3, 3];
  const logLoad = (u) => Math.max(LOG[0], Math.min(LOG[1], Math.log2(Math.max(u, 1e-9))));
  const loadBar = () => bar("fair shares", { tickvals: [-3, -2, -1, 0, 1, 2, 3], ticktext: ["≤⅛", "¼", "½", "1", "2", "4", "≥8"] });
  const loadScale = () => [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]];
  const show = (x) => (x === null || Number.isNaN(x) ? "–" : x === 0 ? "0" : Number(x.toPrecision(3)).toString());

  // -- the plots

  function timeline() {
    const codes = [-1, 0, 1, 2, 3, 4];
    const colours = ["--none", "--pass", "--warn", "--insufficient", "--fail", "--fail"].map(css);
    const scale = codes.flatMap((_, i) => [[i / 6, colours[i]], [(i + 1) / 6, colours[i]]]);
    const z = [], text = [];
    const signs = W * L <= 1500;
    for (let l = 0; l < L; l++) {
      const row = Array(W), words = Array(W);
      for (let w = 0; w < W; w++) { row[w] = status[w * L + l]; words[w] = signs && row[w] > 0 ? SIGN[row[w]] : ""; }
      z.push(row); text.push(words);
    }
    const rows = data.layers.map((l) => String(l.layer));
    const height = Math.max(90, Math.min(420, L * 26)), below = data.get("loss") ? 130 : 0;
    const split = below / (height + below + 50);
    const traces = [{
      type: "heatmap", x: middle, y: rows, z, text, texttemplate: signs ? "%{text}" : undefined, textfont: { size: 11 },
      customdata: z.map((row, l) => row.map((code, w) => [STATUS[code], windowLabel(w)])),
      hovertemplate: "layer %{y}, %{customdata[1]}: %{customdata[0]}<extra></extra>",
      zmin: -1.5, zmax: 4.5, colorscale: scale, showscale: false, xgap: W > 150 ? 0 : 2, ygap: L > 40 ? 0 : 2,
    }];
    const layout = look({
      height: height + below + 50, hovermode: "closest",
      xaxis: { title: { text: "step" }, anchor: below ? "y2" : "y", range: [first[0], end] },
      yaxis: { title: { text: "layer" }, type: "category", domain: [below ? split + 0.04 : 0, 1], autorange: "reversed", showgrid: false, nticks: 16 },
    });
    if (below) {
      traces.push({ type: "scatter", mode: "lines", x: data.get("step"), y: data.get("loss"), yaxis: "y2", line: { color: css("--accent"), width: 2 },
        hovertemplate: "step %{x}: loss %{y:.4f}<extra></extra>" });
      layout.yaxis2 = { ...look({ yaxis: { title: { text: "loss" } } }).yaxis, domain: [0, Math.max(0.1, split - 0.04)], nticks: 4 };
    }
    if (data.drift !== null) layout.annotations = [{ x: data.drift, y: 1, yref: "paper", yanchor: "bottom", text: "drift", showarrow: false, font: { color: css("--high") } }];
    if (data.drift !== null) layout.margin.t = 24;
    layout.shapes = [...marks(), frame(state.window, state.layer - 0.5, state.layer + 0.5, "y"), ...(below ? [{ ...band(state.window, "y2 domain"), line: { width: 0 } }] : [])];
    return [traces, layout];
  }

  // What happened on the way (that recording began and ended is no news), and where drift was first noticed.
  const marked = data.events.filter((e) => e.step !== null && !["attached", "closed"].includes(e.kind)).slice(0, 60);
  function mark(step, colour, dash) {
    return { type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: css(colour), width: 1.5, dash } };
  }
  function marks() {
    const events = marked.map((e) => mark(e.step, "--soft", "dot"));
    return data.drift === null ? events : [...events, mark(data.drift, "--high", "dash")];
  }

  function load() {
    const info = data.layers[state.layer], values = data.get("load" + state.layer), n = loadAt.length, [top] = data.get("top" + state.layer);
    const z = [], hover = [];
    for (let e = 0; e < info.experts; e++) {
      const row = Array(n), words = Array(n);
      for (let i = 0; i < n; i++) {
        const v = values[e * n + i], u = v === 65535 ? null : (v / 65534) * top;
        row[i] = u === null ? null : logLoad(u); words[i] = show(u);
      }
      z.push(row); hover.push(words);
    }
    const layout = look({
      height: Math.max(220, Math.min(420, info.experts * 14 + 70)),
      xaxis: { title: { text: "step" } }, yaxis: { title: { text: "expert" }, autorange: "reversed", showgrid: false, tickformat: "d" },
      shapes: [frame(loadAt[nearest(loadAt, state.window)], 0, 1, "paper")],
    });
    if (info.experts <= 16) layout.yaxis.dtick = 1;
    return [[{ type: "heatmap", x: loadAt.map((w) => middle[w]), z, text: hover, zmin: LOG[0], zmax: LOG[1], colorscale: loadScale(), colorbar: loadBar(),
      hovertemplate: "expert %{y}, around step %{x}: load %{text}<extra></extra>" }], layout];
  }

  function sources() {
    const info = data.layers[state.layer], values = data.get("source" + state.layer), weight = data.get("weight" + state.layer);
    const f = nearest(frameAt, state.window), w = frameAt[f];
    const z = [], hover = [], rows = [];
    for (let s = 0; s < S; s++) {
      const row = Array(info.experts), words = Array(info.experts);
      for (let e = 0; e < info.experts; e++) {
        const v = values[(f * S + s) * info.experts + e], u = v === 255 ? null : (v / 254) ** 2 * info.experts;
        row[e] = u === null ? null : logLoad(u); words[e] = show(u);
      }
      const part = weight[w * S + s];
      z.push(row); hover.push(words);
      rows.push(data.sources[s].slice(0, 18) + (Number.isNaN(part) ? "" : " " + Math.round(100 * part) + " %"));
    }
    const layout = look({
      height: Math.max(220, Math.min(420, S * 30 + 80)),
      xaxis: { title: { text: "expert · " + layerLabel(state.layer) + ", " + windowLabel(w) }, tickformat: "d", showgrid: false },
      yaxis: { autorange: "reversed", showgrid: false, tickvals: rows.map((_, i) => i), ticktext: rows.map(escape) },
    });
    if (info.experts <= 16) layout.xaxis.dtick = 1;
    return [[{ type: "heatmap", z, text: hover, customdata: rows.map((r) => Array(info.experts).fill(escape(r))), zmin: LOG[0], zmax: LOG[1],
      colorscale: loadScale(), colorbar: loadBar(), xgap: info.experts > 64 ? 0 : 1, ygap: 1,
      hovertemplate: "%{customdata} → expert %{x}: %{text} fair shares<extra></extra>" }], layout];
  }

  function shift() {
    const lines = [["router", "router shift", "--high", "solid"], ["mix", "mix shift", "--low", "dot"]];
    const traces = lines.map(([key, name, colour, dash]) => ({
      type: "scatter", mode: W < 60 ? "lines+markers" : "lines", name, x: middle, y: data.get(key + state.layer), line: { color: css(colour), width: 2, dash },
      marker: { size: 6, symbol: key === "mix" ? "circle-open" : "circle" }, hovertemplate: name + " %{y:.3f}<extra></extra>",
    }));
    return [traces, look({ height: 260, hovermode: "x unified", showlegend: true, legend: { orientation: "h", y: 1.14, x: 0 },
      xaxis: { title: { text: "step" } }, yaxis: { title: { text: "share moved" }, rangemode: "tozero" }, shapes: [band(state.window), ...marks()] })];
  }

  function peak() {
    const info = data.layers[state.layer], values = data.get("peak" + state.layer) || [];
    const shapes = [band(state.window)], annotations = [];
    if (info.capacity_factor) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: info.capacity_factor, y1: info.capacity_factor, line: { color: css("--fail"), width: 2, dash: "dash" } });
      annotations.push({ xref: "paper", x: 1, y: info.capacity_factor, text: "capacity " + info.capacity_factor, showarrow: false, yanchor: "bottom", font: { color: css("--fail") } });
    }
    return [[{ type: "scatter", mode: "lines", x: middle, y: values, line: { color: css("--accent"), width: 2 }, hovertemplate: "peak %{y:.2f}<extra></extra>" }],
      look({ height: 260, hovermode: "x unified", xaxis: { title: { text: "step" } }, yaxis: { title: { text: "fair shares" }, rangemode: "tozero" }, shapes, annotations })];
  }

  function rates() {
    const lines = [["lr", "all parameters", "--accent", "solid"], ["router_lr", "router", "--high", "dash"]].filter(([key]) => data.get(key));
    const traces = lines.map(([key, name, colour, dash]) => ({ type: "scatter", mode: "lines", name, x: data.get("step"), y: data.get(key),
      line: { color: css(colour), width: 2, dash, shape: "hv" }, hovertemplate: name + " %{y:.3g}<extra></extra>" }));
    traces.push({ type: "scatter", mode: "markers", name: "events", x: marked.map((e) => e.step), y: marked.map(() => 0), text: marked.map((e) => escape(e.kind + ": " + e.detail)),
      marker: { color: css("--fail"), size: 9, symbol: "triangle-up" }, hovertemplate: "%{text}<extra></extra>" });
    return [traces, look({ height: 260, hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.14, x: 0 }, xaxis: { title: { text: "step" } },
      yaxis: { rangemode: "tozero", exponentformat: "e" }, shapes: [band(state.window), ...marks()] })];
  }

  // plotly reads a little HTML in texts: names must not be read as such
  function escape(text) { return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }

  const plots = { timeline, load, sources, shift };
  if (data.layers.some((_, l) => data.get("peak" + l))) plots.peak = peak; else $("peak-card").remove();
  if (data.get("lr") || data.get("router_lr") || marked.length) plots.lr = rates; else $("lr-card").remove();
  const visible = new Set();
  function draw(id, width) {
    const made = plots[id]();
    if (width) made[1].width = width;
    Plotly.react($(id), made[0], made[1], config);
    if (id === "timeline" && !$(id).dataset.ready) {
      $(id).dataset.ready = "1";
      $(id).on("plotly_click", (event) => {
        const point = event.points[0];
        const w = nearest(middle, point.x);
        select(point.data.type === "heatmap" ? point.pointIndex[0] : state.layer, w);
      });
    }
  }
  const redraw = () => visible.forEach((id) => draw(id));
  let pending = 0;
  const later = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redraw); };

  // -- selection

  function select(layer, window) {
    state.layer = Math.max(0, Math.min(L - 1, layer));
    state.window = Math.max(0, Math.min(W - 1, window));
    $("layer").value = state.layer;
    $("window").value = state.window;
    $("window").setAttribute("aria-valuetext", windowLabel(state.window));
    describe();
    later();
  }
  function describe() {
    const code = status[state.window * L + state.layer], out = $("selected");
    const badge = document.createElement("span");
    badge.className = "badge " + STATUS[code];
    badge.textContent = (SIGN[code] + " " + STATUS[code]).trim();
    const here = data.cells.filter((c) => c.layer === data.layers[state.layer].layer && c.last === last[state.window]);
    const words = here.slice(0, 4).map((c) => c.gate + " " + c.breach + (c.source === "all" ? "" : " (" + c.source + ")") +
      (c.experts.length ? ", experts " + c.experts.slice(0, 6).join(", ") : "") + (c.note ? " (" + c.note + ")" : ""));
    if (here.length > 4) words.push("and " + (here.length - 4) + " more");
    const name = data.layers[state.layer].name;
    out.replaceChildren(badge, layerLabel(state.layer) + (name ? " (" + name + ")" : "") + ", " + windowLabel(state.window) + (words.length ? ": " + words.join("; ") : ""));
  }

  $("layer").addEventListener("change", (e) => select(Number(e.target.value), state.window));
  $("window").addEventListener("input", (e) => select(state.layer, Number(e.target.value)));
  $("timeline").addEventListener("keydown", (e) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -W], End: [0, W] }[e.key];
    if (!move) return;
    e.preventDefault();
    select(state.layer + move[0], state.window + move[1]);
  });
  let timer = 0;
  $("play").addEventListener("click", () => {
    if (timer) { stop(); return; }
    if (state.window === W - 1) select(state.layer, 0);
    $("play").textContent = "⏸";
    $("play").setAttribute("aria-label", "Stop");
    timer = setInterval(() => (state.window >= W - 1 ? stop() : select(state.layer, state.window + Math.max(1, Math.round(W / 120)))), 120);
  });
  function stop() {
    clearInterval(timer);
    timer = 0;
    $("play").textContent = "▶";
    $("play").setAttribute("aria-label", "Play the windows");
  }
  document.addEventListener("click", (e) => {
    const button = e.target.closest(".goto");
    if (!button) return;
    select(indexOfLayer(Number(button.dataset.layer)), indexOfWindow(Number(button.dataset.last)));
    $("explore").scrollIntoView({ block: "start" });
    $("timeline").focus({ preventScroll: true });
  });

  // -- drawing only what comes into view

  $("explore").hidden = false;
  $("charts").hidden = false;
  const used = new Set(status);
  $("legend").replaceChildren(...[0, 1, 3, 2, 4, -1].filter((c) => used.has(c)).map((code) => {
    const item = document.createElement("span"), box = document.createElement("i");
    box.style.background = css({ "-1": "--none", 0: "--pass", 1: "--warn", 2: "--insufficient", 3: "--fail", 4: "--fail" }[code]);
    if (code === 1) box.style.color = "#221a00";
    box.textContent = code > 0 ? SIGN[code] : "";
    item.append(box, { "-1": "not judged", 0: "pass", 1: "warn", 2: "not enough data", 3: "fail", 4: "invalid" }[code]);
    return item;
  }));
  select(state.layer, state.window);
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) { visible.delete(entry.target.id); continue; }
      visible.add(entry.target.id);
      draw(entry.target.id);
    }
  }, { rootMargin: "200px" });
  Object.keys(plots).forEach((id) => watcher.observe($(id)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  // Paper has no resize event: half a page or a whole one, on A4 or Letter.
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.print = "1";
    Object.keys(plots).forEach((id) => draw(id, id === "timeline" || id === "lr" ? 660 : 310));
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.print;
    redraw();
  });
  draw("timeline");
  document.documentElement.dataset.ready = performance.now();

  function setupTable() {
    const filter = $("filter"), table = $("cells");
    if (!filter) return;
    const rows = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const [row, text] of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        count += !row.hidden;
      }
      $("shown").textContent = words.length ? count + " of " + rows.length : "";
    });
  }
})();
