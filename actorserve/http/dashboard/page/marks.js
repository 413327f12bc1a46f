// Requests as marks. A mark lies in the tile of its instance, and glides to another tile when its request moves.

import { NO_WORKER } from "./tiles.js";

const CELLS_PX = [32, 26, 20, 16, 13, 10, 8, 6, 5, 4]; // the largest one that leaves room for all marks of a tile is used
const MOVE_MS = 1100;
const TRAIL_MS = 4000;
const SHORT_TOKENS = 16;
const LONG_TOKENS = 16384;
const SVG = "http://www.w3.org/2000/svg";

export class Marks {
  #board;
  #layer;
  #trails;
  #about;
  #tiles;
  #marks = new Map(); // by the request's id
  #slots = new Map(); // instance -> the ids of its requests, by place
  #pointed = null;

  constructor(board, layer, trails, about, tiles) {
    this.#board = board;
    this.#layer = layer;
    this.#trails = trails;
    this.#about = about;
    this.#tiles = tiles;
    this.#layer.addEventListener("pointerover", (event) => this.#point(event.target.dataset?.request ?? null));
    this.#layer.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.#place(false)).observe(board);
  }

  show(requests) {
    const open = new Set();
    for (const request of requests) {
      if (this.#tiles.field(request.worker) === undefined) request.worker = NO_WORKER;
      open.add(request.id);
      const mark = this.#marks.get(request.id) ?? this.#make(request);
      if (mark.request.worker !== request.worker) {
        mark.leaves = request.worker !== NO_WORKER && mark.request.worker !== NO_WORKER;
        this.#leave(mark.request);
        this.#enter(request);
      }
      mark.request = request;
      mark.element.dataset.state = stateOf(request);
      mark.element.dataset.worker = request.worker;
      mark.element.toggleAttribute("data-moved", request.moves > 0);
    }
    for (const [id, mark] of this.#marks) {
      if (!open.has(id)) this.#end(id, mark);
    }
    this.#place(true);
    this.#layer.getBoundingClientRect(); // new marks get their places now, so that they do not glide to them
    for (const mark of this.#layer.querySelectorAll(".new")) mark.classList.remove("new");
    this.#tell();
  }

  #make(request) {
    const made = document.createElement("span");
    made.className = "mark new";
    made.dataset.request = request.id;
    this.#layer.append(made);
    const mark = { element: made, request, x: null, y: null, leaves: false };
    this.#marks.set(request.id, mark);
    this.#enter(request);
    return mark;
  }

  #end(id, mark) {
    this.#leave(mark.request);
    this.#marks.delete(id);
    mark.element.classList.add("ended");
    delete mark.element.dataset.request;
    setTimeout(() => mark.element.remove(), 500);
  }

  /** Take the first free place, so that the other marks stay where they are. */
  #enter(request) {
    const slots = this.#slotsOf(request.worker);
    const free = slots.indexOf(null);
    if (free < 0) slots.push(request.id);
    else slots[free] = request.id;
  }

  #leave(request) {
    const slots = this.#slotsOf(request.worker);
    const at = slots.indexOf(request.id);
    if (at >= 0) slots[at] = null;
    while (slots.length > 0 && slots[slots.length - 1] === null) slots.pop();
  }

  #slotsOf(worker) {
    if (!this.#slots.has(worker)) this.#slots.set(worker, []);
    return this.#slots.get(worker);
  }

  #place(canMove) {
    const board = this.#board.getBoundingClientRect();
    for (const [worker, slots] of this.#slots) {
      const field = this.#tiles.field(worker)?.getBoundingClientRect();
      if (field === undefined) {
        this.#slots.delete(worker);
        continue;
      }
      const cell = cellFor(slots, field);
      const columns = Math.max(1, Math.floor(field.width / cell));
      slots.forEach((id, place) => {
        const mark = this.#marks.get(id);
        if (mark === undefined) return;
        const x = field.left - board.left + ((place % columns) + 0.5) * cell;
        const y = field.top - board.top + (Math.floor(place / columns) + 0.5) * cell;
        this.#put(mark, x, y, cell, canMove);
      });
    }
  }

  #put(mark, x, y, cell, canMove) {
    const { element, request } = mark;
    const diameter = cell * sizeOf(request.prompt_tokens + request.output_tokens);
    element.style.setProperty("--size", `${diameter.toFixed(1)}px`);
    element.style.setProperty("--done", `${Math.round((100 * request.output_tokens) / Math.max(1, request.max_tokens))}%`);
    if (mark.x === x && mark.y === y) return;
    const from = { x: mark.x, y: mark.y };
    mark.x = x;
    mark.y = y;
    element.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;
    if (mark.leaves && canMove && from.x !== null) {
      element.classList.add("moving");
      setTimeout(() => element.classList.remove("moving"), MOVE_MS);
      this.#trail(from, mark);
    }
    mark.leaves = false;
  }

  /** A thin arc from the old place to the new one, which fades. */
  #trail(from, to) {
    const path = document.createElementNS(SVG, "path");
    const bend = Math.min(60, Math.hypot(to.x - from.x, to.y - from.y) / 4);
    const [middleX, middleY] = [(from.x + to.x) / 2, (from.y + to.y) / 2 - bend];
    path.setAttribute("d", `M ${from.x} ${from.y} Q ${middleX} ${middleY} ${to.x} ${to.y}`);
    path.setAttribute("pathLength", "1");
    this.#trails.append(path);
    setTimeout(() => path.remove(), TRAIL_MS);
  }

  #point(id) {
    this.#marks.get(this.#pointed)?.element.classList.remove("pointed");
    this.#pointed = id;
    this.#marks.get(id)?.element.classList.add("pointed");
    this.#tell();
  }

  #tell() {
    const request = this.#marks.get(this.#pointed)?.request;
    const text = request === undefined ? "Point at a mark to see its request." : describe(request);
    if (this.#about.textContent !== text) this.#about.textContent = text;
  }
}

/** A cell in pixels, so that all places fit. If there is none, the gaps between marks are closed first. */
function cellFor(slots, field) {
  const fits = (cell) => Math.floor(field.width / cell) * Math.floor(field.height / cell) >= slots.length;
  if (!fits(CELLS_PX[0])) {
    const used = slots.filter((id) => id !== null);
    slots.splice(0, slots.length, ...used);
  }
  return CELLS_PX.find(fits) ?? CELLS_PX[CELLS_PX.length - 1];
}

/** A mark's diameter as a part of its cell: it grows with the logarithm of the context. */
function sizeOf(numTokens) {
  const part = Math.log(Math.max(1, numTokens / SHORT_TOKENS)) / Math.log(LONG_TOKENS / SHORT_TOKENS);
  return 0.4 + 0.5 * Math.min(1, part);
}

function stateOf(request) {
  if (request.worker === NO_WORKER || request.state === "waiting") return "waiting";
  return request.output_tokens === 0 ? "starting" : "running";
}

function describe(request) {
  const where = request.worker === NO_WORKER ? "waits for a worker" : `${request.state} on ${request.worker}`;
  const tokens = `${request.prompt_tokens} tokens in, ${request.output_tokens} of at most ${request.max_tokens} out`;
  const moves = request.moves === 0 ? "" : `, moved ${request.moves === 1 ? "once" : `${request.moves} times`}`;
  const key = request.client === "" ? "" : `, key ${request.client}`;
  const priority = request.priority === 0 ? "" : `, priority ${request.priority}`;
  return `${request.id}: ${where}, ${tokens}, ${request.age_s.toFixed(1)} s old${moves}${priority}${key}`;
}
