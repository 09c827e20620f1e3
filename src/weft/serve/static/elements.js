// Parts that several answers are shown with. Text is set as text everywhere, never as HTML.
import { clamp, make, move } from "./look/page.js";

export const text = (tag, content, className = "") => make(tag, { textContent: content, className, dir: "auto" });
export const percent = (share) =>
  share >= 0.1 ? `${Math.round(100 * share)} %` : `${(100 * share).toFixed(share < 0.001 ? 2 : 1)} %`;

export const signed = (value) => (Math.abs(value) < 0.005 ? 0 : value).toFixed(2).replace("-", "\u2212");

// How strongly an element is shaded, 0 to 1: the style sheet makes a colour of it.
export const shade = (element, share) => {
  element.style.setProperty("--share", clamp(share || 0, 0, 1).toFixed(3));
  return element;
};

// Rows of a name, a bar and a number: [name, share of the whole bar, number as text, whether it is the answer].
export const bars = (rows, label, long = false) =>
  make(
    "ol",
    { className: long ? "bars long" : "bars", ariaLabel: label },
    rows.map(([name, share, number, best]) =>
      make("li", { className: best ? "best" : "" }, [
        text("span", name, "name"),
        shade(make("span", { className: "bar" }), share),
        text("span", number, "number"),
      ]),
    ),
  );

export const scale = (from, to) =>
  make("p", { className: "key" }, [make("span", {}, [from, make("span", { className: "ramp" }), to])]);
export const visible = (token) =>
  token.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/\s/g, "\u2423") || "\u2205";

export const table = (caption, head, rows) =>
  make("div", { className: "scroll", role: "group", ariaLabel: caption, tabIndex: 0 }, [
    make("table", { className: "sheet" }, [
      make("thead", {}, [
        make(
          "tr",
          {},
          head.map((name) => make("th", { scope: "col", textContent: name })),
        ),
      ]),
      make(
        "tbody",
        {},
        rows.map(([first, ...rest]) =>
          make("tr", {}, [
            make("th", { scope: "row", textContent: first, dir: "auto" }),
            ...rest.map((cell) => text("td", cell, "number")),
          ]),
        ),
      ),
    ]),
  ]);

export const details = (summary, children) =>
  make("details", {}, [make("summary", { textContent: summary }), ...children]);

// A row of buttons of which one is in the order of the Tab key; arrow keys move among them.
export const roving = (group, buttons) => {
  buttons.forEach((button, i) => {
    button.tabIndex = i ? -1 : 0;
  });
  group.addEventListener("focusin", (event) => {
    for (const button of buttons) button.tabIndex = button === event.target ? 0 : -1;
  });
  group.addEventListener("keydown", (event) => {
    const by = move(event),
      at = buttons.indexOf(document.activeElement);
    if (!by || at < 0) return;
    event.preventDefault();
    buttons[clamp(at + by[0] + by[1], 0, buttons.length - 1)].focus();
  });
};
