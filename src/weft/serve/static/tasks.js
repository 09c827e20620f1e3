// What each task asks for and offers: the fields of its form, its options, and how its answers are shown.
import * as show from "./answers.js";

const TEXT = { name: "text", label: "Text", rows: 3 };
const PAIR = { name: "pair", label: "Second text", rows: 2, optional: true };
const number = (name, label, min, max, step, initial) => ({ name, label, min, max, step, initial });

// With several candidates to see, a beam is searched; the recipe's own if it has one.
const BEAM = number("beam", "Beam", 1, 16, 1, (recipe) => Math.max(4, recipe.beam ?? 1));
const WRITING = [
  number("max_length", "Tokens", 1, 512, 1, (recipe) => Math.min(60, recipe.max_length ?? 60)),
  { name: "sample", label: "Sample", check: true, initial: (recipe) => recipe.sample ?? false },
  number("temperature", "Temperature", 0.1, 5, 0.1, (recipe) => recipe.temperature ?? 1),
  number("top_p", "Top p", 0.05, 1, 0.05, (recipe) => recipe.top_p ?? 1),
  number("seed", "Seed", 0, 2 ** 31, 1, (recipe) => recipe.seed ?? 0),
];
const top = (best) => number("top", "Candidates", 1, 50, 1, () => best);

const TASKS = {
  translate: {
    label: "Translate",
    fields: [TEXT],
    options: [BEAM],
    show: show.translation,
    call: ({ beam }) => ({ beam, num_return_sequences: beam, sample: false }),
  },
  lm: {
    label: "Write",
    fields: [{ ...TEXT, label: "Beginning" }],
    options: WRITING,
    run: show.writing,
    show: show.continuation,
    call: ({ max_length, sample, temperature, top_p, seed }) => ({
      max_length,
      beam: 1,
      num_return_sequences: 1,
      sample,
      ...(sample && { temperature, top_p, seed }),
    }),
  },
  mlm: { label: "Fill masks", fields: [{ ...TEXT, insert: "[MASK]" }], options: [top(8)], show: show.fills },
  classify: { label: "Classify", fields: [TEXT, PAIR], show: show.labels },
  tag: { label: "Tag", fields: [TEXT], show: show.tags },
  span: {
    label: "Answer",
    fields: [
      { name: "question", label: "Question", rows: 1 },
      { name: "passage", label: "Passage", rows: 6 },
    ],
    options: [top(3)],
    show: show.span,
  },
  choice: {
    label: "Choose",
    fields: [TEXT, { name: "choices", label: "Choices, one a line", rows: 4, lines: true }],
    show: show.choice,
  },
  electra: { label: "Find replaced words", fields: [TEXT], show: show.replaced },
  skipgram: { label: "Neighbours", fields: [{ ...TEXT, label: "Word", rows: 1 }], show: show.neighbours },
  contrastive: { label: "Similarity of two", fields: [TEXT, { ...PAIR, optional: false }], show: show.labels },
};
const SENTENCES = [
  "A man is eating lunch.",
  "Someone has a meal.",
  "A woman plays the violin.",
  "Music is played on strings.",
  "The stock market fell today.",
  "Share prices dropped.",
];
const EMBED = {
  label: "Similarity",
  fields: [{ name: "texts", label: "Texts, one a line", rows: 6, lines: true }],
  options: [],
  run: show.similarities,
  examples: (model) => {
    const own = model.examples.flatMap((example) => [example.text, example.pair]).filter(Boolean);
    return [{ texts: own.length > 2 ? own : SENTENCES }];
  },
};

const predict = (model) => {
  const known = TASKS[model.task] ?? {
    label: model.task,
    fields: model.fields.map((name) => ({ ...TEXT, name, label: name })),
    show: show.json,
  };
  const optional = (field) => !field.optional || model.required.includes(field.name);
  return {
    options: [],
    call: (options) => options,
    examples: () => model.examples,
    ...known,
    fields: known.fields.filter(optional),
  };
};

// What can be done with a model, by name, the first of them by default.
export const modesOf = (model) => {
  const has = (method) => model.methods.includes(method),
    modes = {};
  if (has("predict")) modes.predict = predict(model);
  if (has("embed")) modes.embed = EMBED;
  if (has("attention")) modes.attention = { ...predict(model), label: "Attention", options: [], run: show.attention };
  return model.task === "contrastive" ? { embed: modes.embed, ...modes } : modes;
};

// The models that can be asked the same thing.
export const peersOf = (model, mode, models) =>
  models.filter((other) => {
    const [mine, its] = [model, other].map((each) => modesOf(each)[mode]);
    const names = (way) => way.fields.map((field) => field.name).join();
    return (
      other !== model &&
      its &&
      (mode === "embed" || other.task === model.task || mode === "attention") &&
      names(its) === names(mine)
    );
  });
