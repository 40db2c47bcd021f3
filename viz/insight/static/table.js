"use strict";
// The table of stages. In graph order, a chain of stages in the same state is collapsed into one row, so 150 stages
// take about 20 rows. The bottleneck is then between the stages that wait for room and those that wait for input.
// The picture shows the same states as colours, but 150 names are too small to read there.

const SPARK = { width: 72, height: 18, points: 61, step: 1.2 };

const COLUMNS = [  // id, title, hint, value to sort by
  ["number", "#", "Position in the graph", (stage) => stage.number],
  ["name", "Stage", "", (stage) => stage.name.toLowerCase()],
  ["workers", "Workers", "Filled: busy; hollow: waits for input", (stage) => stage.now.workers.length],
  ["rate", "Rate", "Items per second", (stage) => stage.now.rate],
  ["busy", "Busy", "Share of time in which workers are not waiting", (stage) => stage.now.busy],
  ["items", "Items", "Items put out since the start; for a sink, items taken", (stage) => stage.items],
  ["failed", "Failed", "Failed items since the start", (stage) => stage.now.failed],
  ["cores", "Cores", "CPU cores in use", (stage) => stage.now.cores ?? -1],
  ["trend", "Trend", "Rate over the last minute; sorted by change", (stage) => stage.change],
];

class StageTable {
  constructor(table, graph, history, select) {
    this.table = table;
    this.history = history;
    this.select = select;
    this.sorted = { column: "number", down: false };
    this.filter = "";
    this.collapsed = graph.stages.length >= 35;
    this.open = new Set();  // chains that the user has opened, by their first stage
    this.marks = {};
    this.stages = graph.stages.map((stage, number) => ({ ...stage, number: number + 1, now: null, items: 0, change: 0 }));
    this.byId = new Map(this.stages.map((stage) => [stage.id, stage]));
    const readers = new Map(), writers = new Map();
    for (const { writer, reader } of graph.edges) {
      if (!reader) continue;
      readers.set(writer, [...(readers.get(writer) ?? []), reader]);
      writers.set(reader, [...(writers.get(reader) ?? []), writer]);
    }
    this.stages.forEach((stage, index) => {  // whether a stage continues the chain of the stage above it
      const above = this.stages[index - 1]?.id;
      stage.continues = above !== undefined && readers.get(above)?.length === 1 && readers.get(above)[0] === stage.id
        && writers.get(stage.id).length === 1;
      stage.row = this.makeRow(stage);
    });
    this.heads = new Map();
    this.makeHead();
    this.shown = [];
  }

  makeHead() {
    for (const [id, title, hint] of COLUMNS) {
      const button = el("button", { type: "button", textContent: title, title: hint });
      const head = el("th", { scope: "col", className: id }, button);
      button.addEventListener("click", () => {
        const first = id !== "number" && id !== "name";  // for figures, the largest comes first
        this.sorted = { column: id, down: this.sorted.column === id ? !this.sorted.down : first };
        this.arrange();
      });
      this.table.tHead.rows[0].append(head);
      this.heads.set(id, head);
    }
  }

  makeRow(stage) {
    const button = el("button", { type: "button", className: "stage", textContent: stage.name, title: `${stage.kind} on ${stage.on}, ${stage.where}` });
    const badge = el("span", { className: "tag", hidden: true });
    const row = this.makeCells(String(stage.number), el("th", { scope: "row", className: "name" }, button, badge));
    row.badge = badge;
    row.tr.addEventListener("click", () => this.select(stage.id));
    row.tr.dataset.stage = stage.id;
    return row;
  }

  makeCells(number, name) {
    const cell = (className, ...children) => el("td", { className }, ...children);
    const bar = el("span", { className: "timebar" }), share = el("span");
    const spark = document.createElementNS(SVG, "svg");
    const line = document.createElementNS(SVG, "path");
    set(spark, "viewBox", `0 0 ${SPARK.width} ${SPARK.height}`);
    set(spark, "aria-hidden", "true");
    spark.append(line);
    const workers = cell("workers"), rate = cell("rate"), items = cell("items"), failed = cell("failed"), cores = cell("cores");
    const tr = el("tr", {}, cell("number", number), name, workers, rate, cell("busy", share, bar), items, failed, cores,
      cell("trend", spark));
    return { tr, workers, rate, bar, share, items, failed, cores, line };
  }

  update(snapshot) {
    this.isOver = !["running", "stopping"].includes(snapshot.state);
    for (const now of snapshot.stages) {
      const stage = this.byId.get(now.id);
      if (!stage) continue;
      stage.now = now;
      stage.items = now.items_out || now.items_in;
      stage.main = mainState(now);
      const rates = this.history.stages[now.id]?.rate ?? [];
      const before = rates[Math.max(0, rates.length - SPARK.points)] ?? 0;
      stage.change = before ? now.rate / before - 1 : 0;
    }
    this.arrange();
  }

  // Sort the rows, and fill those that are shown.
  arrange() {
    for (const [id, head] of this.heads) {
      if (id === this.sorted.column) set(head, "aria-sort", this.sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const value = COLUMNS.find(([id]) => id === this.sorted.column)[3], sign = this.sorted.down ? -1 : 1;
    const order = (a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : a.number - b.number);
    const stages = this.stages.filter((stage) => stage.now && stage.name.toLowerCase().includes(this.filter)).sort(order);
    const inOrder = this.sorted.column === "number" && !this.sorted.down && !this.filter;
    const rows = this.collapsed && inOrder ? this.chains(stages) : stages.map((stage) => this.fill(stage));
    if (rows.length !== this.shown.length || rows.some((tr, index) => tr !== this.shown[index])) {
      const focused = document.activeElement;
      this.table.tBodies[0].replaceChildren(...rows);
      if (this.table.contains(focused)) focused.focus({ preventScroll: true });
    }
    this.shown = rows;
  }

  chains(stages) {
    const chains = [];
    for (const stage of stages) {
      const chain = chains.at(-1), last = chain?.at(-1);
      if (last && stage.continues && stage.main === last.main && !this.standsAlone(stage) && !this.standsAlone(last)) chain.push(stage);
      else chains.push([stage]);
    }
    return chains.flatMap((chain) => {
      if (chain.length < 3) return chain.map((stage) => this.fill(stage));
      const isOpen = chain.some((stage) => this.open.has(stage.id));
      return [this.fillChain(chain, isOpen), ...(isOpen ? chain.map((stage) => this.fill(stage)) : [])];
    });
  }

  standsAlone(stage) {
    return stage.now.failed > 0 || stage.id === this.marks.limits || stage.id === this.marks.selected;
  }

  fillChain(chain, isOpen) {
    const first = chain[0];
    if (!first.chainRow) {
      const button = el("button", { type: "button", className: "chain" });
      const row = this.makeCells("", el("th", { scope: "row", className: "name" }, button));
      row.button = button;
      row.tr.className = "chain";
      button.addEventListener("click", () => {
        if (row.isOpen) for (const stage of row.chain) this.open.delete(stage.id);
        else this.open.add(first.id);
        this.arrange();
      });
      first.chainRow = row;
    }
    const row = first.chainRow;
    Object.assign(row, { chain, isOpen });
    set(row.button, "aria-expanded", isOpen);
    say(row.button, `${first.name} … ${chain.at(-1).name}`);
    set(row.button, "title", `${chain.length} stages: ${STATE_TEXT[first.main] ?? first.main}`);
    const nows = chain.map((stage) => stage.now);
    const mean = (key) => nows.reduce((sum, now) => sum + now[key], 0) / nows.length;
    const total = (key) => nows.reduce((sum, now) => sum + (now[key] ?? 0), 0);
    const together = { rate: Math.min(...nows.map((now) => now.rate)), failed: total("failed"), cores: total("cores") };
    for (const state of STATES) together[state] = mean(state);
    this.fillCells(row, together, chain.at(-1).items, chain.at(-1).id);
    say(row.workers, `${chain.length} stages`);
    return row.tr;
  }

  fill(stage) {
    const { row, now } = stage;
    this.fillCells(row, now, stage.items, stage.id);
    const states = now.workers.map((worker) => worker.state);
    const shown = states.map((state) => state[0]).join("");
    if (row.states !== shown) {
      row.states = shown;
      const most = 12, cell = row.workers;
      const squares = Math.min(states.length, most);
      while (cell.childElementCount > squares) cell.lastElementChild.remove();
      while (cell.childElementCount < squares) cell.append(el("i"));
      states.slice(0, most).forEach((state, index) => {
        const square = cell.children[index];
        if (square.className !== `worker ${state}`) square.className = `worker ${state}`;
      });
      cell.dataset.more = states.length > most ? `+${states.length - most}` : "";
      const counts = Object.keys(STATE_TEXT).map((state) => [states.filter((one) => one === state).length, STATE_TEXT[state]]);
      const text = counts.filter(([count]) => count).map(([count, words]) => `${count} ${words}`).join(", ");
      set(cell, "title", text);
      set(cell, "aria-label", `${states.length}: ${text}`);
    }
    const classes = `${now.state}${stage.id === this.marks.limits ? " limits" : ""}${stage.id === this.marks.selected ? " selected" : ""}`;
    if (row.tr.className !== classes) row.tr.className = classes;
    const limits = stage.id === this.marks.limits;
    const badge = limits ? this.marks.kind : now.state === "running" || this.isOver ? "" : now.state;
    say(row.badge, badge);
    set(row.badge, "class", limits ? "tag" : "tag quiet");
    row.badge.hidden = !badge;
    set(row.tr, "aria-current", stage.id === this.marks.selected);
    return row.tr;
  }

  fillCells(row, now, items, id) {
    say(row.rate, rateText(now.rate));
    say(row.share, percent(now.busy));
    let sum = 0;
    const parts = STATES.map((state) => {
      const from = sum;
      sum = Math.min(100, sum + Math.round(100 * now[state]));
      return `var(--${state}) ${from}% ${sum}%`;
    });
    const ground = `linear-gradient(90deg, ${parts.join(", ")}, transparent ${sum}%)`;
    if (row.ground !== ground) {
      row.ground = ground;
      row.bar.style.backgroundImage = ground;
      set(row.bar, "title", STATES.map((state) => `${STATE_TEXT[state]} ${percent(now[state])}`).join(", "));
    }
    say(row.items, countText(items));
    say(row.failed, now.failed ? countText(now.failed) : "");
    say(row.cores, now.cores === null || now.cores === undefined ? "" : now.cores.toFixed(1));
    this.drawSpark(row.line, this.history.stages[id]?.rate ?? []);
  }

  drawSpark(line, rates) {
    const last = rates.slice(-SPARK.points), height = SPARK.height - 3;
    const scale = height / Math.max(1.2 * Math.max(...last), 1e-9), first = SPARK.points - last.length;
    let d = "";
    last.forEach((rate, index) => {
      d += `${index ? "L" : "M"}${SPARK.step * (first + index)},${Math.round(10 * (height - scale * rate)) / 10 + 1}`;
    });
    set(line, "d", d);
  }

  mark(marks) {  // {selected, limits, kind}
    this.marks = marks;
  }
}
