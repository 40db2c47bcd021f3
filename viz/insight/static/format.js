"use strict";
// Format figures, and create and change elements. Names become text only, never markup.

const STATES = ["busy", "input", "place", "turn"];
const STATE_TEXT = {
  busy: "busy", input: "waits for input", place: "waits for room", turn: "waits for its turn", starting: "starting",
};

function el(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const grouped = new Intl.NumberFormat("en");

function countText(number) {
  return grouped.format(number);
}

function rateText(rate) {
  if (rate === null || rate === undefined) return "–";
  return rate >= 10 || rate === 0 ? `${grouped.format(Math.round(rate))}/s` : `${Number(rate.toPrecision(2))}/s`;
}

function percent(part) {
  return `${Math.round(100 * part)} %`;
}

function secondsText(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Return what a stage mostly does. A stage is busy if it works at least 85 % of the time (BUSY in causes.py).
// Otherwise, its state is its longest wait. The margins keep a stage between two states from flickering.
const mainStates = new Map();

function mainState(stage) {
  if (stage.state !== "running") return stage.state;
  const last = mainStates.get(stage.id);
  let main = last;
  if (stage.busy >= (last === "busy" ? 0.75 : 0.85)) {
    main = "busy";
  } else {
    const most = ["input", "place", "turn"].reduce((a, b) => (stage[b] > stage[a] ? b : a));
    if (last === undefined || last === "busy" || stage[most] > stage[last] + 0.1) main = most;
  }
  mainStates.set(stage.id, main);
  return main;
}
