"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Colors of a figure that depend on the scheme; those of its traces suit both.
  function template(printing) {
    const style = getComputedStyle(document.documentElement);
    const color = (name, light) => (printing ? light : style.getPropertyValue(name).trim());
    const text = color("--text", "#1f2328");
    const grid = color("--grid", "#e3e6ea");
    const surface = color("--surface", "#ffffff");
    const axis = {gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickfont: {color: text}};
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: {family: "system-ui, sans-serif", size: 12, color: text},
        xaxis: axis,
        yaxis: axis,
        legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom"},
        margin: {l: 50, r: 16, t: 40, b: 44},
        hoverlabel: {bgcolor: surface, bordercolor: grid, font: {color: text}},
        modebar: {bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text},
      },
      data: {
        parcoords: [{
          labelfont: {color: text}, tickfont: {color: text}, rangefont: {color: "rgba(0,0,0,0)"},
          unselected: {line: {color: grid}},
        }],
      },
    };
  }

  async function load(id) {
    const encoded = document.getElementById(id).textContent.trim();
    const bytes = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"]};
  const layoutOf = (figure, printing) => ({...figure.layout, template: template(printing)});

  async function draw(figures, printing) {
    for (const [id, figure] of Object.entries(figures)) {
      const element = document.getElementById(id);
      await Plotly.react(element, figure.data, layoutOf(figure, printing), config);
    }
  }

  function sortBy(header) {
    const table = header.closest("table");
    const column = [...header.parentNode.children].indexOf(header);
    const descending = header.getAttribute("aria-sort") === "ascending";
    for (const each of header.parentNode.children) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
    const compare = (left, right) => {
      const [a, b] = [key(left), key(right)];
      const empty = (a === "") - (b === ""); // rows without a value come last
      if (empty) return empty;
      const difference = a - b;
      const order = Number.isNaN(difference) ? a.localeCompare(b) : difference;
      return descending ? -order : order;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }

  for (const header of document.querySelectorAll("table.sortable th")) {
    const button = document.createElement("button");
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sortBy(header));
  }
  for (const block of document.querySelectorAll("pre.command")) {
    const button = document.createElement("button");
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("code").textContent);
      button.textContent = "copied";
    });
    block.append(button);
  }

  async function start() {
    const figures = JSON.parse(document.getElementById("figures").textContent);
    if (Object.keys(figures).length) {
      await load("plotly");
      await draw(figures, false);
      dark.addEventListener("change", () => draw(figures, false));
      addEventListener("beforeprint", () => draw(figures, true));
      addEventListener("afterprint", () => draw(figures, false));
    }
    document.documentElement.dataset.drawn = "true";
  }
  start().catch((error) => {
    for (const element of document.querySelectorAll(".figure")) {
      element.textContent = `The figure cannot be drawn: ${error.message}`;
    }
    throw error;
  });
})();
