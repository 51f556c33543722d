const charts = JSON.parse(document.getElementById("charts").textContent);
const config = JSON.parse(document.getElementById("config").textContent);

const names = config.range.heatmap;

async function loadVega() {
  const bytes = Uint8Array.from(atob(document.getElementById("vega").textContent), (sign) => sign.charCodeAt(0));
  const script = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Function(await new Response(script).text())();
}

function draw(figure, { columns, rows, spec }) {
  const values = rows.map((row) => Object.fromEntries(row.map((cell, place) => [columns[place], cell])));
  const main = (spec.layer ?? [spec])[0];
  const touch = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not move the chart
  if (!touch && main.encoding.x.type === "quantitative") {
    const select = { type: "interval", encodings: ["x"], zoom: "wheel![event.shiftKey]" }; // the wheel alone scrolls
    main.params = [{ name: "zoom", select, bind: "scales" }];
  }
  return vegaEmbed(figure.querySelector(".chart"), { ...spec, width: "container", data: { values } }, {
    actions: false, config, renderer: "svg", tooltip: { theme: "report" },
  });
}

function fill(figure, { columns, rows }) {
  const table = document.createElement("table");
  const add = (row, kind, cells) => {
    for (const cell of cells) {
      const text = typeof cell === "number" ? cell.toLocaleString("en", { maximumSignificantDigits: 12 }) : cell ?? "";
      const element = document.createElement(kind);
      element.textContent = text;
      element.className = typeof cell === "number" ? "number" : "";
      row.append(element);
    }
  };
  add(table.createTHead().insertRow(), "th", columns);
  const body = table.createTBody();
  for (const row of rows) add(body.insertRow(), "td", row);
  figure.querySelector(".table").replaceChildren(table);
}

async function start() {
  const figures = [...document.querySelectorAll("figure")];
  for (const [index, figure] of figures.entries()) {
    const chart = charts[index];
    const details = figure.querySelector("details");
    if (details) details.addEventListener("toggle", () => fill(figure, chart), { once: true });
    else fill(figure, chart);
  }
  await loadVega();
  await drawAll(figures);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(figures));
  document.body.dataset.drawn = "yes";
}

async function drawAll(figures) {
  // Vega mixes the colours of heat maps, for which it needs their values.
  const style = getComputedStyle(document.documentElement);
  config.range.heatmap = names.map((name) => style.getPropertyValue(name.slice(4, -1)));
  for (const [index, figure] of figures.entries()) {
    const chart = charts[index];
    if (chart.spec) await draw(figure, chart);
  }
}

start().catch((error) => {
  const note = document.createElement("p");
  note.textContent = `The charts could not be drawn by this browser: ${error}`;
  document.querySelector("main").prepend(note);
});
