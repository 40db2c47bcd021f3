"use strict";
// The live page of a run. It reads the graph once, and then follows the server's events. A saved report contains its
// graph, history and last snapshot in the element #saved, and opens no connection.

const $ = (id) => document.getElementById(id);
const MOST_POINTS = 3600;
const SILENT_AFTER_S = 5;
const CAUSE_TEXT = {
  bottleneck: "Bottleneck", input: "Waits for the input", consumer: "Waits for the program", order: "Waits for earlier items",
  gil: "Interpreter lock", cores: "All cores in use", memory: "Out of memory", in_flight: "Too few items in flight",
  starting: "Starting",
};
const PLACES = {  // fill colours of the picture
  "#eef4fb": ["threads", "on threads"], "#fbd99b": ["processes", "in processes"], "#f3bccb": ["hosts", "on other hosts"],
};
const STATE_MARK = { running: "●", stopping: "◐", done: "✓", failed: "✗", stopped: "■", aborted: "✗" };

class Page {
  constructor(graph, isLive) {
    this.graph = graph;
    this.names = new Map(graph.stages.map((stage) => [stage.id, stage]));
    this.history = { elapsed: [], end_rate: [], stages: {} };
    this.snapshot = null;
    this.selected = null;
    this.follows = true;  // the selection follows the cause until the user selects a stage
    this.whatIf = null;
    this.report = null;  // the page as one file, fetched at the start
    say($("name"), graph.name || "graph");
    document.title = `${graph.name || "graph"} – flowchan`;
    const select = (id) => this.select(id);
    this.view = new GraphView($("picture"), graph, select);
    this.table = new StageTable($("table"), graph, this.history, select);
    $("graph").hidden = !this.view.isDrawn;
    document.body.classList.toggle("tall", this.view.isDrawn && !this.view.isWide);
    set($("picture"), "aria-label", `Graph of ${graph.stages.length} stages. The table lists the same figures. Use the arrow keys to move, and plus and minus to zoom.`);
    this.makeLegend();
    this.listen();
    this.rateChart = makeChart($("rate-chart"), "--busy", null);
    this.busyChart = makeChart($("busy-chart"), "--busy", [0, 1]);
    if (!isLive) for (const id of ["save", "stacks", "what-if"]) $(id).hidden = true;
  }

  makeLegend() {
    const key = (className, text) => el("span", {}, el("i", { className }), text);
    $("legend").replaceChildren(
      ...STATES.map((state) => key(`key ${state}`, STATE_TEXT[state])),
      key("worker busy", "worker, busy"), key("worker input", "worker, waiting for input"),
      key("key room", "fill level of a channel"),
      ...Object.entries(PLACES).filter(([fill]) => this.view.has(fill)).map(([, [className, text]]) => key(`key ${className}`, text)),
    );
  }

  listen() {
    const view = this.view;
    $("zoom-in").addEventListener("click", () => view.zoom(1.25));
    $("zoom-out").addEventListener("click", () => view.zoom(0.8));
    $("fit").addEventListener("click", () => view.fit());
    $("jump").addEventListener("click", () => this.jump());
    $("cause-stage").addEventListener("click", () => this.jump());
    $("waits").addEventListener("click", () => this.toggleWaits());
    $("collapse").checked = this.table.collapsed;
    $("collapse-label").hidden = !this.table.collapsed;
    $("collapse").addEventListener("change", () => {
      this.table.collapsed = $("collapse").checked;
      this.table.arrange();
    });
    $("filter").addEventListener("input", () => {
      this.table.filter = $("filter").value.trim().toLowerCase();
      this.table.arrange();
    });
    $("save").addEventListener("click", (event) => this.save(event));
    $("stacks").addEventListener("click", () => this.showStacks());
    $("what-if").addEventListener("click", () => this.askWhatIf());
    document.addEventListener("keydown", (event) => {
      if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "b") this.jump();
      if (event.key === "w") this.toggleWaits();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of [this.rateChart, this.busyChart]) chart.redraw(false);
    });
  }

  toggleWaits() {
    const on = $("waits").getAttribute("aria-pressed") !== "true";
    set($("waits"), "aria-pressed", on);
    this.view.showWaits(on);
  }

  jump() {
    const stage = this.snapshot?.cause?.stage;
    if (!stage) return;
    this.select(stage);
    this.view.jump(stage);
  }

  // The server closes when the run ends. The page then puts the final state into the report that it fetched at the
  // start.
  save(event) {
    if (!this.report || !document.body.classList.contains("ended")) return;  // the server sends the report
    event.preventDefault();
    const state = { graph: this.graph, history: this.history, snapshot: this.snapshot };
    const text = JSON.stringify(state).replaceAll("<", "\\u003c");
    const report = this.report.replace(/(<script type="application\/json" id="saved">)[^<]*/, (_, tag) => tag + text);
    const address = URL.createObjectURL(new Blob([report], { type: "text/html" }));
    el("a", { href: address, download: "report.html" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }

  select(id) {
    this.follows = false;
    this.selected = id;
    this.forget();
    this.refresh();
  }

  forget() {  // clear the data of the previously selected stage
    $("stack-texts").replaceChildren();
    this.showWhatIf();
  }

  takeHistory(history) {
    Object.assign(this.history, history);
    this.refresh();
  }

  takeSnapshot(snapshot) {
    const begun = performance.now();
    this.snapshot = snapshot;
    this.remember(snapshot);
    if (this.follows) {
      const follow = snapshot.cause?.stage ?? this.selected ?? snapshot.stages[0]?.id ?? null;
      if (follow !== this.selected) {
        this.selected = follow;
        this.forget();
      }
    }
    this.refresh();
    performance.clearMeasures("update");
    performance.measure("update", { start: begun, end: performance.now() });
  }

  remember(snapshot) {
    const { history } = this;
    if (snapshot.elapsed <= (history.elapsed.at(-1) ?? -1)) return;
    history.elapsed.push(snapshot.elapsed);
    history.end_rate.push(snapshot.end_rate);
    for (const stage of snapshot.stages) {
      const own = (history.stages[stage.id] ??= { rate: [], busy: [] });
      own.rate.push(stage.rate);
      own.busy.push(stage.busy);
    }
    if (history.elapsed.length <= MOST_POINTS) return;
    const series = [history, ...Object.values(history.stages)];
    for (const of of series) {  // keep every second point of the older half
      for (const [key, values] of Object.entries(of)) {
        if (Array.isArray(values)) of[key] = values.filter((_, index) => index % 2 || index > MOST_POINTS / 2);
      }
    }
  }

  refresh() {
    const { snapshot, selected } = this;
    if (!snapshot) return;
    const cause = snapshot.cause;
    const limits = cause?.stage ?? null;
    this.table.mark({ selected, limits, kind: cause?.kind === "bottleneck" ? "bottleneck" : "limits the run" });
    this.view.mark("selected", selected);
    this.view.mark("limits", limits);
    this.showHeader(snapshot);
    this.view.update(snapshot);
    this.table.update(snapshot);
    this.showStage(snapshot.stages.find((stage) => stage.id === selected), snapshot);
    const { elapsed, end_rate, stages } = this.history;
    this.rateChart.setData([elapsed, end_rate]);
    this.busyChart.setData([elapsed, stages[selected]?.busy ?? elapsed.map(() => null)]);
    this.showLatency(snapshot.latency);
    showList($("failures"), snapshot.failures, (failure) => this.event(failure));
    showList($("decisions"), snapshot.decisions, (decision) => this.event(decision));
  }

  showHeader({ state, elapsed, end_rate, progress, cause, advice, failures }) {
    say($("state"), `${STATE_MARK[state] ?? ""} ${state}`);
    set($("state"), "class", `badge ${state}`);
    say($("elapsed"), secondsText(elapsed));
    say($("rate"), rateText(end_rate));
    $("progress").hidden = !progress;
    if (progress) {
      const { done, total, eta } = progress;
      if (total) Object.assign($("bar"), { max: total, value: done }); else $("bar").removeAttribute("value");
      const left = eta === null || eta === undefined || state !== "running" ? "" : ` · ${secondsText(eta)} left`;
      say($("left"), total ? `${countText(done)} of ${countText(total)}${left}` : countText(done));
    }
    const failure = state === "failed" ? failures.at(-1) : null;
    $("failure").hidden = !failure;
    say($("failure-text"), failure ? lastLine(failure.text) : "");
    $("cause").hidden = !cause && !advice;
    const stage = cause?.stage ? this.names.get(cause.stage) : null;
    say($("cause-kind"), cause ? CAUSE_TEXT[cause.kind] ?? cause.kind : "");
    $("cause-kind").hidden = !cause;
    $("cause-stage").hidden = $("jump").hidden = !stage;
    say($("cause-stage"), stage?.name ?? "");
    say($("cause-why"), cause?.why ?? "");
    say($("advice"), advice ?? "");
    $("advice").hidden = !advice;
  }

  showStage(now, snapshot) {
    $("stage").hidden = !now;
    if (!now) return;
    const stage = this.names.get(now.id);
    say($("stage-name"), stage.name);
    say($("stage-about"), `${stage.kind} · on ${stage.on} · ${stage.where}`);
    say($("busy-of"), stage.name);
    const figures = [
      ["rate", rateText(now.rate)], ...STATES.map((state) => [STATE_TEXT[state], percent(now[state])]),
      ["items in", countText(now.items_in)], ["items out", countText(now.items_out)], ["failed", countText(now.failed)],
      ["retried", countText(now.retried)], ["restarts", countText(now.restarts)],
      ["cores in use", now.cores === null || now.cores === undefined ? "unknown" : now.cores.toFixed(2)],
    ];
    const list = $("stage-figures");
    while (list.childElementCount < figures.length) list.append(el("div", {}, el("dt"), el("dd")));
    figures.forEach(([key, value], index) => {
      say(list.children[index].firstChild, key);
      say(list.children[index].lastChild, value);
    });
    const chips = $("stage-workers"), workers = now.workers.slice(0, 64);
    while (chips.childElementCount > workers.length) chips.lastChild.remove();
    workers.forEach(({ number, state }, index) => {
      const chip = chips.children[index] ?? chips.appendChild(el("span", { className: "chip" }, el("i"), el("span")));
      if (chip.firstChild.className !== `worker ${state}`) chip.firstChild.className = `worker ${state}`;
      say(chip.lastChild, `#${number} ${STATE_TEXT[state] ?? state}`);
    });
    const failures = snapshot.failures.filter((failure) => failure.stage === now.id).slice(-5).reverse();
    const shown = JSON.stringify([now.id, failures]);
    if (shown !== this.shownFailures) {
      this.shownFailures = shown;
      $("stage-failures").replaceChildren(...(failures.length ? [el("h3", { textContent: "Last errors" })] : []),
        ...failures.map((failure) => el("pre", { textContent: failure.text })));
    }
  }

  showLatency(rows) {
    $("latency").hidden = !rows.length;
    const text = (path) => path.map((id) => this.names.get(id)?.name ?? id);
    const short = (names) => (names.length > 4 ? [names[0], names[1], "…", names.at(-1)] : names).join(" → ");
    fillRows($("latency").querySelector("tbody"), rows.map((row) => [
      [short(text(row.path)), text(row.path).join(" → ")], [countText(row.count)], [secondsText(row.p50)], [secondsText(row.p99)],
    ]));
  }

  event({ elapsed, stage, text }) {  // for a traceback, show the last line
    const where = stage ? [el("b", { textContent: this.names.get(stage)?.name ?? stage }), " "] : [];
    return el("li", {}, el("span", { className: "quiet", textContent: `${secondsText(elapsed)} ` }), ...where,
      el("span", { title: text, textContent: lastLine(text) }));
  }

  async showStacks() {
    const id = this.selected, place = $("stack-texts");
    const answer = await ask(`stacks?stage=${encodeURIComponent(id)}`, $("stacks"));
    if (!answer || id !== this.selected) return;
    const stacks = Object.entries(answer.stacks ?? {});
    place.replaceChildren(...(answer.error ? [el("p", { className: "quiet", textContent: answer.error })]
      : stacks.flatMap(([worker, text]) => [el("h3", { textContent: worker }), el("pre", { textContent: text })])));
  }

  async askWhatIf() {
    this.whatIf = await ask("what_if", $("what-if")) ?? this.whatIf;
    this.showWhatIf();
  }

  showWhatIf() {
    const place = $("what-if-rows"), { whatIf } = this;
    place.replaceChildren();
    if (!whatIf) return;
    if (whatIf.error) {
      place.append(el("p", { className: "quiet", textContent: whatIf.error }));
      return;
    }
    const rows = [...whatIf.rows].sort((a, b) => (b.stage === this.selected) - (a.stage === this.selected) || b.predicted - a.predicted);
    const body = el("tbody"), titles = ["Stage", "Change", "Now", "Predicted", "Range", "Then limited by"];
    const head = el("thead", {}, el("tr", {}, ...titles.map((textContent) => el("th", { scope: "col", textContent }))));
    fillRows(body, rows.slice(0, 8).map((row) => [
      [this.names.get(row.stage)?.name ?? row.stage], [row.change], [rateText(row.now)], [rateText(row.predicted)],
      [`${rateText(row.low)} – ${rateText(row.high)}`], [row.limited_by ?? "", row.why ?? ""],
    ]));
    place.append(el("h3", { textContent: "Predicted rates after one change" }), el("div", { className: "scroll" }, el("table", {}, head, body)));
  }
}

function lastLine(text) {
  return text.trimEnd().split("\n").at(-1);
}

function fillRows(body, rows) {  // each cell is [text, tooltip]
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    cells.forEach(([text, tip], column) => {
      const cell = row.cells[column] ?? row.insertCell();
      say(cell, text);
      if (tip) set(cell, "title", tip);
    });
  });
}

function showList(section, events, make) {  // newest first; rebuild the list only after a new event
  section.hidden = !events.length;
  const key = JSON.stringify([events.length, events.at(-1)]);
  if (section.dataset.shown === key) return;
  section.dataset.shown = key;
  section.querySelector("ol").replaceChildren(...[...events].reverse().map(make));
}

async function ask(address, button) {
  button.disabled = true;
  try {
    const answer = await fetch(`./${address}`);
    if (answer.status === 404) button.hidden = true;
    return await answer.json();
  } catch (error) {
    return { error: `The run did not answer: ${error.message}` };
  } finally {
    button.disabled = false;
  }
}

function makeChart(place, colour, range) {
  const style = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
  const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const seconds = (_, values) => values.map((value) => (value >= 120 ? `${Math.round(value / 6) / 10} min` : `${value} s`));
  const share = (_, values) => values.map(percent);
  const size = () => ({ width: Math.max(120, place.clientWidth), height: 120 });
  const chart = new uPlot({
    ...size(),
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: range ?? ((_, low, high) => [0, Math.max(1, (high ?? 1) * 1.1)]) } },
    axes: [{ ...axis, size: 24, space: 60, values: seconds }, { ...axis, size: 46, space: 26, ...(range && { values: share }) }],
    series: [{}, { stroke: style(colour), width: 1.5, fill: style("--area"), points: { show: false }, spanGaps: false }],
  }, [[], []], place);
  new ResizeObserver(() => chart.setSize(size())).observe(place);
  return chart;
}

// Show whether the server still responds. After the run has ended, no server is needed.
class Connection {
  constructor(page) {
    this.page = page;
    this.heard = performance.now();
    this.ended = false;
    this.connect();
    this.timer = setInterval(() => this.show(), 1000);
  }

  connect() {
    const { page } = this;
    this.source = new EventSource("./snapshots");
    const take = (name, act) => this.source.addEventListener(name, (event) => {
      this.heard = performance.now();
      act(JSON.parse(event.data));
      this.show();
    });
    take("history", (history) => page.takeHistory(history));
    take("snapshot", (snapshot) => page.takeSnapshot(snapshot));
    take("end", () => {
      this.ended = true;
      this.source.close();
    });
    this.source.addEventListener("error", () => this.show());
  }

  show() {
    const silent = Math.round((performance.now() - this.heard) / 1000);
    const lost = !this.ended && this.source.readyState !== EventSource.OPEN;
    const text = this.ended ? ""
      : !lost ? (silent > SILENT_AFTER_S ? `The run has sent nothing for ${silent} s.` : "")
        : this.page.snapshot ? `Connection to the run lost. The figures are ${silent} s old; trying to reconnect.`
          : silent ? "The run is not answering; trying to reconnect." : "";
    if (this.ended) clearInterval(this.timer);
    say($("connection"), text);
    $("connection").hidden = !text;
    document.body.classList.toggle("stale", Boolean(text));
    document.body.classList.toggle("ended", this.ended);
    if (lost && silent && this.source.readyState === EventSource.CLOSED) this.connect();  // the connection was refused
  }
}

async function begin() {
  const saved = $("saved");
  if (saved) {
    const { graph, history, snapshot } = JSON.parse(saved.textContent);
    const page = new Page(graph, false);
    page.takeHistory(history);
    page.takeSnapshot(snapshot);
    document.body.classList.add("ended");
    return;
  }
  try {
    const answer = await fetch("./graph");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new Page(await answer.json(), true);
    new Connection(page);
    const report = await fetch("./report.html").catch(() => null);  // the run may have ended
    if (report?.ok) page.report = await report.text();
  } catch (error) {
    say($("connection"), `The page could not read the graph: ${error.message}. Reload the page.`);
    $("connection").hidden = false;
  }
}

document.addEventListener("DOMContentLoaded", begin);
