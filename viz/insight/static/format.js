"use strict";
// Texts of figures, and small helpers to make and change elements. Names only become text, never markup.

const STATES = ["busy", "input", "place", "turn"];
const STATE_TEXT = {
  busy: "busy", input: "waits for input", place: "waits for place", turn: "waits for its turn", starting: "starting",
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

// The state in which the workers of a stage spend most of their time. A state must lead by 10 points to replace
// the last one, so that stages between two states do not flicker.
const mainStates = new Map();

function mainState(stage) {
  if (stage.state !== "running") return stage.state;
  const last = mainStates.get(stage.id);
  const most = STATES.reduce((a, b) => (stage[b] > stage[a] ? b : a));
  if (last === undefined || stage[most] > stage[last] + 0.1) mainStates.set(stage.id, most);
  return mainStates.get(stage.id);
}
