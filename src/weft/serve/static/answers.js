// How answers are shown: each function fills a box with one answer. A call has `model`, `example`, `options` and `ask`.
import { make } from "./look/page.js";
import { drawMaps, meanView, wordAttention } from "./attention.js";
import { bars, details, percent, scale, shade, signed, table, text, visible } from "./elements.js";

const AT_ONCE = 400; // characters of an input whose attention is shown beside its answer, too
const characters = (value) =>
  typeof value === "string" ? value.length : Object.values(value).reduce((sum, part) => sum + characters(part), 0);

const attentionOf = async (call) => {
  if (!call.model.methods.includes("attention") || characters(call.example) > AT_ONCE) return null;
  return call.ask("attention", { example: call.example });
};
const everyHead = (call) =>
  make("p", {}, [make("a", { href: call.link("attention"), textContent: "Every layer and head" })]);
const section = (title, children) => make("section", {}, [make("h3", { textContent: title }), ...children]);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// The words of a text, shaded by the attention of the last layer; first that of the token which `choose` finds.
const addWordAttention = async (box, call, choose = () => -1) => {
  const attention = await attentionOf(call);
  const views = attention?.views.filter((view) => view.rows.length === view.columns.length) ?? [];
  if (!views.length) return;
  const last = views.filter((view) => view.place === views[0].place).at(-1),
    pooled = call.model.model === "bert" ? 0 : null;
  const at = choose(last.rows),
    about = `layer ${last.layer}${last.heads.length > 1 ? `, the mean of ${last.heads.length} heads` : ""}`;
  box.append(section("Attention", [wordAttention(meanView([last]), at < 0 ? pooled : at, about), everyHead(call)]));
};

export const translation = async (box, call, answer) => {
  box.append(text("p", answer.text, "answer-text"));
  if (answer.candidates) {
    const rows = answer.candidates.map(({ text, score }, i) => [
      text,
      Math.exp(score - answer.score),
      signed(score),
      i === 0,
    ]);
    box.append(section("Candidates", [bars(rows, "Candidates with their scores", true)]));
  }
  const attention = await attentionOf(call),
    cross = attention?.views.filter((view) => view.place === "cross") ?? [];
  if (!cross.length) return;
  const maps = make("div"),
    heads = cross[0].heads.length;
  const title =
    cross.length * heads > 1
      ? `mean of ${count(cross.length, "layer")} of ${count(heads, "head")}`
      : "attention to the source";
  box.append(section("Alignment", [maps]));
  drawMaps(maps, [meanView(cross)], 460, () => title);
  if (attention.answer.text !== answer.text)
    maps.prepend(
      text("p", `This is the alignment of what the recipe's own search finds: ${attention.answer.text}`, "quiet"),
    );
  if (cross.length * heads > 1) maps.after(everyHead(call));
};

export const fills = async (box, call, answer) => {
  const parts = call.example.text.split(/\[MASK\]|<mask>/),
    line = make("p", { className: "answer-text", dir: "auto" });
  if (parts.length === answer.fills.length + 1)
    parts.forEach((part, i) =>
      line.append(...(i ? [make("mark", { textContent: answer.fills[i - 1][0].token.trim() })] : []), part),
    );
  else line.textContent = answer.text;
  box.append(
    line,
    ...answer.fills.map((fill, i) => {
      const rows = fill.map(({ token, score }, k) => [
        visible(token.trim()),
        score / fill[0].score,
        percent(score),
        k === 0,
      ]);
      return section(answer.fills.length > 1 ? `Mask ${i + 1}` : "Words for the mask", [
        bars(rows, `Words for mask ${i + 1}`),
      ]);
    }),
  );
  await addWordAttention(box, call, (tokens) => tokens.findIndex((token) => /^\s*(\[MASK\]|<mask>)$/i.test(token)));
};

export const labels = async (box, call, answer) => {
  const chosen = answer.labels ?? [answer.label];
  if (answer.scores) {
    const rows = Object.entries(answer.scores).map(([label, score]) => [
      label,
      score,
      percent(score),
      chosen.includes(label),
    ]);
    box.append(
      text("p", chosen.join(", ") || "no label", "answer-text"),
      bars(rows, "Labels with their probabilities"),
    );
  } else box.append(text("p", String(answer.score), "answer-text"));
  await addWordAttention(box, call);
};

// Words of one entity (B-PER I-PER, as CoNLL has them) are one span; other tags are of one word each.
const spansOf = ({ words, tags }) => {
  const spans = [];
  words.forEach((word, i) => {
    const [, prefix, kind] = /^(?:([BIES])-)?(.*)$/.exec(tags[i] ?? "");
    const last = spans.at(-1);
    if (prefix && "IE".includes(prefix) && last?.kind === kind && last.entity) last.words.push(word);
    else spans.push({ kind, words: [word], entity: Boolean(prefix) });
  });
  return spans;
};
export const tags = async (box, call, answer) => {
  const spans = spansOf(answer),
    kinds = [...new Set(spans.map(({ kind }) => kind))].filter((kind) => kind && kind !== "O").sort();
  box.append(
    make(
      "p",
      { className: "tagged", dir: "auto" },
      spans.flatMap(({ kind, words }) => {
        const content = words.join(" "),
          at = kinds.indexOf(kind);
        return [
          at < 0
            ? content
            : make("span", { className: `tag hue${at % 8}` }, [text("span", content), text("small", kind)]),
          " ",
        ];
      }),
    ),
  );
  const rows = answer.words.map((word, i) => [
    word,
    answer.tags[i],
    ...(answer.scores ? [percent(answer.scores[i])] : []),
  ]);
  box.append(
    details("Every word", [table("Words and tags", ["Word", "Tag", ...(answer.scores ? ["Probability"] : [])], rows)]),
  );
  await addWordAttention(box, call);
};

export const span = async (box, call, answer) => {
  const all = [...call.example.passage],
    marked = answer.start !== null; // offsets count code points
  const part = (from, to) => all.slice(from, to).join("");
  box.append(text("p", marked ? answer.answer : "No answer in this passage", "answer-text"));
  const candidates = answer.candidates ?? [answer];
  const rows = candidates.map((each) => [
    each.answer || "no answer",
    each.score,
    percent(each.score),
    each.answer === answer.answer,
  ]);
  box.append(bars(rows, "Candidates with their probabilities", true));
  if (marked)
    box.append(
      section("In the passage", [
        make("p", { className: "passage", dir: "auto" }, [
          part(0, answer.start),
          make("mark", { textContent: part(answer.start, answer.end) }),
          part(answer.end),
        ]),
      ]),
    );
};

export const choice = async (box, call, answer) => {
  const { choices } = call.example;
  const rows = choices.map((each, i) => [each, answer.scores[i], percent(answer.scores[i]), i === answer.choice]);
  box.append(text("p", choices[answer.choice], "answer-text"), bars(rows, "Choices with their probabilities", true));
};

export const replaced = async (box, call, { tokens, scores }) => {
  const words = tokens.map((token, i) =>
    Object.assign(shade(text("span", visible(token)), scores[i]), { title: percent(scores[i]) }),
  );
  box.append(
    make("p", { className: "words", dir: "auto" }, words),
    scale("original", "replaced"),
    details("Every token", [
      table(
        "Tokens",
        ["Token", "Replaced"],
        tokens.map((token, i) => [visible(token), percent(scores[i])]),
      ),
    ]),
  );
};

export const neighbours = async (box, call, answer) => {
  box.append(
    bars(
      answer.neighbours.map(([word, cosine]) => [word, cosine, cosine.toFixed(3)]),
      "Nearest words with their cosines",
    ),
  );
};

export const json = async (box, call, answer) => {
  box.append(make("pre", { textContent: JSON.stringify(answer, null, 2) }));
};
export const continuation = async (box, call, answer) => {
  box.append(make("p", { className: "written", dir: "auto" }, [text("span", call.example.text, "quiet"), answer.text]));
};

// A continuation as it is written: each token is shaded by how improbable the model held it.
export const writing = async (box, call) => {
  if (!call.model.methods.includes("stream"))
    return continuation(box, call, await call.ask("predict", { examples: call.example, options: call.options }));
  const line = make("p", { className: "written", dir: "auto" }, [text("span", call.example.text, "quiet")]),
    rows = [];
  const words = make("div");
  let total = 0;
  box.append(line, words);
  for await (const [name, data] of call.stream({ prompt: call.example, options: call.options })) {
    if (name !== "token") continue;
    const probability = Math.exp(data.logprob),
      title = `${visible(data.token)} ${percent(probability)}`;
    line.append(
      Object.assign(shade(make("span", { className: "token", textContent: data.text }), -data.logprob / 8), { title }),
    );
    rows.push([visible(data.token), percent(probability), signed(data.logprob)]);
    total += data.logprob;
  }
  words.append(
    scale("expected", "surprising"),
    details(`${count(rows.length, "token")}, log-probability ${signed(total)}`, [
      table("Tokens and their probabilities", ["Token", "Probability", "Log"], rows),
    ]),
  );
};

export const similarities = async (box, call) => {
  const { texts } = call.example,
    { vectors } = await call.ask("embed", { texts, normalize: true });
  const cosine = (i, j) => vectors[i].reduce((sum, value, k) => sum + value * vectors[j][k], 0);
  const values = texts.map((_, i) => texts.map((_, j) => cosine(i, j))),
    name = (i) => String(i + 1);
  const pairs = texts
    .flatMap((_, i) => texts.slice(0, i).map((_, j) => [i, j]))
    .sort(([a, b], [c, d]) => values[c][d] - values[a][b]);
  const low = Math.min(0.9, ...values.flat());
  const cell = (value) => shade(make("td", { textContent: signed(value) }), (value - low) / (1 - low));
  if (pairs.length) {
    const [[i, j]] = pairs;
    box.append(
      make("p", {}, ["Most alike: ", text("b", texts[j]), " and ", text("b", texts[i]), ` (${signed(values[i][j])})`]),
    );
  }
  box.append(
    make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: "Cosines of all pairs" }, [
      make("table", { className: "matrix" }, [
        make("thead", {}, [
          make("tr", {}, [
            make("td"),
            ...texts.map((_, i) => make("th", { scope: "col", textContent: name(i), title: texts[i] })),
          ]),
        ]),
        make(
          "tbody",
          {},
          texts.map((content, i) =>
            make("tr", {}, [
              make("th", { scope: "row", dir: "auto", title: content }, [
                make("span", { className: "quiet", textContent: `${name(i)} ` }),
                content,
              ]),
              ...values[i].map(cell),
            ]),
          ),
        ),
      ]),
    ]),
    scale(signed(low), "1"),
    text("p", `Cosines of vectors of ${vectors[0]?.length ?? 0} numbers.`, "quiet"),
  );
};

export const attention = async (box, call) => {
  const { answer, views } = await call.ask("attention", { example: call.example }),
    maps = make("div");
  const line = answer.text ?? answer.label ?? answer.answer;
  box.append(...(line ? [text("p", line, "answer-text")] : []), maps);
  drawMaps(maps, views);
  box.append(
    text(
      "p",
      "Each row is a token that attends, each column one that is attended to. Every map has its own scale.",
      "quiet",
    ),
  );
};
