"use strict";
// The drawn graph. The picture is the SVG of `flowchan viz`; live figures are added below each stage and on
// each channel. Positions are measured once, so an update only sets attributes that have changed.

const SVG = "http://www.w3.org/2000/svg";
const FAR = 0.62;  // pixels per unit below which the picture's texts are too small to read
const BAR = 5;  // height of the bar below a stage
const MOST_SQUARES = 8;

function svg(tag, attributes = {}, parent = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

// Parse the picture without running or loading anything that a name in it might contain.
function parsePicture(text) {
  const picture = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  if (picture.localName !== "svg") return null;
  for (const bad of picture.querySelectorAll("script, style, foreignObject, image, use")) bad.remove();
  for (const element of picture.querySelectorAll("*")) {
    for (const { name } of [...element.attributes]) {
      if (/^on|href$|^style$/i.test(name)) element.removeAttribute(name);
    }
  }
  return document.importNode(picture, true);
}

class GraphView {
  constructor(panel, graph, select) {
    this.panel = panel;
    this.stages = new Map();
    this.edges = new Map();
    this.marked = {};
    this.picture = graph.svg ? parsePicture(graph.svg) : null;
    this.isDrawn = this.picture !== null;
    if (!this.isDrawn) return;
    this.picture.removeAttribute("width");
    this.picture.removeAttribute("height");
    this.drawing = this.picture.querySelector(".graph") ?? this.picture;
    for (const part of [...this.drawing.children]) {  // remove the title and the legend; the page has its own
      if (["text", "polygon", "title"].includes(part.localName)) part.remove();
    }
    panel.append(this.picture);
    this.live = svg("g", { class: "live" }, this.drawing);
    for (const stage of graph.stages) this.addStage(stage, select);
    for (const edge of graph.edges) this.addEdge(edge);
    this.waits = svg("g", { class: "waits" }, this.drawing);
    const marker = svg("marker", { id: "wait-end", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
      orient: "auto-start-reverse" }, svg("defs", {}, this.picture));
    svg("path", { d: "M0,0L8,4L0,8z" }, marker);
    const box = this.drawing.getBBox();
    const shift = this.drawing.transform.baseVal.consolidate()?.matrix ?? { e: 0, f: 0 };
    this.whole = { x: box.x + shift.e - 12, y: box.y + shift.f - 24, w: box.width + 24, h: box.height + 36 };
    this.isWide = box.width > 1.6 * box.height;
    panel.style.setProperty("--shape", `${this.whole.w} / ${this.whole.h}`);
    panel.style.setProperty("--full", `${Math.ceil(this.whole.h * 1.35)}px`);
    this.shift = shift;
    this.listen();
    this.fit();
    new ResizeObserver(() => this.show()).observe(panel);
  }

  has(fill) {
    return this.isDrawn && this.picture.querySelector(`.node [fill="${fill}"]`) !== null;
  }

  addStage(stage, select) {
    const node = this.picture.getElementById(stage.id);
    const shape = node?.querySelector("path, polygon, ellipse");
    if (!shape) return;  // a graph may hide stages
    for (const title of node.querySelectorAll("title")) title.remove();
    for (const link of node.querySelectorAll("a")) link.removeAttribute("xlink:title");
    const tip = svg("title", {}, node);
    tip.textContent = `${stage.name} (${stage.kind} on ${stage.on}, ${stage.where})`;
    shape.classList.add("shape");
    const box = shape.getBBox();
    const width = Math.max(box.width, 92), x = box.x + box.width / 2 - width / 2, y = box.y + box.height + 3;
    const g = svg("g", { class: "figures" }, this.live);
    const halo = svg("rect", { class: "halo", x: x - 4, y: box.y - 4, width: width + 8, height: box.height + 24, rx: 8 }, g);
    const bars = STATES.map((state) => svg("rect", { class: state, x, y, width: 0, height: BAR }, g));
    const outline = svg("rect", { class: "outline", x, y, width, height: BAR }, g);
    const text = svg("text", { class: "rate", x, y: y + 14 }, g);
    const failed = svg("tspan", { class: "failed" });
    const words = document.createTextNode("");
    text.append(words, failed);
    const squares = svg("g", {}, g);
    const name = svg("text", { class: "name", x: box.x + box.width / 2, y: box.y + box.height / 2 + 7 }, g);
    name.textContent = stage.name;
    node.addEventListener("click", () => select(stage.id));
    g.addEventListener("click", () => select(stage.id));
    this.stages.set(stage.id, { node, g, halo, bars, outline, words, failed, squares, name, box, x, y, width, widths: [], shown: "" });
  }

  addEdge(edge) {
    const drawn = this.picture.getElementById(edge.id);
    const path = drawn?.querySelector("path");
    if (!path) return;
    for (const title of drawn.querySelectorAll("title")) title.remove();
    const at = path.getPointAtLength(path.getTotalLength() / 2);
    const g = svg("g", { class: "fill" }, this.live);
    svg("rect", { class: "room", x: at.x - 9, y: at.y + 4, width: 18, height: 5, rx: 1 }, g);
    const full = svg("rect", { class: "full", x: at.x - 9, y: at.y + 4, width: 0, height: 5, rx: 1 }, g);
    this.edges.set(edge.id, { g, full, tips: [svg("title", {}, drawn), svg("title", {}, g)], name: edge.name });
    for (const part of [drawn, g]) part.addEventListener("pointerenter", () => this.describeEdge(edge.id));
  }

  update(snapshot) {
    if (!this.isDrawn) return;
    this.last = snapshot;
    for (const stage of snapshot.stages) {
      const view = this.stages.get(stage.id);
      if (view) this.updateStage(view, stage);
    }
    if (!this.isFar) for (const edge of snapshot.edges) this.updateEdge(edge);
    if (this.picture.classList.contains("with-waits")) this.drawWaits();
  }

  updateStage(view, stage) {
    const widths = STATES.map((state) => Math.round(view.width * Math.min(1, stage[state])));
    if (view.widths.join() !== widths.join()) {
      let x = view.x;
      widths.forEach((width, number) => {
        set(view.bars[number], "x", x);
        set(view.bars[number], "width", width);
        x += width;
      });
      view.widths = widths;
    }
    const isOver = !["running", "stopping"].includes(this.last.state);
    set(view.g, "class", isOver ? "figures" : `figures ${stage.state}`);
    if (this.isFar) return;  // the rest is not visible
    const text = stage.state === "running" || isOver ? `${rateText(stage.rate)} · ${percent(stage.busy)}` : stage.state;
    if (view.words.data !== text) view.words.data = text;
    say(view.failed, stage.failed ? `  ✗${countText(stage.failed)}` : "");
    const shown = stage.workers.map((worker) => worker.state[0]).join("");
    if (shown !== view.shown) this.drawSquares(view, stage.workers);
    view.shown = shown;
  }

  updateEdge({ id, inside, capacity }) {
    const view = this.edges.get(id);
    if (!view) return;
    const part = capacity ? Math.min(1, inside / capacity) : 0;
    set(view.full, "width", Math.round(18 * part));
    set(view.g, "class", part >= 0.9 ? "fill high" : "fill");
  }

  describeEdge(id) {
    const edge = this.last?.edges.find((one) => one.id === id), { tips, name } = this.edges.get(id);
    if (!edge) return;
    const text = `${name}: ${edge.inside} of ${edge.capacity} items inside, ${rateText(edge.rate)}; waiting: `
      + `${edge.waiting_readers} readers, ${edge.waiting_writers} writers`;
    for (const tip of tips) say(tip, text);
  }

  // Draw one square for each worker, or a strip with one part for each state if there are many workers.
  drawSquares(view, workers) {
    const room = Math.min(view.width - 62, MOST_SQUARES * 8), right = view.x + view.width, y = view.y + 7.5;
    const parts = workers.length * 7 <= room
      ? workers.map((worker) => [worker.state, 6, 7])
      : ["busy", "place", "turn", "input", "starting"].map((state) => {
        const width = room * workers.filter((worker) => worker.state === state).length / workers.length;
        return [state, width, width];
      }).filter(([, width]) => width > 0);
    while (view.squares.children.length > parts.length) view.squares.lastChild.remove();
    let x = right - parts.reduce((sum, part) => sum + part[2], 0);
    parts.forEach(([state, width, step], number) => {
      const square = view.squares.children[number] ?? svg("rect", { y, height: 6 }, view.squares);
      set(square, "class", `worker ${state}`);
      set(square, "x", x.toFixed(1));
      set(square, "width", width.toFixed(1));
      x += step;
    });
  }

  drawWaits() {
    this.waits.replaceChildren();
    for (const wait of this.last?.wait_for ?? []) {
      const from = this.stages.get(wait.from)?.box, to = this.stages.get(wait.to)?.box;
      if (!from || !to) continue;
      const [x1, x2] = [from, to].map((box) => box.x + box.width / 2);
      const level = Math.abs(from.y - to.y) < 20;  // the arrow passes above stages in the same row
      const up = level || to.y < from.y;
      const y1 = up ? from.y : from.y + from.height, y2 = level || !up ? to.y : to.y + to.height;
      const bend = level ? Math.min(y1, y2) - 16 : (y1 + y2) / 2;
      svg("path", { d: `M${x1},${y1}C${x1},${bend} ${x2},${bend} ${x2},${y2}`, "marker-end": "url(#wait-end)" }, this.waits);
      const text = svg("text", { x: (x1 + x2) / 2, y: level ? bend + 2 : bend - 3 }, this.waits);
      text.textContent = secondsText(wait.seconds);
    }
  }

  showWaits(on) {
    if (!this.isDrawn) return;
    this.picture.classList.toggle("with-waits", on);
    if (on) this.drawWaits(); else this.waits.replaceChildren();
  }

  mark(kind, id) {  // kind is "selected" or "limits"
    if (this.marked[kind] === id) return;
    this.marked[kind] = id;
    for (const [stage, { node, halo }] of this.stages) {
      for (const element of [node, halo]) element.classList.toggle(kind, stage === id);
    }
  }

  jump(id) {
    const view = this.stages.get(id);
    if (!view) return;
    const { width, height } = this.size();
    const w = width, h = height;  // one pixel per unit
    const x = view.box.x + view.box.width / 2 + this.shift.e, y = view.box.y + view.box.height / 2 + this.shift.f;
    this.at = { x: x - w / 2, y: y - h / 2, w, h };
    this.show();
    this.panel.scrollIntoView({ block: "nearest" });
  }

  size() {
    return { width: this.panel.clientWidth || 1, height: this.panel.clientHeight || 1 };
  }

  fit() {
    this.at = { ...this.whole };
    this.show();
  }

  // Zoom by a factor. The point of the picture at position (x, y) in the panel does not move.
  zoom(factor, x = this.size().width / 2, y = this.size().height / 2) {
    const { width, height } = this.size();
    const scale = this.scale(), wanted = Math.min(4, Math.max(0.08, scale * factor));
    const left = this.at.x + this.at.w / 2 + (x - width / 2) / scale, top = this.at.y + this.at.h / 2 + (y - height / 2) / scale;
    this.at = { x: left - x / wanted, y: top - y / wanted, w: width / wanted, h: height / wanted };
    this.show();
  }

  pan(dx, dy) {
    const scale = this.scale();
    this.at.x -= dx / scale;
    this.at.y -= dy / scale;
    this.show();
  }

  scale() {
    const { width, height } = this.size();
    return Math.min(width / this.at.w, height / this.at.h);
  }

  show() {
    set(this.picture, "viewBox", `${this.at.x} ${this.at.y} ${this.at.w} ${this.at.h}`);
    const far = this.scale() < FAR;
    if (far === this.isFar) return;
    this.isFar = far;
    this.picture.classList.toggle("far", far);
    const views = [...this.stages.values()];
    const lengths = far ? views.map((view) => view.name.getComputedTextLength()) : [];
    lengths.forEach((length, number) => {
      const { name, width } = views[number];
      if (length > width + 10) set(name, "textLength", width + 10);
      set(name, "lengthAdjust", "spacingAndGlyphs");
    });
    for (const { bars, outline, box, y } of views) {  // the bar covers the box of its stage
      for (const bar of [...bars, outline]) {
        set(bar, "y", far ? box.y : y);
        set(bar, "height", far ? box.height : BAR);
      }
    }
    if (this.last) this.update(this.last);
  }

  listen() {
    const touches = new Map();
    let moved = 0;
    const place = (event) => {
      const frame = this.panel.getBoundingClientRect();
      return [event.clientX - frame.left, event.clientY - frame.top];
    };
    this.panel.addEventListener("pointerdown", (event) => {
      touches.set(event.pointerId, place(event));
      moved = 0;
    });
    this.panel.addEventListener("pointermove", (event) => {
      const before = touches.get(event.pointerId);
      if (!before) return;
      const [x, y] = place(event);
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      if (moved > 4) this.panel.setPointerCapture(event.pointerId);
      if (touches.size === 2) {
        const [other] = [...touches].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
        const apart = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) || 1;
        this.zoom(apart([x, y], other) / apart(before, other), other[0], other[1]);
      } else if (moved > 4) {
        this.pan(x - before[0], y - before[1]);
      }
      touches.set(event.pointerId, [x, y]);
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      this.panel.addEventListener(end, (event) => touches.delete(event.pointerId));
    }
    this.panel.addEventListener("click", (event) => {  // a click that ends a drag selects nothing
      if (moved > 4) event.stopPropagation();
    }, true);
    this.panel.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.panel) return;  // let the page scroll
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), ...place(event));
    }, { passive: false });
    this.panel.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => this.pan(60, 0), ArrowRight: () => this.pan(-60, 0),
        ArrowUp: () => this.pan(0, 60), ArrowDown: () => this.pan(0, -60),
        "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit(),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }
}
