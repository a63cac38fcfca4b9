"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const STATES = Object.keys(data.states);
  const PLUMBING = STATES.indexOf("plumbing");
  const HEIGHT = 30; // of a row, in pixels, as in the style sheet
  const OPEN_AT_FIRST = 60; // rows that are in sight when the page opens
  const FEW = 8; // rows without a layer that are not worth a fold of their own
  const OUTSIDE = "outside layers";
  const OPEN_FOUND = 500; // found rows up to which a search opens every layer

  const make = (name, attributes = {}, ...children) => {
    const svg = ["svg", "path", "circle", "rect", "g", "text", "title"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  };

  // ---- numbers as text, as on the terminal
  const scaled = (number, base, units) => {
    let unit = 0;
    while (Math.abs(number) >= base && unit < units.length - 1) { number /= base; unit += 1; }
    return [number, units[unit], unit];
  };
  const digits = (number) => String(Number(number.toPrecision(3)));
  const FORMAT = {
    bytes: (n) => { const [v, u, i] = scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]); return `${v.toFixed(i ? 1 : 0)} ${u}`; },
    flops: (n) => { const [v, u] = scaled(n, 1000, ["", "k", "M", "G", "T", "P"]); return `${digits(v)} ${u}FLOP`; },
    seconds: (n) => { const [v, u] = scaled(n * 1e9, 1000, ["ns", "us", "ms", "s"]); return `${digits(v)} ${u}`; },
    share: (n) => `${digits(100 * n)} %`,
    error: (n) => (n === 0 ? "0" : n.toExponential(1)),
    count: (n) => (Number.isInteger(n) ? n.toLocaleString("en") : String(Number(n.toPrecision(4)))),
  };
  const written = (value, kind) => (typeof value === "number" ? (FORMAT[kind] || FORMAT.count)(value) : value === null ? "" : String(value));
  const asNumber = (value) => (typeof value === "number" ? value : value === null || value === "" ? -Infinity : value === "-inf" ? -Number.MAX_VALUE : Infinity);

  class Column {
    constructor(entry) {
      Object.assign(this, entry);
      this.numeric = !this.texts && this.kind !== "series";
    }
    value(row) { return this.texts ? this.texts[this.cells[row]] : this.cells[row]; }
    text(row) {
      const value = this.value(row);
      if (this.kind === "series") return "";
      if (this.kind === "place") return value.slice(value.lastIndexOf("/") + 1);
      return this.texts ? value : written(value, this.kind);
    }
    key(row) { return this.numeric ? asNumber(this.cells[row]) : this.kind === "series" ? largest(this.cells[row]) : this.value(row); }
    get characters() {
      const most = this.texts ? this.texts.reduce((n, text) => Math.max(n, this.kind === "place" ? text.length - text.lastIndexOf("/") - 1 : text.length), 0) : this.kind === "series" ? 20 : this.kind === "flops" ? 12 : 10;
      return Math.min(Math.max(most, this.name.length + 2), 34);
    }
  }
  const largest = (series) => (series || []).reduce((most, v) => Math.max(most, asNumber(v)), -Infinity);

  // ---- a series over steps
  const sparkline = (series, steps, width, height, name) => {
    const finite = series.filter((v) => typeof v === "number");
    const low = finite.reduce((a, b) => Math.min(a, b), Infinity), high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    const x = (i) => (series.length > 1 ? (i * width) / (series.length - 1) : width / 2);
    const y = (v) => (high > low ? height - 1 - ((v - low) * (height - 2)) / (high - low) : height / 2);
    let line = "", pen = "M";
    const bad = [];
    series.forEach((v, i) => {
      if (typeof v === "number") { line += `${pen}${x(i).toFixed(1)} ${y(v).toFixed(1)}`; pen = "L"; }
      else { pen = "M"; if (v !== null) bad.push(i); }
    });
    const last = series[series.length - 1];
    const words = finite.length ? `${name}: from ${written(low)} to ${written(high)}, last ${written(last)}` : `${name}: not finite`;
    const more = bad.length ? `, not finite at step ${steps[bad[0]] ?? bad[0]}` : "";
    return make("svg", { class: "series", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words + more },
      make("title", {}, words + more), make("path", { d: line || "M0 0" }),
      ...bad.map((i) => make("circle", { cx: x(i), cy: height / 2, r: 2.5 })));
  };

  const dot = (state) => make("span", { class: `dot ${state || "none"}`, "aria-hidden": "true" });
  const mix = (counts, words) => {
    const total = counts.reduce((a, b) => a + b, 0);
    const parts = STATES.map((state, i) => [state, counts[i]]).filter(([state, n]) => n > 0 && state !== "plumbing");
    const shown = parts.map(([state, n]) => `${data.states[state]} ${digits((100 * n) / total)} %`).join(", ");
    return make("span", { class: "mix", role: "img", title: shown ? `${words}: ${shown}` : words, "aria-label": shown || words },
      ...parts.map(([state, n]) => { const part = make("i", { class: state }); part.style.width = `${(100 * n) / total}%`; return part; }));
  };

  class View {
    constructor(section, table) {
      this.section = section;
      this.columns = table.columns.map((entry) => new Column(entry));
      this.states = table.states;
      this.steps = table.steps;
      this.size = table.states.length;
      this.scope = this.columns.find((column) => column.kind === "scope") || null;
      this.name = this.columns.find((column) => ["text", "name"].includes(column.kind)) || this.columns[0];
      this.weight = this.columns.find((column) => column.kind === "flops") || this.columns.find((column) => column.kind === "bytes" && column.sum) || this.columns.find((column) => column.sum);
      this.withStates = this.states.some((state) => state >= 0);
      this.withShares = this.states.some((state) => state >= 0 && STATES[state] !== "risk");
      this.hidden = this.states.filter((state) => state === PLUMBING).length;
      this.words = "";
      this.wanted = new Set();
      this.plumbing = this.hidden === this.size;
      this.tree = this.scope !== null && this.scope.texts.some((text) => text);
      this.sort = null;
      this.toggled = new Map();
      this.opened = null;
      this.active = 0;
      this.chosen = -1;
      this.build();
      this.change();
    }

    build() {
      const tools = make("div", { class: "tools" });
      if (this.size > 8) {
        this.search = make("input", { type: "search", placeholder: "Search layer, operation, dtype, line", "aria-label": "Search rows", oninput: () => { this.words = this.search.value.toLowerCase(); this.change(); } });
        tools.append(this.search);
      }
      if (this.withStates && this.size > 1) {
        STATES.forEach((state, index) => {
          const count = this.states.filter((each) => each === index).length;
          if (!count || state === "plumbing") return;
          const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => {
            const on = !this.wanted.delete(index) && Boolean(this.wanted.add(index));
            button.setAttribute("aria-pressed", String(on));
            this.change();
          } }, dot(state), `${data.states[state]} ${count}`);
          tools.append(button);
        });
      }
      const check = (text, on, change) => {
        const box = make("input", { type: "checkbox", onchange: () => change(box.checked) });
        box.checked = on;
        tools.append(make("label", {}, box, text));
      };
      if (this.tree) {
        check("By layer", true, (on) => { this.tree = on; this.change(); });
        tools.append(make("button", { type: "button", onclick: () => this.foldAll(true) }, "Unfold all"), make("button", { type: "button", onclick: () => this.foldAll(false) }, "Fold all"));
      }
      if (this.hidden && this.hidden < this.size) check(`Integers and plumbing (${this.hidden})`, false, (on) => { this.plumbing = on; this.change(); });
      this.said = make("p", { class: "hint", role: "status" });
      this.head = make("tr");
      this.body = make("tbody", { onkeydown: (event) => this.key(event), onclick: (event) => this.click(event) });
      this.cols = make("colgroup");
      this.grid = make("table", { "aria-labelledby": this.section.getAttribute("aria-labelledby") }, this.cols, make("thead", {}, this.head), this.body);
      this.scroller = make("div", { class: "scroller", onscroll: () => this.draw() }, this.grid);
      this.detail = make("div", { class: "detail", role: "region", "aria-label": "The chosen row", "aria-live": "polite", hidden: true });
      this.section.append(...(tools.childNodes.length ? [tools] : []), this.said, this.scroller, this.detail);
      addEventListener("resize", () => this.draw());
      addEventListener("beforeprint", () => { this.whole = true; this.draw(); });
      addEventListener("afterprint", () => { this.whole = false; this.draw(); });
    }

    // The columns in sight: the first names the row, the scope is a column only without the tree.
    header() {
      this.shown = [this.name, ...(this.withStates ? ["state"] : []), ...this.columns.filter((column) => column !== this.name && !column.detail && !(this.tree && column === this.scope))];
      this.cols.replaceChildren();
      this.head.replaceChildren();
      let total = 0;
      this.shown.forEach((column, index) => {
        let characters = column === "state" ? (this.withShares ? 22 : 12) : column.characters;
        if (index === 0 && this.tree) characters = Math.min(Math.max(characters + 8, 30), 44);
        const pixels = Math.round(characters * 7.6 + 20);
        const col = make("col");
        col.style.width = index === 0 ? `min(${pixels}px, 46vw)` : `${pixels}px`;
        total += pixels;
        this.cols.append(col);
        const name = column === "state" ? (this.withShares ? "runs" : "state") : index === 0 && this.tree ? `layer and ${column.name}` : column.name;
        const sorted = this.sort && this.sort.column === column ? (this.sort.down ? "descending" : "ascending") : "none";
        this.head.append(make("th", { scope: "col", class: column.numeric ? "number" : null, "aria-sort": sorted }, make("button", { type: "button", title: column.meaning || null, onclick: () => this.order(column) }, name)));
      });
      this.grid.style.width = `${total}px`;
      this.grid.style.minWidth = this.tree || this.shown.length > 7 ? "100%" : "0";
    }

    order(column) {
      const down = column === "state" ? false : (column.numeric && !column.least) || column.kind === "series";
      if (!this.sort || this.sort.column !== column) this.sort = { column, down };
      else if (this.sort.down === down) this.sort = { column, down: !down };
      else this.sort = null; // the program's order
      const at = this.shown.indexOf(column);
      this.change();
      this.head.children[at].firstChild.focus();
    }

    found() {
      if (this.words && !this.texts) {
        const texts = this.columns.filter((column) => column.texts);
        this.texts = Array.from({ length: this.size }, (_, row) => texts.map((column) => column.value(row)).join("\n").toLowerCase());
      }
      const words = this.words.split(/\s+/).filter(Boolean);
      const rows = [];
      for (let row = 0; row < this.size; row += 1) {
        const state = this.states[row];
        if (state === PLUMBING && !this.plumbing) continue;
        if (this.wanted.size && !this.wanted.has(state)) continue;
        if (words.length && !words.every((word) => this.texts[row].includes(word))) continue;
        rows.push(row);
      }
      return rows;
    }

    // Layers of the found rows: {name, path, first, layers, rows, sums, states}
    layers(rows) {
      const node = (name, path, first) => ({ name, path, first, layers: new Map(), rows: [], count: 0, risks: 0, sums: this.columns.map(() => null), states: STATES.map(() => 0) });
      const root = node("", "", 0);
      const outside = rows.filter((row) => !this.scope.value(row)).length > FEW;
      for (const row of rows) {
        const path = this.scope.value(row) || OUTSIDE;
        const chain = [root];
        let at = root;
        if (path !== OUTSIDE || outside) {
          for (const part of path.split(".")) {
            let next = at.layers.get(part);
            if (!next) at.layers.set(part, (next = node(part, at.path ? `${at.path}.${part}` : part, row)));
            chain.push((at = next));
          }
        }
        at.rows.push(row);
        const state = this.states[row];
        const weight = this.weight ? asNumber(this.weight.cells[row]) : 1;
        for (const each of chain) {
          each.count += 1;
          if (STATES[state] === "risk") each.risks += 1;
          if (state >= 0 && Number.isFinite(weight)) each.states[state] += weight;
          this.columns.forEach((column, i) => {
            if (!column.numeric) return;
            const value = column.cells[row];
            if (value === null) return;
            if (column.sum && typeof value === "number") each.sums[i] = (each.sums[i] || 0) + value;
            else if (!column.sum && (each.sums[i] === null || asNumber(value) > asNumber(each.sums[i]) !== column.least)) each.sums[i] = value;
          });
        }
      }
      const joined = (each) => {
        each.layers = new Map([...each.layers.values()].map(joined).map((child) => [child.path, child]));
        if (each !== root && each.layers.size === 1 && !each.rows.length) {
          const [only] = each.layers.values();
          only.name = `${each.name}.${only.name}`;
          return only;
        }
        return each;
      };
      return joined(root);
    }

    change() {
      this.toggled.clear();
      this.rows = this.found();
      this.header();
      this.grid.setAttribute("role", this.tree ? "treegrid" : "grid");
      this.root = this.tree ? this.layers(this.rows) : null;
      this.searching = Boolean(this.words || this.wanted.size);
      if (this.tree && !this.opened) {
        this.opened = new Set();
        let level = [...this.root.layers.values()], seen = level.length + this.root.rows.length;
        const inside = (each) => each.layers.size + each.rows.length;
        while (level.length) {
          const opened = [];
          for (const each of [...level].sort((a, b) => inside(a) - inside(b))) {
            if (seen + inside(each) > OPEN_AT_FIRST && seen > 1) break;
            this.opened.add(each.path);
            opened.push(each);
            seen += inside(each);
          }
          level = opened.flatMap((each) => [...each.layers.values()]);
        }
      }
      const all = this.size - (this.plumbing ? 0 : this.hidden);
      this.said.textContent = this.rows.length === all ? "" : `${this.rows.length.toLocaleString("en")} of ${all.toLocaleString("en")} rows`;
      this.said.hidden = !this.said.textContent;
      this.lay();
    }

    isOpen(each) {
      const toggled = this.toggled.get(each.path);
      if (toggled !== undefined) return toggled;
      return this.searching ? this.rows.length <= OPEN_FOUND : this.opened.has(each.path);
    }

    foldAll(open) {
      const visit = (each) => each.layers.forEach((child) => { this.toggled.set(child.path, open); visit(child); });
      visit(this.root);
      this.lay();
    }

    // The lines in order: {layer, level} or {row, level}
    lay() {
      const { column, down } = this.sort || {};
      const key = (item) => {
        if (!column) return item.layer ? item.layer.first : item.row;
        if (column === "state") return item.layer ? item.layer.states.findIndex((n) => n > 0) : this.states[item.row];
        if (item.layer) return column.numeric ? asNumber(item.layer.sums[this.columns.indexOf(column)]) : column.kind === "series" ? -Infinity : item.layer.name;
        return column.key(item.row);
      };
      const order = (items) => {
        const keyed = items.map((item) => [key(item), item]);
        keyed.sort(([a], [b]) => (down ? -1 : 1) * (typeof a === "number" && typeof b === "number" ? (a === b ? 0 : a < b ? -1 : 1) : String(a).localeCompare(String(b), "en", { numeric: true })));
        return keyed.map(([, item]) => item);
      };
      this.lines = [];
      if (!this.tree) this.lines = order(this.rows.map((row) => ({ row, level: 1 })));
      else {
        const visit = (each, level) => {
          for (const item of order([...[...each.layers.values()].map((layer) => ({ layer, level })), ...each.rows.map((row) => ({ row, level }))])) {
            this.lines.push(item);
            if (item.layer && this.isOpen(item.layer)) visit(item.layer, level + 1);
          }
        };
        visit(this.root, 1);
      }
      this.active = Math.min(this.active, Math.max(this.lines.length - 1, 0));
      this.grid.setAttribute("aria-rowcount", this.lines.length + 1);
      this.draw();
    }

    draw() {
      const focused = this.body.contains(document.activeElement);
      const sight = Math.ceil(innerHeight / HEIGHT); // the table is at most so high; without rows it is low
      const top = Math.floor(this.scroller.scrollTop / HEIGHT);
      const first = this.whole ? 0 : Math.max(0, Math.min(top - 5, this.lines.length));
      const last = this.whole ? this.lines.length : Math.min(this.lines.length, top + Math.min(sight, 60) + 5);
      const space = (count) => { const row = make("tr", { class: "space", "aria-hidden": "true" }, make("td", { colspan: this.shown.length })); row.style.height = `${count * HEIGHT}px`; row.firstChild.style.height = row.style.height; return row; };
      this.body.replaceChildren();
      if (first) this.body.append(space(first));
      for (let at = first; at < last; at += 1) this.body.append(this.line(this.lines[at], at));
      if (last < this.lines.length) this.body.append(space(this.lines.length - last));
      if (focused) this.focus();
    }

    line(item, at) {
      const row = make("tr", { "data-at": at, "aria-rowindex": at + 2, tabindex: at === this.active ? 0 : -1, class: item.layer ? "layer" : "row", "aria-level": this.tree ? item.level : null,
        "aria-expanded": item.layer ? String(this.isOpen(item.layer)) : null, "aria-selected": item.layer ? null : String(item.row === this.chosen) });
      this.shown.forEach((column, index) => row.append(item.layer ? this.layerCell(item, column, index) : this.cell(item, column, index)));
      return row;
    }

    cell(item, column, index) {
      if (column === "state") {
        const state = STATES[this.states[item.row]];
        return make("td", {}, ...(state ? [dot(state), data.states[state]] : [""]));
      }
      const text = column.text(item.row), whole = column.texts ? column.value(item.row) : null;
      const td = make("td", { class: column.numeric ? "number" : null, title: whole || null });
      if (index === 0 && this.tree) td.style.paddingLeft = `${10 + 16 * item.level}px`;
      if (column.kind === "series" && column.cells[item.row]) td.append(sparkline(column.cells[item.row], this.steps, 120, 20, column.name));
      else td.append(text);
      return td;
    }

    layerCell(item, column, index) {
      const { layer, level } = item;
      if (index === 0) {
        const td = make("td", { title: layer.path }, make("span", { class: "fold", "aria-hidden": "true" }, this.isOpen(layer) ? "▾" : "▸"), layer.name);
        td.style.paddingLeft = `${10 + 16 * (level - 1)}px`;
        return td;
      }
      if (column === "state") {
        const risks = layer.risks ? make("span", { class: "risks", title: `${layer.risks} rows: ${data.states.risk}` }, dot("risk"), String(layer.risks)) : null;
        return make("td", {}, ...[this.withShares ? mix(layer.states, `share of ${this.weight ? this.weight.name : "rows"}`) : null, risks].filter(Boolean));
      }
      const sum = column.numeric ? layer.sums[this.columns.indexOf(column)] : null;
      return make("td", { class: column.numeric ? "number sum" : null, title: column.numeric && sum !== null ? `${column.sum ? "sum" : column.least ? "smallest" : "largest"} of the layer` : null }, written(sum, column.kind));
    }

    focus() { const row = this.body.querySelector(`tr[data-at="${this.active}"]`); if (row) row.focus({ preventScroll: true }); }

    move(to) {
      this.active = Math.max(0, Math.min(to, this.lines.length - 1));
      const head = this.head.offsetHeight, top = this.active * HEIGHT, view = this.scroller;
      if (top < view.scrollTop) view.scrollTop = top;
      else if (top + HEIGHT > view.scrollTop + view.clientHeight - head) view.scrollTop = top + HEIGHT - view.clientHeight + head;
      this.draw();
      this.focus();
    }

    act(at) {
      const item = this.lines[at];
      this.active = at;
      if (item.layer) { this.toggled.set(item.layer.path, !this.isOpen(item.layer)); this.lay(); }
      else { this.chosen = this.chosen === item.row ? -1 : item.row; this.tell(); this.draw(); }
      this.focus();
    }

    click(event) {
      const row = event.target.closest("tr[data-at]");
      if (row) this.act(Number(row.dataset.at));
    }

    key(event) {
      const item = this.lines[this.active];
      const page = Math.max(1, Math.floor(this.scroller.clientHeight / HEIGHT) - 2);
      const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page, PageUp: this.active - page, Home: 0, End: this.lines.length - 1 }[event.key];
      if (to !== undefined) this.move(to);
      else if (event.key === "Enter" || event.key === " ") this.act(this.active);
      else if (event.key === "ArrowRight" && item && item.layer) { if (this.isOpen(item.layer)) this.move(this.active + 1); else this.act(this.active); }
      else if (event.key === "ArrowLeft" && item && this.tree) {
        if (item.layer && this.isOpen(item.layer)) this.act(this.active);
        else { let at = this.active; while (at > 0 && this.lines[at].level >= item.level) at -= 1; this.move(at); }
      } else return;
      event.preventDefault();
    }

    tell() {
      this.detail.hidden = this.chosen < 0;
      this.detail.replaceChildren();
      if (this.chosen < 0) return;
      const list = make("dl");
      for (const column of this.columns) {
        const value = column.value(this.chosen);
        if (value === null || value === "") continue;
        list.append(make("dt", {}, column.name));
        if (column.kind === "series") {
          const steps = this.steps.length ? `steps ${this.steps[0]} to ${this.steps[this.steps.length - 1]}; ` : "";
          const finite = value.filter((v) => typeof v === "number");
          const range = finite.length ? `from ${written(finite.reduce((a, b) => Math.min(a, b)))} to ${written(finite.reduce((a, b) => Math.max(a, b)))}, last ${written(value[value.length - 1])}` : "not finite";
          list.append(make("dd", {}, make("figure", {}, sparkline(value, this.steps, 480, 80, column.name), make("figcaption", {}, steps + range))));
        } else list.append(make("dd", {}, column.texts ? value : written(value, column.kind)));
      }
      this.detail.append(list);
    }

    only(path) {
      if (!this.search) return;
      this.search.value = path;
      this.words = path.toLowerCase();
      this.change();
      this.section.scrollIntoView({ block: "start" });
      this.search.focus();
    }
  }

  // ---- values that flow between layers
  class Graph {
    constructor(view, edges) {
      this.view = view;
      this.edges = edges;
      this.path = "";
      this.all = view.layers(Array.from({ length: view.size }, (_, row) => row));
      this.nodes = new Map([["", this.all]]);
      const visit = (each) => each.layers.forEach((child) => { this.nodes.set(child.path, child); visit(child); });
      visit(this.all);
      this.crumbs = make("div", { class: "tools", role: "navigation", "aria-label": "Layer of the graph" });
      this.box = make("div", { class: "graph", tabindex: "0", role: "group", "aria-label": "Graph of layers" });
      view.section.after(make("section", { class: "table", "aria-labelledby": "graph" }, make("h2", { id: "graph" }, "Compute graph by layer"),
        make("p", { class: "note" }, "A line is values that flow from one layer to another, thicker for more bytes; green is a low dtype. Open a layer to see inside."), this.crumbs, this.box));
      let path = "";
      while (this.inside(path).length === 1 && this.nodes.get(path).rows.length === 0 && this.nodes.get(this.inside(path)[0]).layers.size) [path] = this.inside(path);
      this.open(path);
    }

    inside(path) { return [...this.nodes.get(path).layers.keys()]; }

    // The node that stands for a scope in the layer that is open.
    of(scope) {
      const here = this.path;
      if (here && scope !== here && !scope.startsWith(`${here}.`)) return " elsewhere";
      if (scope === here) return here || !this.nodes.has(OUTSIDE) ? " own" : OUTSIDE;
      let found = null;
      for (const child of this.nodes.get(here).layers.values()) if (scope === child.path || scope.startsWith(`${child.path}.`)) found = child.path;
      return found || " own";
    }

    open(path, focus) {
      this.path = path;
      const links = new Map(), shown = new Map(), names = new Map();
      const of = (scope) => { let name = names.get(scope); if (name === undefined) names.set(scope, (name = this.of(scope))); return name; };
      for (const layer of this.nodes.get(path).layers.values()) shown.set(layer.path, layer.first);
      for (const [source, target, dtype, count, bytes] of this.edges) {
        const from = of(source) === " elsewhere" ? " from elsewhere" : of(source), to = of(target) === " elsewhere" ? " to elsewhere" : of(target);
        if (from === to || (from === " from elsewhere" && to === " to elsewhere")) continue;
        const key = `${from}\n${to}`;
        const link = links.get(key) || { from, to, count: 0, bytes: 0, low: 0, wide: 0, dtypes: new Map() };
        link.count += count;
        link.bytes += bytes;
        if (/^(bf16|f16|f8|f6|f4)/.test(dtype)) link.low += bytes;
        else if (/^(f|complex)/.test(dtype)) link.wide += bytes;
        link.dtypes.set(dtype, (link.dtypes.get(dtype) || 0) + bytes);
        links.set(key, link);
        for (const end of [from, to]) if (!shown.has(end)) shown.set(end, end === " from elsewhere" ? -1 : end === " to elsewhere" ? Infinity : end === " own" ? this.nodes.get(path).rows[0] ?? -0.5 : 0);
      }
      this.draw([...links.values()], shown);
      const parts = path ? path.split(".") : [];
      const to = (target, words, current) => make("button", { type: "button", "aria-current": current ? "true" : null, onclick: () => this.open(target, true) }, words);
      const trail = [""];
      for (let i = 1; i <= parts.length; i += 1) {
        const part = parts.slice(0, i).join(".");
        if (this.nodes.has(part)) trail.push(part);
      }
      this.crumbs.replaceChildren(...trail.map((target, i) => to(target, i ? target.slice(trail[i - 1] ? trail[i - 1].length + 1 : 0) : "whole program", target === path)));
      if (focus) this.crumbs.lastChild.focus();
    }

    draw(links, shown) {
      const WIDE = 190, HIGH = 56, GAP = 28, STEP = 108, MARGIN = 16;
      const order = [...shown.keys()].sort((a, b) => shown.get(a) - shown.get(b));
      const place = new Map(order.map((name, i) => [name, i])), rank = new Map(order.map((name) => [name, 0]));
      const forward = links.filter((link) => place.get(link.from) < place.get(link.to));
      const before = new Map(order.map((name) => [name, []]));
      forward.forEach((link) => before.get(link.to).push(link.from));
      for (const name of order) rank.set(name, Math.max(0, ...before.get(name).map((each) => rank.get(each) + 1)));
      const levels = [];
      order.forEach((name) => (levels[rank.get(name)] ||= []).push(name));
      const widest = Math.max(1, ...levels.map((level) => (level || []).length));
      const width = widest * (WIDE + GAP) - GAP + 2 * MARGIN + 60, height = levels.length * STEP - (STEP - HIGH) + 2 * MARGIN;
      const x = new Map();
      levels.forEach((level) => {
        const at = (name) => { const from = before.get(name).filter((each) => x.has(each)); return from.length ? from.reduce((sum, each) => sum + x.get(each), 0) / from.length : 0; };
        level.sort((a, b) => at(a) - at(b) || place.get(a) - place.get(b));
        const start = (width - level.length * (WIDE + GAP) + GAP) / 2;
        level.forEach((name, i) => x.set(name, start + i * (WIDE + GAP)));
      });
      const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
      const most = Math.max(1, ...links.map((link) => link.bytes));
      for (const link of links) {
        const x1 = x.get(link.from) + WIDE / 2, x2 = x.get(link.to) + WIDE / 2;
        const back = place.get(link.from) >= place.get(link.to);
        const y1 = MARGIN + rank.get(link.from) * STEP + (back ? HIGH / 2 : HIGH), y2 = MARGIN + rank.get(link.to) * STEP + (back ? HIGH / 2 : 0);
        const side = Math.max(x1, x2) + WIDE / 2 + 34, bend = (y2 - y1) / 2;
        const long = !back && rank.get(link.to) - rank.get(link.from) > 1;
        const curve = back ? `M${x1 + WIDE / 2} ${y1}C${side} ${y1} ${side} ${y2} ${x2 + WIDE / 2} ${y2}` : long ? `M${x1 + 40} ${y1}C${x1 + WIDE / 2 + 50} ${y1 + 60} ${x2 + WIDE / 2 + 50} ${y2 - 60} ${x2 + 40} ${y2}` : `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
        const kind = link.low > link.wide ? "low" : link.wide ? "wide" : "other";
        const dtypes = [...link.dtypes].sort((a, b) => b[1] - a[1]).map(([dtype, bytes]) => `${dtype} ${FORMAT.bytes(bytes)}`).join(", ");
        svg.append(make("path", { class: `edge ${kind}`, d: curve, "stroke-width": (1 + 5 * Math.sqrt(link.bytes / most)).toFixed(1), "stroke-dasharray": back ? "5 4" : null }, make("title", {}, `${this.label(link.from)} to ${this.label(link.to)}: ${link.count} values, ${dtypes}`)));
      }
      for (const name of order) svg.append(this.node(name, x.get(name), MARGIN + rank.get(name) * STEP, WIDE, HIGH));
      this.box.replaceChildren(svg);
    }

    label(name) {
      if (name === " own") return this.path ? "its own operations" : "outside layers";
      return name.startsWith(" ") ? name.slice(1) : this.nodes.get(name).name;
    }

    node(name, left, top, wide, high) {
      const layer = this.nodes.get(name), label = this.label(name);
      const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
      const inside = Boolean(layer && layer.layers.size);
      const flops = layer ? layer.sums[this.view.columns.findIndex((column) => column.kind === "flops")] : null;
      const sub = layer ? [`${layer.count} rows`, flops ? FORMAT.flops(flops) : ""].filter(Boolean).join(", ") : "";
      const act = () => (inside ? this.open(name, true) : this.view.only(name));
      const group = make("g", layer ? { role: "button", tabindex: "0", "aria-label": `${name}, ${sub}; ${inside ? "open" : "show its rows"}`, onclick: act, onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } } } : {},
        make("title", {}, layer ? `${name}: ${sub}` : label), make("rect", { class: "box", x: left, y: top, width: wide, height: high, rx: 4 }),
        make("text", { x: left + 10, y: top + (sub ? 20 : 32) }, cut(label + (inside ? " ▸" : ""), 26)));
      if (sub) group.append(make("text", { class: "sub", x: left + 10, y: top + 37 }, cut(sub, 30)));
      if (layer) {
        const total = layer.states.reduce((a, b) => a + b, 0) - layer.states[PLUMBING];
        let at = left + 10;
        if (total > 0) STATES.forEach((state, i) => {
          const size = state === "plumbing" ? 0 : ((wide - 20) * layer.states[i]) / total;
          if (size > 0) group.append(make("rect", { class: state, x: at.toFixed(1), y: top + 44, width: size.toFixed(1), height: 5 }));
          at += size;
        });
      }
      return group;
    }
  }

  const views = [...document.querySelectorAll("section.table")].map((section) => new View(section, data.tables[Number(section.dataset.table)]));
  if (data.edges.length && views.length && views[0].scope) new Graph(views[0], data.edges);
})();
