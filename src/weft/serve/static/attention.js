// Attention: maps of all layers and heads, drawn and explored as `weft look` does, and words shaded by their weights.
import { clamp, enlivenAll, make, shares, written } from "./look/page.js";
import { roving, scale, shade, text, visible } from "./elements.js";

const SIDES = [13, 42, 112],
  TALL = 340,
  LARGE = 50,
  LONGEST = 18,
  FEW = 200; // as heatmaps.py has them
const node = (tag, attributes, children = []) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const short = (label) => (label.length > LONGEST ? `${label.slice(0, LONGEST - 1)}\u2026` : label);
const pen = document.createElement("canvas").getContext("2d");
const widthOf = (label, large) => {
  pen.font = `bold ${large ? 16 : 12}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(short(label)).width + 2;
};
const cellSide = (rows, columns, room) => {
  const [smallest, usual, largest] = SIDES,
    side = clamp(Math.floor(room / Math.max(rows, columns)), smallest, largest);
  return side <= usual ? side : Math.max(usual, Math.min(side, Math.floor(TALL / rows)));
};

// The drawing of a map without its cells, which `page.js` fills in, and where these are.
const frame = (source, target, title, room) => {
  const rows = target.length,
    columns = source.length,
    cell = cellSide(rows, columns, room),
    large = cell >= LARGE;
  const left = Math.ceil(Math.max(...target.map((label) => widthOf(label, large)))) + 10;
  const widths = source.map((label) => widthOf(label, large)),
    widest = Math.max(...widths);
  const angle = widest <= cell - 4 ? 0 : cell >= 22 ? 45 : 90,
    turn = (angle * Math.PI) / 180,
    gap = large ? 13 : 9;
  const top = Math.round(widest * Math.sin(turn)) + 13 + gap,
    height = top + rows * cell + 4;
  const middle = (column) => left + (column + 0.5) * cell;
  const right =
    Math.ceil(Math.max(left + columns * cell, ...widths.map((width, i) => middle(i) + width * Math.cos(turn)))) + 4;
  const label = (content, attributes) =>
    node("text", { dy: ".35em", "data-label": "", ...attributes }, [short(content)]);
  const across = source.map((content, i) =>
    label(content, {
      transform: `translate(${middle(i)} ${top - gap}) rotate(${-angle})`,
      ...(!angle && { "text-anchor": "middle" }),
    }),
  );
  const down = target.map((content, i) =>
    label(content, { x: left - 8, y: top + cell * (i + 0.5), "text-anchor": "end" }),
  );
  const mark = (width, height, kind) =>
    node("rect", { "data-mark": "", class: kind, width, height, visibility: "hidden" });
  const sticky = (axes, width, height, labels) =>
    node("g", { "data-stick": axes }, [node("rect", { class: "shade", width, height }), ...labels]);
  const drawing = node(
    "svg",
    {
      viewBox: `0 0 ${right} ${height}`,
      width: right,
      height,
      role: "img",
      "aria-label": title,
      class: cell < 16 ? "small" : large ? "large" : "",
    },
    [
      node("rect", { class: "ground", x: left, y: top, width: columns * cell, height: rows * cell }),
      node("g", { "data-tiles": "" }),
      mark(columns * cell, cell, "band"),
      mark(cell, rows * cell, "band"),
      mark(cell, cell, "spot"),
      sticky("y", right, top, across),
      sticky("x", left, height, down),
      sticky("xy", left, top, []),
    ],
  );
  return [drawing, { width: right, left, top, cell }];
};

// What a screen reader is given: every weight of a small map, else each token with the one that it attends to most.
const spoken = (source, target, title) =>
  make(
    "div",
    { className: "hidden" },
    source.length * target.length <= FEW
      ? [
          make("table", {}, [
            make("caption", { textContent: title }),
            make("tbody", {}, [
              make("tr", {}, [make("td"), ...source.map((label) => make("th", { scope: "col", textContent: label }))]),
              ...target.map((label) =>
                make("tr", {}, [
                  make("th", { scope: "row", textContent: label }),
                  ...source.map(() => make("td", { className: "weight" })),
                ]),
              ),
            ]),
          ]),
        ]
      : [
          make(
            "ul",
            {},
            target.map(() => make("li")),
          ),
        ],
  );

const figureOf = (views, title, room) => {
  const source = views[0].columns.map(visible),
    target = views[0].rows.map(visible);
  const [drawing, data] = frame(source, target, title, room);
  const maps = views.flatMap((view) => view.heads.map((head) => [view.layer, head]));
  const weights = Float64Array.from(
    views.flatMap((view) => view.weights.flat(2)),
    (weight) => weight ?? NaN,
  );
  const figure = make("figure", {}, [
    make("figcaption", {}, [
      text("b", title),
      make("span", { className: "key" }, [
        make("span", {}, ["0", make("span", { className: "ramp" }), make("span", { className: "peak" })]),
      ]),
    ]),
    ...(maps.length > 1 ? [make("div", { className: "choice" })] : []),
    make(
      "div",
      { className: "plot map", tabIndex: 0, role: "group", ariaLabel: `${title}: arrow keys move from value to value` },
      [drawing],
    ),
    make("div", { className: "tip", role: "status" }),
    spoken(source, target, title),
  ]);
  return [figure, { ...data, source, target, maps, weights, shades: 50 }];
};

const groupsOf = (views) => {
  const groups = new Map();
  for (const view of views) {
    const key = JSON.stringify([view.place, view.rows, view.columns]);
    groups.set(key, [...(groups.get(key) ?? []), view]);
  }
  return [...groups.values()];
};

// Draw maps into a box that is on the page already: an overview of layers and heads, and one of them large.
export const drawMaps = (box, views, most = 760, titleOf = (group) => group[0].place) => {
  const room = clamp(box.clientWidth - 110, 180, most);
  const drawn = new Map(groupsOf(views).map((group) => figureOf(group, titleOf(group), room)));
  box.replaceChildren(make("div", { className: "places" }, [...drawn.keys()]));
  enlivenAll(box, (figure) => drawn.get(figure));
};

// The mean of several views of the same tokens, over layers and heads, as one view.
export const meanView = (views) => {
  const maps = views.flatMap((view) => view.weights),
    { place, rows, columns } = views[0];
  const weights = rows.map((_, i) =>
    columns.map((_, j) => maps.reduce((sum, map) => sum + map[i][j], 0) / maps.length),
  );
  return { place, layer: 0, heads: [0], rows, columns, weights: [weights] };
};

// The tokens of a text, each shaded by how much one of them attends to it; the pointer and the keys choose that one.
// `first` is its number, or null for the mean over all.
export const wordAttention = (view, first, about) => {
  const [weights] = view.weights,
    mean = view.columns.map((_, j) => weights.reduce((sum, row) => sum + row[j], 0) / weights.length);
  const caption = make("p", { className: "quiet" }),
    words = make("p", { className: "words", role: "group", ariaLabel: "Tokens, shaded by attention", dir: "auto" });
  const show = (at) => {
    const row = at === null ? mean : weights[at],
      [parts] = shares(row);
    buttons.forEach((button, j) => {
      shade(button, parts[j]).classList.toggle("on", j === at);
      button.ariaLabel = `${view.columns[j]}, ${written(row[j])}`;
    });
    caption.replaceChildren(
      at === null ? "What all tokens attend to" : "What ",
      ...(at === null ? [] : [text("b", visible(view.rows[at])), " attends to"]),
      `: ${about}.`,
    );
  };
  const buttons = view.columns.map((token, j) =>
    make("button", {
      type: "button",
      textContent: visible(token),
      onpointerenter: () => show(j),
      onfocus: () => show(j),
      onclick: () => show(j),
    }),
  );
  words.addEventListener("pointerleave", () => {
    if (!words.contains(document.activeElement)) show(first);
  });
  words.append(...buttons);
  roving(words, buttons);
  show(first);
  return make("div", {}, [caption, words, scale("none", "most")]);
};
