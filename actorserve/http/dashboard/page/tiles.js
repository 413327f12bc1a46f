// Instances as tiles, grouped by host, and one more tile for the requests that have no worker.

export const NO_WORKER = "";
const MANY_TILES = 24; // more tiles are small
const FEW_TILES = 4; // so many, or fewer, are large
const NEARLY_FULL = 0.85;

export class Tiles {
  #root;
  #tiles = new Map(); // by the instance's name
  #hosts = new Map();

  constructor(root) {
    this.#root = root;
  }

  /** The element in which the marks of an instance's requests lie; undefined for an unknown instance. */
  field(name) {
    return this.#tiles.get(name)?.field;
  }

  show(instances, requests) {
    const numMarks = new Map();
    for (const request of requests) numMarks.set(request.worker, (numMarks.get(request.worker) ?? 0) + 1);
    this.#root.classList.toggle("dense", instances.length > MANY_TILES);
    this.#root.classList.toggle("few", instances.length <= FEW_TILES);
    this.#root.classList.toggle("one-host", new Set(instances.map((instance) => instance.host)).size <= 1);
    const gone = new Set(this.#tiles.keys());
    this.#queue().show(numMarks.get(NO_WORKER) ?? 0);
    gone.delete(NO_WORKER);
    for (const instance of instances) {
      this.#tile(instance).show(instance, numMarks.get(instance.name) ?? 0);
      gone.delete(instance.name);
    }
    for (const name of gone) {
      this.#tiles.get(name).element.remove();
      this.#tiles.delete(name);
    }
    for (const [host, section] of this.#hosts) {
      if (!section.querySelector(".tile")) {
        section.remove();
        this.#hosts.delete(host);
      }
    }
  }

  #queue() {
    if (!this.#tiles.has(NO_WORKER)) {
      const queue = new Queue();
      this.#root.prepend(queue.element);
      this.#tiles.set(NO_WORKER, queue);
    }
    return this.#tiles.get(NO_WORKER);
  }

  #tile(instance) {
    let tile = this.#tiles.get(instance.name);
    if (tile === undefined) {
      tile = new Tile(instance.name);
      this.#tiles.set(instance.name, tile);
      this.#host(instance.host).append(tile.element);
    }
    return tile;
  }

  #host(name) {
    let section = this.#hosts.get(name);
    if (section === undefined) {
      section = element("section", "host");
      section.setAttribute("aria-label", name === "" ? "Instances" : `Host ${name}`);
      section.append(element("h2", "", name), element("div", "tiles"));
      this.#root.append(section);
      this.#hosts.set(name, section);
    }
    return section.lastChild;
  }
}

/** Where requests wait that have no worker. */
class Queue {
  #label = element("p", "label");

  constructor() {
    this.element = element("div", "queue");
    this.element.setAttribute("role", "group");
    this.field = element("div", "field");
    this.element.append(this.#label, this.field);
  }

  show(numWaiting) {
    put(this.#label, numWaiting === 0 ? "No request waits for a worker" : `${numWaiting} wait for a worker`);
    this.element.classList.toggle("empty", numWaiting === 0);
  }
}

class Tile {
  #name;
  #rate = element("span", "rate");
  #state = element("span", "state");
  #bar = element("div", "bar");
  #full = element("div", "full");
  #share = element("span", "share");
  #levels = element("div", "levels");
  #queue = element("div", "queue-levels");
  #facts = element("p", "facts");
  #elsewhere = element("span", "elsewhere");
  #extra = []; // how many requests of other hosts' gateways there were lately

  constructor(name) {
    this.#name = name;
    this.element = element("article", "tile");
    this.element.setAttribute("role", "group");
    this.element.dataset.instance = name;
    const head = element("header");
    head.append(element("h3", "", name.slice(name.lastIndexOf("/") + 1)), this.#state, this.#rate);
    this.field = element("div", "field");
    this.field.append(this.#elsewhere);
    const memory = element("div", "memory");
    this.#bar.setAttribute("role", "meter");
    this.#bar.setAttribute("aria-label", "KV memory in use");
    this.#bar.setAttribute("aria-valuemin", "0");
    this.#bar.setAttribute("aria-valuemax", "100");
    this.#bar.append(this.#full);
    memory.append(element("span", "label", "KV"), this.#bar, this.#share);
    const foot = element("div", "foot");
    this.#levels.setAttribute("role", "img");
    this.#queue.append(element("span", "label", "levels"), this.#levels);
    foot.append(this.#facts, this.#queue);
    this.element.append(head, this.field, memory, foot);
  }

  show(instance, numMarks) {
    const silent = instance.kv_total_bytes === null;
    const share = silent || !instance.kv_total_bytes ? 0 : instance.kv_used_bytes / instance.kv_total_bytes;
    const percent = Math.round(100 * share);
    this.element.dataset.state = instance.state;
    put(this.#state, instance.state === "open" ? "" : instance.state);
    put(this.#rate, `${Math.round(instance.tokens_per_s).toLocaleString("en")} tok/s`);
    this.#full.style.width = `${percent}%`;
    this.#bar.setAttribute("aria-valuenow", String(percent));
    this.#bar.classList.toggle("nearly-full", share >= NEARLY_FULL);
    put(this.#share, silent ? "?" : `${percent} %`);
    const tokens = silent ? 0 : Math.round(instance.kv_total_bytes * instance.tokens_per_byte);
    this.#bar.title = silent ? "no report yet" : `KV of ${tokens.toLocaleString("en")} tokens`;
    put(this.#facts, silent ? "no report yet" : factsOf(instance));
    this.#facts.title = this.#facts.textContent;
    this.#showLevels(instance.levels ?? []);
    this.#showElsewhere(silent ? 0 : instance.running + instance.waiting - numMarks);
    const words = silent ? "no report yet" : `KV ${percent} %, ${factsOf(instance)}`;
    this.element.setAttribute("aria-label", `${this.#name}, ${instance.state}: ${words}`);
  }

  /** A column for each level of the feedback queue, from the most urgent one on. */
  #showLevels(levels) {
    let last = levels.length;
    while (last > 0 && levels[last - 1] === 0) last -= 1;
    const shown = Math.max(last, Math.min(levels.length, 4));
    while (this.#levels.childElementCount > shown) this.#levels.lastChild.remove();
    while (this.#levels.childElementCount < shown) this.#levels.append(element("i"));
    const most = Math.max(4, ...levels);
    for (let level = 0; level < shown; level += 1) {
      const column = this.#levels.children[level];
      column.style.height = `${Math.round((100 * levels[level]) / most)}%`;
      column.title = `level ${level + 1}: ${levels[level]}`;
    }
    this.#queue.hidden = shown === 0;
    this.#levels.setAttribute("aria-label", `Requests by queue level: ${levels.slice(0, shown).join(", ")}`);
  }

  /** Requests that gateways of other hosts own have no marks here. Reports and requests are not of the same moment, so
      only a number counts that lasted. */
  #showElsewhere(number) {
    this.#extra.push(Math.max(0, number));
    if (this.#extra.length > 6) this.#extra.shift();
    const lasting = Math.min(...this.#extra);
    put(this.#elsewhere, this.#extra.length < 6 || lasting === 0 ? "" : `+${lasting}`);
    this.#elsewhere.title = "requests of other hosts' gateways";
  }
}

function factsOf(instance) {
  const parts = [`${instance.in_batch} in batch`];
  const others = instance.running + instance.waiting - instance.in_batch;
  if (others > 0) parts.push(`${others} waiting`);
  if (instance.swapped > 0) parts.push(`${instance.swapped} swapped`);
  if (instance.migrating > 0) parts.push(`${instance.migrating} moving`);
  if (instance.migrated > 0) parts.push(`${instance.migrated.toLocaleString("en")} moved away`);
  if (instance.draw_watts !== null) {
    const cap = instance.cap_watts === null ? "" : ` of ${Math.round(instance.cap_watts)}`;
    parts.push(`${Math.round(instance.draw_watts)}${cap} W`);
  }
  return parts.join(" · ");
}

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Change a text only if it differs, so that the browser has less to do. */
export function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
