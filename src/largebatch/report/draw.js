"use strict";
(() => {
  const drawings = JSON.parse(document.getElementById("drawings").textContent);
  const palettes = JSON.parse(document.getElementById("palettes").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const font = getComputedStyle(document.body).fontFamily;

  // "$accent@0.5" -> rgba(...) of the palette in use; everything else stays.
  function coloured(value, palette) {
    if (typeof value === "string" && value.startsWith("$")) {
      const [role, opacity] = value.slice(1).split("@");
      const digits = parseInt(palette[role].slice(1), 16);
      return `rgba(${digits >> 16},${(digits >> 8) & 255},${digits & 255},${opacity ?? 1})`;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, palette));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, palette)]));
    }
    return value;
  }

  // Keep every second label, counted from the end, until they fit beside each other.
  function thinned(axis, room) {
    if (!axis.ticktext) return axis;
    const [low, high] = axis.range;
    let kept = axis.tickvals.map((_, index) => index);
    const at = (index) => (axis.type === "log" ? Math.log10(axis.tickvals[index]) : axis.tickvals[index]);
    const fits = (indices) => indices.every((index, place) => {
      if (place === 0) return true;
      const before = indices[place - 1];
      const gap = ((at(index) - at(before)) / (high - low)) * room;
      return gap > ((axis.ticktext[index].length + axis.ticktext[before].length) / 2) * 8 + 8;
    });
    while (kept.length > 2 && !fits(kept)) {
      const last = kept.length - 1;
      kept = kept.filter((_, place) => (last - place) % 2 === 0);
    }
    return { ...axis, ticktext: axis.ticktext.map((text, index) => (kept.includes(index) ? text : "")) };
  }

  function draw(element) {
    const palette = palettes[dark.matches ? "dark" : "light"];
    const drawing = coloured(drawings[element.dataset.figure], palette);
    const width = element.clientWidth;
    const narrow = width < 720;
    const height = narrow ? 380 : 540;
    element.style.height = `${height}px`;
    const axis = { gridcolor: palette.grid, linecolor: palette.line, zeroline: false, automargin: true, tickangle: 0,
      tickfont: { color: palette.muted }, fixedrange: narrow };
    const title = (given) => ({ ...given, font: { size: 15, color: palette.muted }, standoff: narrow ? 8 : 14 });
    const layout = {
      width, height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: font, size: 14, color: palette.ink },
      margin: narrow ? { l: 54, r: 14, t: 22, b: 60 } : { l: 76, r: 16, t: 30, b: 66 },
      hovermode: "closest", dragmode: narrow ? false : "zoom", showlegend: false,
      hoverlabel: { bgcolor: palette.card, bordercolor: palette.line, font: { size: 14, color: palette.ink }, align: "left" },
      xaxis: { ...axis, ...thinned(drawing.layout.xaxis, width - 76), title: title(drawing.layout.xaxis.title) },
      yaxis: { ...axis, ...drawing.layout.yaxis, title: title(drawing.layout.yaxis.title) },
      annotations: drawing.layout.annotations.map((note) => ({ ...note, font: { ...note.font, size: 14 } })),
    };
    const config = { responsive: false, displaylogo: false, displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    legend(element, drawing.data);
    return Plotly.react(element, drawing.data, layout, config);
  }

  const shapes = {
    circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", square: "M-4,-4H4V4H-4Z", diamond: "M0,-5L5,0L0,5L-5,0Z",
    "triangle-up": "M0,-5L5,4H-5Z", pentagon: "M0,-5L5,-1L3,5H-3L-5,-1Z", "x-thin": "M-4,-4L4,4M4,-4L-4,4",
    star: "M0,-7L1.7,-2.3L6.7,-2.2L2.7,0.9L4.1,5.7L0,2.9L-4.1,5.7L-2.7,0.9L-6.7,-2.2L-1.7,-2.3Z",
    "triangle-ne": "M5,-5V4L-4,-5Z", "triangle-down": "M0,5L5,-4H-5Z",
  };
  const dashes = { solid: "", dash: "7 4", dot: "2 3" };

  // One row of swatches below the picture; a press hides or shows its series.
  function legend(element, data) {
    const list = element.nextElementSibling;
    const fresh = list.childElementCount === 0;
    data.filter((trace) => trace.showlegend).forEach((trace, place) => {
      const shape = (tag, attributes) => `<${tag} ${Object.entries(attributes).map(([k, v]) => `${k}="${v}"`).join(" ")}/>`;
      let swatch = "";
      const partner = trace.marker && !trace.mode.includes("lines")
        && data.find((other) => other.legendgroup === trace.legendgroup && other.mode === "lines" && !other.fill);
      if (partner) swatch += shape("path", { d: "M-14,0H14", stroke: partner.line.color, "stroke-width": partner.line.width });
      if (trace.fill) swatch += shape("rect", { x: -14, y: -6, width: 28, height: 12, fill: trace.fillcolor });
      else if (trace.mode.includes("lines")) {
        swatch += shape("path", { d: "M-14,0H14", stroke: trace.line.color, "stroke-width": trace.line.width,
          "stroke-dasharray": dashes[trace.line.dash] });
      }
      if (trace.marker) {
        const open = trace.marker.symbol.endsWith("-open");
        swatch += shape("path", { d: shapes[trace.marker.symbol.replace("-open", "")], stroke: trace.marker.color,
          "stroke-width": open ? 2 : 0, fill: open ? "none" : trace.marker.color });
      }
      if (fresh) {
        const button = document.createElement("button");
        button.type = "button";
        button.innerHTML = `<svg width="30" height="16" viewBox="-15 -8 30 16" aria-hidden="true"></svg><span>${trace.name}</span>`;
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          const shown = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", String(shown));
          const members = data.flatMap((other, index) => (other.legendgroup === trace.legendgroup ? [index] : []));
          Plotly.restyle(element, { visible: shown }, members);
        });
        list.appendChild(document.createElement("li")).appendChild(button);
      }
      const button = list.children[place].firstChild;
      button.firstChild.innerHTML = swatch;
      if (button.getAttribute("aria-pressed") !== "true") {
        data.forEach((other) => { if (other.legendgroup === trace.legendgroup) other.visible = false; });
      }
    });
  }

  const plots = [...document.querySelectorAll(".plot")];
  const drawAll = () => Promise.all(plots.map(draw));
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
  dark.addEventListener("change", drawAll);
  drawAll().then(() => document.documentElement.setAttribute("data-drawn", "true"));
})();
