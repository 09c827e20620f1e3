// What the pointer and the keys show in charts and maps, and which of several maps is drawn. It is the one script of the
// pages that `weft look` writes; the page of `weft serve` imports it.

const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
  Home: [-1e9, 0], End: [1e9, 0] };
export const move = (event) => event.ctrlKey || event.metaKey || event.altKey ? undefined : moves[event.key];
export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
export const make = (tag, properties = {}, children = []) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// Lines: every line's value at the stop that is nearest to the pointer.
const lines = (data, marks, put) => ({
  start: () => [data.stops.length - 1, 0],
  end: () => [data.stops.length - 1, 0],
  near: (x) => {
    const away = (i) => Math.abs(data.stops[i][0] - x);
    return [data.stops.reduce((best, _, i) => away(i) < away(best) ? i : best, 0), 0];
  },
  show: ([i]) => {
    const [x, label] = data.stops[i], rows = [[label]];
    put(marks[0], x, 0);
    data.series.forEach(({ name, hue, points }, k) => {
      const point = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      if (Math.abs(point[0] - x) > 8) return;
      put(marks[k + 1], point[0], point[1]); rows.push([`${name} ${point[2]}`, hue]);
    });
    return [x, data.top, rows];
  },
});

// Maps: weights are numbers, map after map, row after row; in a file IEEE half-precision numbers in base64.
const half = (bits) => {
  const power = bits >> 10 & 31, rest = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (power === 31) return NaN;
  return sign * (power ? (1024 + rest) * 2 ** (power - 25) : rest * 2 ** -24);
};
const reader = (weights, size) => {
  let bits = null;
  if (typeof weights !== "string") return (index) => weights.subarray(index * size, (index + 1) * size);
  return (index) => {
    bits ??= new Uint16Array(Uint8Array.from(atob(weights), (char) => char.charCodeAt(0)).buffer);
    return Float64Array.from(bits.subarray(index * size, (index + 1) * size), half);
  };
};
export const shares = (weights) => {  // of the largest, for shading; NaN has no shade
  const known = weights.map((weight) => weight > 0 ? weight : 0), peak = known.reduce((a, b) => Math.max(a, b), 0) || 1;
  return [known.map((weight) => weight / peak), peak];
};
export const written = (weight) => Number.isNaN(weight) ? "\u2013" : weight.toFixed(3);

const map = (data, marks, put, svg, figure) => {
  const labels = [...svg.querySelectorAll("[data-label]")], columns = data.source.length;
  const read = reader(data.weights, columns * data.target.length);
  let weights = null, index = 0;
  const at = (row, column) => (weights ??= read(index))[row * columns + column];
  const caption = (row, column) => `${data.target[row]} \u2190 ${data.source[column]} ${written(at(row, column))}`;
  const speak = () => {
    figure.querySelectorAll(".hidden td.weight").forEach((cell, i) => { cell.textContent = written(weights[i]); });
    figure.querySelectorAll(".hidden li").forEach((item, row) => {
      const best = data.source.reduce((a, _, column) => at(row, column) > at(row, a) ? column : a, 0);
      item.textContent = caption(row, best);
    });
  };
  return {
    read,
    start: () => [0, 0],
    end: () => [columns - 1, data.target.length - 1],
    near: (x, y) => [Math.floor((x - data.left) / data.cell), Math.floor((y - data.top) / data.cell)],
    hide: () => { for (const label of labels) label.classList.remove("on"); },
    show: ([column, row]) => {
      const x = data.left + column * data.cell, y = data.top + row * data.cell;
      put(marks[0], data.left, y); put(marks[1], x, data.top); put(marks[2], x, y);
      labels[column].classList.add("on"); labels[columns + row].classList.add("on");
      return [x + data.cell, y, [[caption(row, column)]], data.cell];
    },
    draw: (chosen) => {  // as `heatmaps.py` draws the first: one path per shade
      index = chosen; weights = read(index);
      const paths = new Map(), [parts, peak] = shares(weights), side = data.cell - 1;
      parts.forEach((part, i) => {
        const shade = Math.floor(part * data.shades + 0.5), row = Math.floor(i / columns), column = i % columns;
        const tile = `M${data.left + column * data.cell} ${data.top + row * data.cell}h${side}v${side}h-${side}z`;
        if (shade) paths.set(shade, (paths.get(shade) ?? "") + tile);
      });
      svg.querySelector("[data-tiles]").replaceChildren(...[...paths].sort((a, b) => a[0] - b[0]).map(([shade, d]) => {
        const path = document.createElementNS(svg.namespaceURI, "path");
        for (const [name, value] of [["class", "heat"], ["fill-opacity", shade / data.shades], ["d", d]])
          path.setAttribute(name, value);
        return path;
      }));
      figure.querySelector(".peak").textContent = Number(peak.toPrecision(2));
      speak();
    },
  };
};

// A map that is wider or taller than the window keeps its labels visible.
const stick = (plot, svg, data) => {
  const groups = [...svg.querySelectorAll("[data-stick]")], leave = new AbortController();
  const follow = () => {
    if (!plot.isConnected) return leave.abort();
    const box = svg.getBoundingClientRect();
    const x = clamp(plot.getBoundingClientRect().left - box.left, 0, box.width - data.left - data.cell);
    const y = clamp(-box.top, 0, data.target.length * data.cell - data.cell);
    for (const group of groups) {
      const axes = group.dataset.stick;
      group.setAttribute("transform", `translate(${axes.includes("x") ? x : 0} ${axes.includes("y") ? y : 0})`);
    }
  };
  plot.addEventListener("scroll", follow, { passive: true });
  window.addEventListener("scroll", follow, { passive: true, signal: leave.signal });
  window.addEventListener("resize", follow, { signal: leave.signal });
};
const reveal = (plot, svg, data, spot) => {
  const box = plot.getBoundingClientRect(), at = spot.getBoundingClientRect();
  if (at.left < box.left + data.left) plot.scrollLeft -= box.left + data.left - at.left;
  if (at.right > box.right) plot.scrollLeft += at.right - box.right;
  if (at.top < data.top) window.scrollBy(0, at.top - data.top);
  if (at.bottom + 8 > innerHeight) window.scrollBy(0, at.bottom + 8 - innerHeight);
};

// Several maps: a small picture of each, and the layer and the head of the large one to choose.
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = (canvas, parts) => {  // shares of 1 in one hue; negative values in another
  const style = getComputedStyle(canvas), ink = (name) => parseInt(style.getPropertyValue(name).trim().slice(1), 16);
  const pen = canvas.getContext("2d"), picture = pen.createImageData(canvas.width, canvas.height);
  const [heat, cold] = ["--heat", "--s1"].map(ink).map((hue) => [hue >> 16, hue >> 8 & 255, hue & 255]);
  parts.forEach((part, i) => {
    picture.data.set([...part < 0 ? cold : heat, Math.round(Math.abs(part) * 255)], 4 * i);
  });
  pen.putImageData(picture, 0, 0);
};
const several = (figure, data, kind, group, open) => {
  const ordered = (part) => [...new Set(data.maps.map((map) => map[part]))].sort((a, b) => a - b);
  const [layers, heads] = [ordered(0), ordered(1)], name = ([layer, head]) => `layer ${layer}, head ${head}`;
  const find = (layer, head) => data.maps.findIndex((map) => map[0] === layer && map[1] === head);
  const room = group ? 224 : 700;  // beside other places there is less
  const size = clamp(Math.floor(room / (heads.length > 1 ? heads.length : layers.length)) - 10, 36, 96);
  const shape = data.target.length / data.source.length;
  const thumbs = data.maps.map((map, index) => {
    const canvas = make("canvas", { width: data.source.length, height: data.target.length });
    canvas.style.width = `${Math.min(size, size / shape)}px`; canvas.style.height = `${Math.min(size, size * shape)}px`;
    return make("button", { type: "button", title: name(map), ariaLabel: name(map), tabIndex: -1,
      onclick: () => { choose(index); open(); } }, [canvas]);
  });
  const grid = heads.length > 1 ? layers.map((layer) => heads.map((head) => find(layer, head)))
    : [layers.map((layer) => find(layer, heads[0]))];
  const across = heads.length > 1 ? heads.map((head) => `head ${head}`) : layers.map((layer) => `layer ${layer}`);
  const title = figure.querySelector("b").textContent, box = figure.querySelector(".choice");
  const table = make("table", { className: "heads" }, [
    make("caption", {}, [...(group ? [make("b", { textContent: title })] : []), make("span", { className: "hidden",
      textContent: " Every layer and head; arrow keys move, Enter opens one" })]),
    make("thead", {}, [make("tr", {}, [make("td"),
      ...across.map((text) => make("th", { scope: "col", textContent: text }))])]),
    make("tbody", {}, grid.map((row, i) => make("tr", {}, [
      make("th", { scope: "row", textContent: heads.length > 1 ? `layer ${layers[i]}` : "" }),
      ...row.map((index) => make("td", {}, index < 0 ? [] : [thumbs[index]])),
    ]))),
  ]);
  const selects = [layers, heads].map((options, part) => make("select", { onchange: () => {
    const [layer, head] = selects.map((select) => Number(select.value)), exact = find(layer, head);
    choose(exact >= 0 ? exact : data.maps.findIndex((map) => map[part] === (part ? head : layer)));
  } }, options.map((option) => make("option", { value: option, textContent: option }))));
  const picks = ["layer", "head"].map((text, part) => make("label", { textContent: `${text} ` }, [selects[part]]));
  const plot = figure.querySelector(".plot"), about = plot.ariaLabel;
  let at = 0;
  const mark = () => {
    plot.ariaLabel = `${name(data.maps[at])} of ${about}`;
    thumbs.forEach((thumb, i) => {
      thumb.ariaPressed = String(i === at && !figure.hidden); thumb.tabIndex = i === at ? 0 : -1;
    });
    selects.forEach((select, part) => { select.value = data.maps[at][part]; });
  };
  const choose = (index) => { at = index; group?.show(figure); kind.draw(at); mark(); };
  table.addEventListener("keydown", (event) => {
    const index = thumbs.indexOf(document.activeElement), by = move(event);
    if (index < 0 || !by) return;
    event.preventDefault();
    let row = grid.findIndex((line) => line.includes(index)), column = grid[row].indexOf(index), to, near;
    do {  // over heads that are not there, and with Home and End to the last that is
      row += Math.sign(by[1]); column += Math.sign(by[0]); near = grid[row]?.[column];
      if (near >= 0) to = near;
    } while (near !== undefined && (to === undefined || Math.abs(by[0]) > 1));
    thumbs[to ?? index].focus();
  });
  const line = make("div", { className: "picks" }, picks.filter((_, part) => [layers, heads][part].length > 1));
  line.append(figure.querySelector(".key"));  // the scale is the large map's
  (group?.overview ?? box).append(make("div", { className: "scroll" }, [table]));
  box.append(line);
  let painted = false;
  const repaint = () => thumbs.forEach((thumb, i) => paint(thumb.firstChild, shares(kind.read(i))[0]));
  new IntersectionObserver((entries, watch) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect(); painted = true; repaint();
  }, { rootMargin: "300px" }).observe(table);
  dark.addEventListener("change", () => { if (painted) repaint(); });
  group?.marks.push(mark);
  mark();
  return () => thumbs[at].focus();
};

// Several places, such as a Transformer's: all small pictures stand together, above the one map that is opened.
const gather = (places) => {
  const figures = [...places.querySelectorAll("figure")].filter((other) => other.querySelector(".choice"));
  if (figures.length < 2) return null;
  const group = { overview: make("div", { className: "overview" }), marks: [], show: (figure) => {
    for (const other of figures) other.hidden = other !== figure;
    for (const mark of group.marks) mark();
    window.dispatchEvent(new Event("resize"));  // a map that was hidden has not followed what was scrolled
  } };
  places.prepend(group.overview);
  group.show(figures[0]);
  return group;
};

// Matrices: values as colours, of either sign from zero, or else from the smallest to the largest.
const grid = (data, marks, put, svg) => {
  const [low, high] = data.ends, least = low < 0 ? 0 : low;
  const { left, top, cell: [wide, tall], shape: [rows, columns] } = data, canvas = svg.querySelector("canvas");
  const values = reader(data.values, rows * columns)(0);
  const draw = () => paint(canvas, values.map((value) => (value - least) / (high - least)));
  dark.addEventListener("change", draw);
  draw();
  return {
    start: () => [0, 0],
    end: () => [columns - 1, rows - 1],
    near: (x, y) => [Math.floor((x - left) / wide), Math.floor((y - top) / tall)],
    show: ([column, row]) => {
      const x = left + column * wide, y = top + row * tall, value = values[row * columns + column];
      put(marks[0], left, y); put(marks[1], x, top);
      const text = `${data.down} ${row}, ${data.across} ${column}: ${Number(value.toPrecision(3))}`;
      return [x + wide, y, [[text.replace("-", "\u2212")]], tall];
    },
  };
};

const enliven = (plot, data, group) => {
  const figure = plot.closest("figure"), svg = plot.querySelector("svg"), tip = figure.querySelector(".tip");
  const marks = [...svg.querySelectorAll("[data-mark]")];
  const put = (mark, x, y) => {
    mark.setAttribute("transform", `translate(${x} ${y})`); mark.setAttribute("visibility", "visible");
  };
  const kind = { map, grid, lines }[plot.classList[1]](data, marks, put, svg, figure);
  let at = null, back = null;
  const hide = () => {
    tip.textContent = "";
    for (const mark of marks) mark.setAttribute("visibility", "hidden");
    kind.hide?.();
  };
  const tell = (x, y, rows, size = 0) => {  // beside the point, inside the figure, and off the words of a map
    tip.append(...rows.map(([text, hue]) => make("div", { textContent: text, dir: "auto", ...(hue && { className: hue }) })));
    const box = svg.getBoundingClientRect(), home = figure.getBoundingClientRect(), scale = box.width / data.width;
    const left = box.left - home.left + x * scale, top = box.top - home.top + y * scale;
    const side = left + 14 + tip.offsetWidth > home.width ? left - 14 - tip.offsetWidth : left + 14;
    tip.style.left = clamp(side, 0, Math.max(0, home.width - tip.offsetWidth)) + "px";
    const under = size && y - tip.offsetHeight - 10 < data.top;
    tip.style.top = (under ? top + size + 10 : Math.max(0, top - tip.offsetHeight - 10)) + "px";
  };
  const show = (where) => {
    const end = kind.end();
    hide(); at = where.map((value, i) => clamp(value, 0, end[i])); tell(...kind.show(at));
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    show(kind.near((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  };
  const step = (where) => {
    show(where); if (kind.draw) { reveal(plot, svg, data, marks[2]); show(at); }
  };
  svg.style.pointerEvents = "none";  // or the drawing's own <title> would cover our tip
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) step(at || kind.start()); });
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); back?.(); return; }
    const by = move(event), from = at || kind.start();
    if (by) { event.preventDefault(); step([from[0] + by[0], from[1] + by[1]]); }
  });
  if (kind.draw) stick(plot, svg, data);
  if (kind.draw && !svg.querySelector("[data-tiles]").firstChild) kind.draw(0);
  const choice = figure.querySelector(".choice");
  if (choice) back = several(figure, data, kind, group, () => {
    for (const part of [plot, choice.lastChild]) part.scrollIntoView({ block: "nearest" });
    plot.focus({ preventScroll: true });
  });
};

// A shaded text: the value of the piece under the pointer, or of the one that the arrow keys have reached.
const shaded = (text) => {
  const figure = text.closest("figure"), tip = figure.querySelector(".tip"), pieces = [...text.children];
  let at = -1;
  const hide = () => { tip.textContent = ""; pieces[at]?.classList.remove("at"); };
  const show = (index) => {
    hide(); at = clamp(index, 0, pieces.length - 1);
    const piece = pieces[at], words = piece.textContent.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5");
    piece.classList.add("at");
    tip.append(make("div", { textContent: `${words} \u2014 ${piece.dataset.value}`, dir: "auto" }));
    const box = piece.getClientRects()[0], home = figure.getBoundingClientRect();
    tip.style.left = clamp(box.left - home.left, 0, Math.max(0, home.width - tip.offsetWidth)) + "px";
    tip.style.top = box.bottom - home.top + 6 + "px";
  };
  const under = (event) => {
    const piece = event.target.closest("[data-value]");
    if (piece) show(pieces.indexOf(piece)); else hide();
  };
  text.addEventListener("pointermove", under);
  text.addEventListener("pointerdown", under);
  text.addEventListener("pointerleave", hide);
  text.addEventListener("blur", hide);
  text.addEventListener("scroll", hide, { passive: true });
  text.addEventListener("focus", () => { if (pieces.length && text.matches(":focus-visible")) show(Math.max(at, 0)); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const by = move(event);
    if (!by || !pieces.length) return;
    event.preventDefault(); show(at + by[0] + by[1]);
    pieces[at].scrollIntoView({ block: "nearest" }); show(at);
  });
};

// Let the pointer and the keys show the values of all plots; `read` returns the data of a figure.
export const enlivenAll = (root, read) => {
  const groups = new Map([...root.querySelectorAll(".places")].map((places) => [places, gather(places)]));
  for (const plot of root.querySelectorAll(".plot")) {
    const figure = plot.closest("figure");
    enliven(plot, read(figure), groups.get(figure.closest(".places")));
  }
};
for (const text of document.querySelectorAll(".shaded")) shaded(text);
enlivenAll(document, (figure) => JSON.parse(figure.querySelector("script").textContent));
