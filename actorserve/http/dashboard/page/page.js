// The page: each snapshot of the server becomes tiles and marks, and each point of its history becomes charts.

import { Charts } from "./charts.js";
import { Marks } from "./marks.js";
import { follow } from "./stream.js";
import { Tiles } from "./tiles.js";

const byId = (id) => document.getElementById(id);
const tiles = new Tiles(byId("hosts"));
const marks = new Marks(byId("board"), byId("marks"), byId("trails"), byId("about"), tiles);
const charts = new Charts(byId("charts"));

function show(snapshot) {
  const instances = rowsOf(snapshot.instances);
  const requests = rowsOf(snapshot.requests);
  byId("model").textContent = snapshot.model;
  const old = snapshot.reports_age_s !== null && snapshot.reports_age_s > 4;
  const late = old ? `, loads ${Math.round(snapshot.reports_age_s)} s old` : "";
  byId("totals").textContent = `${count(instances.length, "instance")}, ${count(snapshot.num_requests, "request")}${late}`;
  tiles.show(instances, requests);
  marks.show(requests);
}

/** Columns of equal length as objects. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, row) => Object.fromEntries(names.map((name) => [name, columns[name][row]])));
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function askForKey(problem) {
  const dialog = byId("ask");
  byId("ask-problem").textContent = problem;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      const key = byId("key").value.trim();
      byId("key").value = "";
      resolve(key);
    };
  });
}

follow("dashboard/events", {
  event(name, value) {
    if (name === "snapshot") show(value);
    else if (name === "points") charts.add(value);
  },
  link(state, text) {
    const link = byId("link");
    link.dataset.state = state;
    if (link.textContent !== text) link.textContent = text;
  },
  needKey: askForKey,
});
